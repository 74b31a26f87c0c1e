"""``olmo-lns export`` and ``verify``: checkpoints folded for stock software."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Sequence

from olmo_lns.arguments import DTYPES, Parser, at_least
from olmo_lns.errors import LNSConfigError
from olmo_lns.export import FORMATS, HF, MEGATRON
from olmo_lns.schemes import parse

_RAW = argparse.RawDescriptionHelpFormatter
_EXPORT = """\
examples:
  olmo-lns export runs/lns/step1000 folded --format olmo           run in stock OLMo
  olmo-lns export runs/lns/step1000 model --format hf --dtype bf16 transformers, vLLM, llama.cpp
  olmo-lns export LNS_1B model --scheme lns                        a stock Llama that was trained with LNS elsewhere
To compare: olmo-lns verify runs/lns/step1000 model
"""
_VERIFY = """\
Run a checkpoint and its export on the same random tokens and compare.

The export passes if
- every setting that changes the function is equal,
- every weight equals the weight of a new fold,
- no logit differs by more than 1e-5 of the largest logit, in fp32; in bf16 and fp16, by more than twice the rounding
  error of the checkpoint itself in that dtype.
"""
_SCHEME = "scheme of a checkpoint whose config names none: lns, or lns:exponent=0.25"


def main(argv: Sequence[str]) -> int:
    """Run ``olmo-lns export``. :raises LNSError: an export that is refused or fails. Partial files are removed."""
    args = _export_parser().parse_args(argv)
    from olmo_lns.export import megatron
    from olmo_lns.export.convert import WRITTEN_AS, convert, finished, write_tokenizer
    from olmo_lns.export.open import kind_of, module_of, open_checkpoint
    from olmo_lns.norm.dtypes import DTYPES as TORCH

    folder, out, dtype = Path(args.checkpoint), Path(args.output), TORCH.get(args.dtype)
    kind, scheme = kind_of(folder), parse(args.scheme) if args.scheme else None
    format_name = args.format or WRITTEN_AS[kind][0]
    if format_name not in WRITTEN_AS[kind]:
        formats = " or ".join(WRITTEN_AS[kind])
        raise LNSConfigError(f"--format {format_name}: {folder} is of kind {kind}, which is written as {formats}.")
    if args.tokenizer not in (None, "none") and format_name != HF:
        raise LNSConfigError(f"--tokenizer belongs to --format hf; --format {format_name} stores none. Leave it out.")
    if dtype is not None and format_name == MEGATRON:
        raise LNSConfigError("--dtype is for other formats: Megatron loads weights in the dtype of its own flags.")
    with finished(out) as part:
        if format_name == MEGATRON:
            name = megatron.save_folded(folder, part, scheme)
            lines = [f"Megatron torch_dist, {name}: load it with --finetune, without --layernorm-scaling"]
        else:
            opened = open_checkpoint(folder, scheme)
            trained = opened.scheme
            if trained.is_pre_ln and scheme is None and format_name == kind:
                raise LNSConfigError(
                    f"{folder} names no scheme: nothing to fold. Add --scheme lns if its weights need it."
                )
            converted = convert(opened, format_name, dtype)
            summary = "Pre-LN, nothing to fold" if trained.is_pre_ln else f"{trained} folded into the weights"
            lines = [f"{type(converted.model).__name__}: {summary}"]
            lines += [write_tokenizer(part, converted, args.tokenizer)] if format_name == HF else []
            module_of(format_name).save(converted, part)
        size = sum(path.stat().st_size for path in part.rglob("*") if path.is_file())
    print(*lines, "no optimizer state: its moments belong to the unfolded weights", sep="\n")
    print(f"wrote {out}: {size / 1e6:,.1f} MB")
    return 0


def _export_parser() -> argparse.ArgumentParser:
    about = "Fold the factor into the weights, for software without this package."
    parser = Parser("olmo-lns export", description=about, epilog=_EXPORT, formatter_class=_RAW)
    add = parser.add_argument
    add("checkpoint", help="checkpoint folder of OLMo, OLMo-core, Megatron or transformers")
    add("output", help="folder to create; must not exist")
    add("--format", choices=FORMATS, help="default: the checkpoint's own")
    add("--scheme", help=_SCHEME)
    add("--dtype", choices=("keep", *DTYPES), default="keep", help="dtype of the written weights")
    add("--tokenizer", help="tokenizer.json, a folder, a hub name, or none; default: the checkpoint's own")
    return parser


def verify(argv: Sequence[str]) -> int:
    """Run ``olmo-lns verify``. Exit code 0: the export computes what the checkpoint computes; 1: a difference."""
    parser = Parser("olmo-lns verify", description=_VERIFY, formatter_class=_RAW)
    add = parser.add_argument
    add("checkpoint", type=Path, help="LNS checkpoint")
    add("export", type=Path, help="folder that olmo-lns export wrote")
    add("--scheme", help=_SCHEME)
    add("--length", type=at_least(2), default=64, help="tokens in each of the 8 prompts (default %(default)s)")
    args = parser.parse_args(argv)
    from olmo_lns.export.verify import verify as compare

    scheme = parse(args.scheme) if args.scheme else None
    lines, passed = compare(args.checkpoint, args.export, scheme=scheme, length=args.length)
    print(*lines, "PASS" if passed else "FAIL", sep="\n")
    return 0 if passed else 1
