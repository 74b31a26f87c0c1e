"""Real text that every Python has, as OLMo's tokenised memmaps: the standard library and its manual.

Bytes are tokens (0–255) and 256 ends a document. The same Python gives the same files, bit for bit.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Iterable, Iterator

import numpy as np

from olmo_lns.errors import LNSConfigError

__all__ = ["EOS_TOKEN_ID", "VOCAB_SIZE", "DemoData", "build", "documents"]

#: One past the bytes: ends a document.
EOS_TOKEN_ID = 256
#: Tokens in the vocabulary: 256 bytes and the end of document.
VOCAB_SIZE = 257
#: Every so many documents, one is held out.
HELDOUT_EVERY = 16
#: Not in every distribution of Python, generated on the machine, or not Python's own.
_SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "ensurepip", "__pycache__"}
_TRAIN, _HELDOUT, _TOKENIZER, _MANIFEST = "train.npy", "heldout.npy", "tokenizer.json", "data.json"


@dataclass(frozen=True)
class DemoData:
    """:param train, heldout: flat uint16 memmaps of token ids, without a header, as OLMo reads them.
    :param tokenizer: a ``tokenizer.json`` that maps text to the same ids.
    :param train_tokens, heldout_tokens: their lengths.
    :param digest: SHA-256 over both files, in hex.
    """

    train: Path
    heldout: Path
    tokenizer: Path
    train_tokens: int
    heldout_tokens: int
    digest: str
    python: str
    vocab_size: int = VOCAB_SIZE
    eos_token_id: int = EOS_TOKEN_ID


def documents() -> Iterator[tuple[str, bytes]]:
    """``(name, text)`` of each document in a fixed order: manual topics, then library sources."""
    from pydoc_data.topics import topics

    for name in sorted(topics):
        yield f"pydoc_data/{name}", topics[name].encode("utf-8")
    root = Path(sysconfig.get_path("stdlib"))
    names = {path.relative_to(root).as_posix(): path for path in root.rglob("*.py")}
    for name in sorted(names):
        parts = name.split("/")
        generated = parts[-1].startswith("_sysconfigdata") or parts[0].startswith("config-")
        # pydoc_data.topics is the manual again, in quotes.
        if _SKIPPED.isdisjoint(parts) and not generated and parts[0] != "pydoc_data":
            yield name, names[name].read_bytes()


def build(folder: str | os.PathLike[str]) -> DemoData:
    """Write ``train.npy``, ``heldout.npy``, ``tokenizer.json`` and ``data.json``; about two seconds.

    Files that are there and belong to this Python are kept. One document in sixteen is held out.

    :raises LNSConfigError: this Python comes without its sources.
    """
    folder = Path(folder).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    if (known := _existing(folder)) is not None:
        return known
    split: tuple[list[bytes], list[bytes]] = ([], [])
    for number, (_, text) in enumerate(documents()):
        split[number % HELDOUT_EVERY == HELDOUT_EVERY - 1].append(text)
    if len(split[0]) < 100:
        raise LNSConfigError(
            f"found {len(split[0])} documents under {sysconfig.get_path('stdlib')}, expected the standard library's "
            "sources: use a Python that ships them"
        )
    digest = hashlib.sha256()
    train_tokens = _write_tokens(folder / _TRAIN, split[0], digest)
    heldout_tokens = _write_tokens(folder / _HELDOUT, split[1], digest)
    _write_tokenizer(folder / _TOKENIZER)
    facts = {
        "train_tokens": train_tokens,
        "heldout_tokens": heldout_tokens,
        "digest": digest.hexdigest(),
        "python": platform.python_version(),
    }
    # Last, so that an interrupted build is not taken for a complete one.
    (folder / _MANIFEST).write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
    return _located(folder, facts)


def _located(folder: Path, facts: dict[str, Any]) -> DemoData:
    return DemoData(train=folder / _TRAIN, heldout=folder / _HELDOUT, tokenizer=folder / _TOKENIZER, **facts)


def _existing(folder: Path) -> DemoData | None:
    if not (folder / _MANIFEST).is_file():
        return None
    data = _located(folder, json.loads((folder / _MANIFEST).read_text(encoding="utf-8")))
    sizes = {data.train: data.train_tokens, data.heldout: data.heldout_tokens}
    whole = all(path.is_file() and path.stat().st_size == 2 * tokens for path, tokens in sizes.items())
    return data if whole and data.tokenizer.is_file() and data.python == platform.python_version() else None


def _write_tokens(path: Path, texts: Iterable[bytes], digest: hashlib._Hash) -> int:
    end = np.array([EOS_TOKEN_ID], dtype=np.uint16)
    tokens = np.concatenate([part for text in texts for part in (np.frombuffer(text, np.uint8).astype(np.uint16), end)])
    tokens.astype("<u2").tofile(path)
    digest.update(tokens.astype("<u2").tobytes())
    return len(tokens)


def _write_tokenizer(path: Path) -> None:
    """A byte-level tokenizer without merges, whose ids are the byte values."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    # ByteLevel writes each byte as one character: itself where printable, else the next after 255.
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = iter(range(256, 512))
    vocab = {chr(byte if byte in printable else next(spare)): byte for byte in range(256)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>"])
    tokenizer.save(str(path))
