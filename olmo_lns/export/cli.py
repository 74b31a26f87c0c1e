"""``olmo-lns export``: fold the factor into the weights, for software that knows nothing of it."""

from __future__ import annotations

import argparse
import re
import signal
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Callable, Iterator, Sequence

from olmo_lns.errors import LNSConfigError

__all__ = ["FORMATS", "main"]

FORMATS = ("olmo", "olmo-unsharded", "hf", "megatron")
SOURCES = ("auto", "olmo", "megatron", "authors")

_EPILOG = """\
examples:
  olmo-lns export runs/lns/step1000 folded --format olmo           run in stock OLMo
  olmo-lns export runs/lns/step1000 model --format hf --dtype bf16 transformers, vLLM, llama.cpp
  olmo-lns export folded lns-again --unfold                        continue training under LNS
then compare: olmo-lns verify runs/lns/step1000 model
"""

#: Writes the export into a folder and returns what is worth telling, one line each.
Job = Callable[[Path], list[str]]


def main(argv: Sequence[str]) -> int:
    """Run ``olmo-lns export``.

    :raises LNSError: refused or failed; nothing is left behind.
    """
    parser = _parser()
    args = parser.parse_args(argv)
    if args.unfold and args.format == "hf":
        parser.error("--unfold writes a checkpoint to train on: --format olmo or megatron")
    with _terminable():
        lines = run(args)
    print("\n".join(lines))
    return 0


def run(args: argparse.Namespace) -> list[str]:
    """Do what the parsed arguments say; returns the report, one line each."""
    from olmo_lns.export.atomic import atomic_folder
    from olmo_lns.export.fold import DTYPES, Rounding

    rounding = Rounding()
    dtype = None if args.dtype == "keep" else DTYPES[args.dtype]
    job = _job(args, dtype, rounding)
    with atomic_folder(args.output) as folder:
        lines = job(folder)
        size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    if rounding.changed:
        where = f" ({rounding.where})" if rounding.worst else ""
        lines.append(f"{len(rounding.changed)} tensors changed; largest relative error {rounding.worst:.2e}{where}")
    return [*lines, f"wrote {args.output}: {size / 1e6:,.1f} MB, SHA256SUMS"]


def _job(args: argparse.Namespace, dtype: Any, rounding: Any) -> Job:
    from olmo_lns.export import authors, jobs, megatron, unfold
    from olmo_lns.export.olmo import OLMoCheckpoint, is_olmo

    source = Path(args.checkpoint)
    if not source.is_dir():
        raise LNSConfigError(f"{source} is not a folder: give a checkpoint folder")
    kind = args.source
    if kind == "auto":
        kind = "olmo" if is_olmo(source) else "megatron" if megatron.is_megatron(source) else ""
    if not kind:
        raise LNSConfigError(
            f"{source} holds neither config.yaml (OLMo) nor an iter_* folder or metadata.json (Megatron): not a "
            "checkpoint (for the paper's LLaMA checkpoints say --source authors)"
        )
    if args.unfold:
        return unfold.job(source, kind, args, rounding)
    if kind == "authors":
        return authors.job(source, args, dtype, rounding)
    if kind == "megatron":
        return megatron.job(source, args, dtype, rounding)
    checkpoint = OLMoCheckpoint.open(source, exponent=args.exponent)
    return jobs.olmo_job(checkpoint, args, dtype, rounding)


@contextmanager
def _terminable() -> Iterator[None]:
    """SIGTERM unwinds like Ctrl-C, so that a batch system's stop leaves nothing behind."""

    def stop(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    try:
        before = signal.signal(signal.SIGTERM, stop)
    except ValueError:  # not the main thread: the caller handles signals
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def byte_size(text: str) -> int:
    """``5GB`` -> 5,000,000,000; units are powers of 1000."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]?)B?", text.strip(), re.IGNORECASE)
    if not match or float(match[1]) <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size like 500MB or 5GB")
    return int(float(match[1]) * 1000 ** ("KMG".index(match[2].upper()) + 1 if match[2] else 0))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="olmo-lns export",
        description=__doc__,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("checkpoint", help="checkpoint folder")
    add("output", help="folder to create; must not exist")
    add("--format", choices=FORMATS, default="olmo", help="default: olmo, in the checkpoint's own layout")
    add("--dtype", choices=("keep", "fp32", "bf16", "fp16"), default="keep", help="of the weights written")
    add("--source", choices=SOURCES, default="auto", help="what the checkpoint is; 'authors': the paper's LLaMA code")
    add("--exponent", type=float, help="of the factor, only where the checkpoint does not say it (0.5 is the paper's)")
    hub = parser.add_argument_group("Hugging Face")
    hub.add_argument("--tokenizer", help="tokenizer.json, a folder, a hub name, or none; default: the checkpoint's own")
    hub.add_argument("--max-shard-size", type=byte_size, default="5GB", help="of a safetensors file (default 5GB)")
    inverse = parser.add_argument_group("the inverse")
    inverse.add_argument("--unfold", action="store_true", help="divide the factor out again, to train on under LNS")
    inverse.add_argument("--drop-optimizer", action="store_true", help="do not carry the optimizer's moments over")
    inverse.add_argument("--convert-preln", action="store_true", help="also for a model that never was LNS")
    return parser
