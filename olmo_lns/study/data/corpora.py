"""The corpora: tokenizer, vocabulary, end of document and files of each; and by what the files of a run are known."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Callable, Sequence

from olmo_lns.errors import LNSConfigError
from olmo_lns.study.data import text

__all__ = ["BUILT", "BYTES", "DOLMA", "Built", "Corpus", "fingerprint"]


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


SAMPLE = 1 << 20
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


def fingerprint(paths: Sequence[str]) -> list[dict[str, Any]]:
    """Name, bytes and a hash of the first and last MiB of each data file; the same data give the same list."""
    found = []
    for path in map(Path, paths):
        if not path.is_file():
            raise LNSConfigError(f"data file {path} does not exist: set OLMO_DATA_DIR to the folder of the .npy files")
        size = path.stat().st_size
        with path.open("rb") as file:
            digest = hashlib.sha256(file.read(SAMPLE))
            file.seek(max(0, size - SAMPLE))
            digest.update(file.read(SAMPLE))
        found.append({"name": path.name, "bytes": size, "sha256": digest.hexdigest()[:16]})
    return found
