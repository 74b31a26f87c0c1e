"""``olmo-lns export``: fold the factor into the weights, for software that knows nothing of it."""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import re
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any, Iterator, Sequence

from olmo_lns.arguments import DTYPES
from olmo_lns.errors import LNSConfigError
from olmo_lns.schemes.factor import check_exponent

if TYPE_CHECKING:
    from olmo_lns.export.sources import Source

__all__ = ["FORMATS", "main", "source_of"]

#: As :mod:`olmo_lns.export.sources` and the sources, which load torch: ``--help`` does not.
FORMATS = ("olmo", "olmo-unsharded", "olmo-core", "hf", "megatron")
SOURCES = ("auto", "olmo", "olmo-core", "megatron", "transformers", "authors")

_EPILOG = """\
examples:
  olmo-lns export runs/lns/step1000 folded --format olmo           run in stock OLMo
  olmo-lns export runs/lns/step1000 model --format hf --dtype bf16 transformers, vLLM
  olmo-lns export folded lns-again-unsharded --unfold              continue training under LNS
then compare: olmo-lns verify runs/lns/step1000 model
"""


def main(argv: Sequence[str]) -> int:
    """Run ``olmo-lns export``.

    :raises LNSError: refused or failed; nothing is left behind.
    """
    parser = _parser()
    args = parser.parse_args(argv)
    if args.unfold and args.format == "hf":
        parser.error("--unfold writes a checkpoint to train on: --format olmo, olmo-core or megatron")
    _give_memory_back()
    with _terminable():
        lines = run(args)
    print("\n".join(lines))
    return 0


def run(args: argparse.Namespace) -> list[str]:
    """Do what the parsed arguments say; returns the report, one line each."""
    from olmo_lns.export.atomic import atomic_folder
    from olmo_lns.export.sources import HF, Options
    from olmo_lns.export.transformers_folder import write_card
    from olmo_lns.norm import dtypes

    checkpoint = Path(args.checkpoint)
    source = source_of(checkpoint, args.source)
    options = Options(
        output=args.output,
        format=_format_of(source, checkpoint, args.format, unfold=args.unfold),
        dtype=dtypes.DTYPES.get(args.dtype),
        exponent=args.exponent,
        tokenizer=args.tokenizer,
        max_shard_size=args.max_shard_size,
        drop_optimizer=args.drop_optimizer,
    )
    if args.tokenizer not in (None, "none") and options.format != HF:
        raise LNSConfigError(
            f"--tokenizer is of --format hf; --format {options.format} has no place for it: leave it out"
        )
    if args.unfold and options.dtype is not None:
        raise LNSConfigError("--unfold keeps the dtype of the checkpoint: training continues from it")
    rounding = options.rounding
    target = (source.unfold if args.unfold else source.fold)(checkpoint, options)
    with atomic_folder(options.output) as folder:
        lines = target.write(folder)
        if options.format == HF:
            write_card(folder, checkpoint.resolve().name, rounding)
        size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    if changed := len(rounding.multiplied | rounding.cast):
        where = f" ({rounding.where})" if rounding.worst else ""
        lines.append(f"{changed} tensors changed; largest relative error {rounding.worst:.2e}{where}")
    return [*lines, f"wrote {options.output}: {size / 1e6:,.1f} MB, SHA256SUMS"]


def source_of(folder: Path, name: str = "auto") -> Source:
    """The kind called ``name``, or the one that recognises ``folder``.

    :raises LNSConfigError: no folder, or no checkpoint.
    """
    from olmo_lns.checkpoints import record_in
    from olmo_lns.checkpoints.olmo import checkpoints_inside
    from olmo_lns.export.megatron import Megatron
    from olmo_lns.export.model_folder import Authors, ModelFolder
    from olmo_lns.export.olmo import OLMo
    from olmo_lns.export.olmo_core import OLMoCore

    if not folder.is_dir():
        raise LNSConfigError(f"{folder} is not a folder: give a checkpoint folder")
    for source in (OLMo(), OLMoCore(), Megatron(), ModelFolder(), Authors()):
        if source.name == name or (name == "auto" and source.recognises(folder)):
            return source
    if inside := checkpoints_inside(folder):
        raise LNSConfigError(f"{folder} is the folder of a run; give one of its checkpoints: {', '.join(inside)}")
    record = record_in(folder) if (folder / "config.json").is_file() else None
    if record is not None and record.folded:
        raise LNSConfigError(
            f"{folder} is a Hugging Face export ({record}), stock and final: expected a checkpoint, such as the one it "
            "was made from"
        )
    raise LNSConfigError(
        f"{folder} holds neither config.yaml (OLMo), config.json and model_and_optim (OLMo-core) nor an iter_* "
        "folder or metadata.json (Megatron): not a checkpoint (the paper's LLaMA: say --source authors)"
    )


def _format_of(source: Source, folder: Path, asked: str | None, *, unfold: bool) -> str:
    """The format ``asked`` for, or the checkpoint's own. :raises LNSConfigError: it is not written in that."""
    formats = source.formats[:1] if unfold else source.formats
    if asked is not None and asked not in formats and not (unfold and formats == ("hf",)):
        how = "is unfolded into" if unfold else "is written as"
        raise LNSConfigError(f"--format {asked}: {folder} is {source.kind}, which {how} {' or '.join(formats)}")
    return asked or formats[0]


def _give_memory_back() -> None:
    """Let glibc return every large block when it is freed; it would keep those of up to 32 MB for itself."""
    mmap_threshold = -3  # M_MMAP_THRESHOLD of malloc.h
    with contextlib.suppress(OSError, AttributeError):  # another C library has no such setting
        ctypes.CDLL(None).mallopt(mmap_threshold, 1 << 20)


@contextlib.contextmanager
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


def exponent(text: str) -> float:
    """:raises argparse.ArgumentTypeError: not a number, or out of range."""
    try:
        return check_exponent(float(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def byte_size(text: str) -> int:
    """``5GB`` -> 5,000,000,000; units are powers of 1000."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]?)B?", text.strip(), re.IGNORECASE)
    power = "KMG".index(match[2].upper()) + 1 if match and match[2] else 0
    size = int(float(match[1]) * 1000**power) if match else 0
    if size < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size like 500MB or 5GB")
    return size


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="olmo-lns export",
        description="Fold the factor into the weights, for software that knows nothing of it.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("checkpoint", help="checkpoint folder")
    add("output", help="folder to create; must not exist")
    add("--format", choices=FORMATS, help="default: the checkpoint's own, in its layout")
    add("--dtype", choices=("keep", *DTYPES), default="keep", help="of the weights written")
    add("--source", choices=SOURCES, default="auto", help="what the checkpoint is; 'authors': the paper's LLaMA code")
    add(
        "--exponent",
        type=exponent,
        help="of the factor, only where the checkpoint does not say it (0.5 is the paper's)",
    )
    add(
        "--max-shard-size",
        type=byte_size,
        help="of a file of weights, and of the memory that they take meanwhile (default 5GB)",
    )
    hub = parser.add_argument_group("Hugging Face")
    hub.add_argument("--tokenizer", help="tokenizer.json, a folder, a hub name, or none; default: the checkpoint's own")
    inverse = parser.add_argument_group("the inverse")
    inverse.add_argument("--unfold", action="store_true", help="divide the factor out again, to train on under LNS")
    inverse.add_argument("--drop-optimizer", action="store_true", help="do not carry the optimizer's moments over")
    return parser
