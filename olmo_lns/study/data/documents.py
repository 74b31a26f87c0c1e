"""The documents of a source of text, one after the other: text files, JSON lines, C4 from the hub."""

from __future__ import annotations

import gzip
import json
import zlib
from itertools import islice
from pathlib import Path
from typing import Iterable, Iterator, Sequence

from olmo_lns.errors import LNSConfigError, one_line

__all__ = ["documents", "files_of"]

#: C4 as the papers' code reads it: streamed, shuffled in this buffer with these seeds.
C4, C4_BUFFER, C4_SEEDS = "allenai/c4", 10_000, {"train": 32, "validation": 42}


def documents(
    kind: str, paths: Sequence[str], *, field_name: str = "text", skip: int = 0, shuffle: bool = True
) -> Iterator[str]:
    """The documents of a source from number ``skip`` on, always in the same order.

    :param kind: ``text`` (a file is a document; folders are searched for ``*.txt``), ``jsonl`` (a line is a document;
        ``.gz`` too), or ``c4`` (``paths`` is the split; streamed from the Hugging Face hub).
    """
    if kind == "c4":
        return _c4(paths[0], skip, shuffle)
    files = files_of(kind, paths)
    found = _texts(files) if kind == "text" else _lines(files, field_name)
    return islice(found, skip, None)


def files_of(kind: str, paths: Sequence[str]) -> list[Path]:
    """The files of a source of kind ``text`` or ``jsonl``.

    :raises LNSConfigError: a path that does not exist, or nothing found.
    """
    endings = (".txt",) if kind == "text" else (".jsonl", ".json", ".jsonl.gz", ".json.gz")
    found: list[Path] = []
    for path in map(Path, paths):
        if path.is_dir():
            found += sorted(p for p in path.rglob("*") if p.is_file() and p.name.endswith(endings))
        elif path.is_file():
            found.append(path)
        else:
            raise LNSConfigError(f"{path}: no such file or folder")
    if not found:
        raise LNSConfigError(f"no document in {', '.join(paths)}: expected {' or '.join('*' + e for e in endings)}")
    return found


def _texts(files: Iterable[Path]) -> Iterator[str]:
    for path in files:
        try:
            yield path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise LNSConfigError(f"{path}: not UTF-8 at byte {error.start}") from None


def _lines(files: Iterable[Path], name: str) -> Iterator[str]:
    for path in files:
        number = 0
        try:
            with (gzip.open if path.suffix == ".gz" else open)(path, "rt", encoding="utf-8") as file:
                for number, line in enumerate(file, start=1):  # noqa: B007
                    if not line.strip():
                        continue
                    if not isinstance(text := json.loads(line)[name], str):
                        raise TypeError(f"{name!r} is {type(text).__name__}")
                    yield text
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            reason = f"expected a JSON object with text under {name!r}: {one_line(error)}"
            raise LNSConfigError(f"{path}, line {number}: {reason}") from None
        except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
            raise LNSConfigError(f"{path}, after line {number}: cannot be read: {one_line(error)}") from None


def _c4(split: str, skip: int, shuffle: bool) -> Iterator[str]:
    try:
        from datasets import load_dataset
    except ImportError:
        raise LNSConfigError("c4 is streamed with the package datasets: pip install datasets") from None
    try:
        stream = load_dataset(C4, "en", split=split, streaming=True)
        if shuffle:
            stream = stream.shuffle(seed=C4_SEEDS.get(split, 0), buffer_size=C4_BUFFER)
        for row in stream.skip(skip):
            yield row["text"]
    except Exception as error:  # the hub's client and its network each raise their own
        raise LNSConfigError(
            f"{C4} cannot be read from the hub: {one_line(error)}. Called again, this goes on where it stopped; "
            "without a network prepare local files: data prepare jsonl FILE …"
        ) from error
