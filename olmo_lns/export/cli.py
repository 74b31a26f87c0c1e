"""The commands ``olmo-lns export`` and ``olmo-lns verify``, which fold a checkpoint for stock software and check it."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Sequence

from olmo_lns.arguments import DTYPES, Parser, as_path, at_least
from olmo_lns.errors import LNSConfigError
from olmo_lns.export import FORMAT_NAMES, HF, MEGATRON
from olmo_lns.schemes import Scheme, parse

if TYPE_CHECKING:  # imports torch
    from olmo_lns.export.interface import Format

_RAW = argparse.RawDescriptionHelpFormatter
_EXPORT = """\
examples:
  olmo-lns export runs/lns/step1000 folded --format olmo           run in stock OLMo
  olmo-lns export runs/lns/step1000 model --format hf --dtype bf16 transformers, vLLM, llama.cpp
  olmo-lns export LNS_1B model --scheme lns                        a stock Llama that was trained with LNS
then compare: olmo-lns verify runs/lns/step1000 model
"""
_VERIFY = """\
Compare an export with what the exporter wrote into export_receipt.json, and with its checkpoint.

The receipt has logits for fixed tokens from before the fold, the rotary frequencies, the dtypes, and whether the head
is tied. The logits are those of the checkpoint under its scheme. A Megatron checkpoint is read as a Llama for this,
because Megatron itself cannot run here. `olmo-lns verify EXPORT` compares the export with its receipt alone, in any
version of transformers. If the checkpoint is given too, checkpoint and export also run on the same random tokens. The
export passes if its config agrees in every setting that changes the model's function, if every weight equals the folded
weight of the checkpoint, and if the logits agree. They agree in fp32 if they differ by at most 1e-5 of the largest
logit, and in bf16 or fp16 if they differ by at most twice the error of the checkpoint itself in that dtype.
"""
_SCHEME = "scheme of a checkpoint whose config names none, such as lns or lns:exponent=0.25"


def main(argv: Sequence[str]) -> int:
    """Run ``olmo-lns export``.

    :raises LNSError: if the export is refused or fails. No output folder remains.
    """
    args = _export_parser().parse_args(argv)
    from olmo_lns.export.convert import new_folder
    from olmo_lns.export.formats import format_of

    folder, out = Path(args.checkpoint), Path(args.output)
    scheme = parse(args.scheme) if args.scheme else None
    source = format_of(args.checkpoint)
    if not folder.exists():
        print(f"There is no folder {folder} here. Asking the Hugging Face hub for {folder}.", file=sys.stderr)
    output_format = _output_format(args, source)
    with new_folder(out) as unfinished:
        line = source.fold_tensors(folder, unfinished, scheme) if output_format == source.name else None
        lines = [line] if line is not None else _export_model(args, scheme, source, output_format, unfinished)
        size = sum(path.stat().st_size for path in unfinished.rglob("*") if path.is_file())
    print(*lines, "The optimizer state was left out, because its moments belong to the unfolded weights.", sep="\n")
    print(f"wrote {out}: {size / 1e6:,.1f} MB")
    return 0


def _output_format(args: argparse.Namespace, source: Format) -> str:
    """Return the name of the format to write, after a check that the options fit it.

    :raises LNSConfigError: if they do not.
    """
    output_format: str = args.format or source.outputs[0]
    if output_format not in source.outputs:
        raise LNSConfigError(
            f"--format {output_format} cannot be written: {Path(args.checkpoint)} is a checkpoint of {source.name}, "
            f"which is exported as {' or '.join(source.outputs)}. Pass --format {source.outputs[0]}, or omit --format."
        )
    if args.tokenizer not in (None, "none") and output_format != HF:
        raise LNSConfigError(
            f"--tokenizer needs --format hf. --format {output_format} stores no tokenizer. Remove --tokenizer."
        )
    if args.dtype in DTYPES and output_format == MEGATRON:
        raise LNSConfigError(
            "--dtype has no effect with --format megatron, because Megatron's own flags choose the dtype when it loads "
            "weights. Remove --dtype."
        )
    return output_format


def _export_model(
    args: argparse.Namespace, scheme: Scheme | None, source: Format, output_format: str, unfinished: Path
) -> list[str]:
    """Open a checkpoint, fold its model, convert it and save it.

    :param unfinished: the folder to fill.
    :returns: the lines for the user.
    """
    from olmo_lns.export import receipt
    from olmo_lns.export.convert import convert, write_tokenizer
    from olmo_lns.export.formats import FORMATS
    from olmo_lns.export.open import open_checkpoint
    from olmo_lns.export.spellings import differences
    from olmo_lns.norm.dtypes import DTYPES as TORCH_DTYPES

    dtype = TORCH_DTYPES.get(args.dtype)
    opened = open_checkpoint(args.checkpoint, scheme)
    trained = opened.scheme
    if trained.is_pre_ln and scheme is None and output_format == source.name:
        raise LNSConfigError(
            f"{Path(args.checkpoint)} names no scheme, so there is nothing to fold. If it was trained under a scheme, "
            "pass it, as in --scheme lns."
        )
    known = receipt.measure_trained(opened, dtype)
    stock = convert(opened, output_format, dtype)
    result = "it is Pre-LN, so nothing was folded" if trained.is_pre_ln else f"{trained} was folded into its weights"
    lines = [f"{type(stock.model).__name__}: {result}"]
    if output_format == HF:
        lines.append(write_tokenizer(unfinished, stock, args.tokenizer))
    FORMATS[output_format].save(stock, unfinished)
    receipt.write(known, stock, unfinished)
    if "not_run" in known:
        lines.append(f"warning: the model did not run here, so its logits were not compared ({known['not_run']})")
    if output_format == HF:
        lines += [f"warning: {sentence}" for sentence in differences(unfinished)]
    return lines


def _export_parser() -> argparse.ArgumentParser:
    description = "Fold the factor into the weights, for software without this package."
    parser = Parser("olmo-lns export", description=description, epilog=_EXPORT, formatter_class=_RAW)
    add = parser.add_argument
    add("checkpoint", help="checkpoint folder of OLMo, OLMo-core, Megatron or transformers")
    add("output", help="folder to create; must not exist")
    add("--format", choices=FORMAT_NAMES, help="default: the format of the checkpoint")
    add("--scheme", help=_SCHEME)
    add("--dtype", choices=("keep", *DTYPES), default="keep", help="dtype of the exported weights")
    add("--tokenizer", help="tokenizer.json, a folder, a hub name, or none; default: the checkpoint's")
    return parser


def verify(argv: Sequence[str]) -> int:
    """Run ``olmo-lns verify``. The exit code is 0 if the export computes the same as the checkpoint, and 1 if not."""
    parser = Parser("olmo-lns verify", description=_VERIFY, formatter_class=_RAW)
    add = parser.add_argument
    add("checkpoint", type=as_path, nargs="?", help="the LNS checkpoint; without it, the export's receipt is enough")
    add("export", type=as_path, help="the folder that olmo-lns export wrote")
    add("--scheme", help=_SCHEME)
    add("--length", type=at_least(2), default=64, help="tokens in each of the 8 prompts (default %(default)s)")
    args = parser.parse_args(argv)
    from olmo_lns.export.verify import verify as verify_export

    scheme = parse(args.scheme) if args.scheme else None
    lines, passed = verify_export(args.checkpoint, args.export, scheme=scheme, length=args.length)
    print(*lines, "PASS" if passed else "FAIL", sep="\n")
    return 0 if passed else 1
