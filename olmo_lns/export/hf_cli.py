"""``olmo-lns hf``: model folders for transformers that carry a scheme."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any, Sequence

from olmo_lns.dtypes import NAMES as DTYPES
from olmo_lns.errors import LNSConfigError

__all__ = ["main"]

_EPILOG = """\
examples:
  olmo-lns hf init Qwen/Qwen2.5-0.5B --scheme lns -o qwen-lns         fresh weights in that shape
  olmo-lns hf init llama --set num_hidden_layers=12 --set hidden_size=768 --scheme lns -o out
  olmo-lns hf import runs/lns/step1000 -o model      an OLMo, OLMo-core or Megatron checkpoint, to train on
"""


def main(argv: Sequence[str]) -> int:
    """Run ``olmo-lns hf``. :raises LNSError: refused or failed; nothing is left behind."""
    args = _parser().parse_args(argv)
    try:
        import transformers  # noqa: F401
    except ImportError as error:
        raise LNSConfigError(f"transformers cannot be imported ({error}): pip install 'olmo-lns[hf]'") from error
    from olmo_lns.export.hf_folders import Fresh, init
    from olmo_lns.integrations.transformers import register

    register()
    if args.what == "init":
        shape = Fresh(args.source, args.scheme, args.initialization, dict(args.set), args.head, args.weights, args.seed)
        lines = init(replace(shape, dtype=args.dtype or shape.dtype), args.output)
    else:
        lines = _import(args)
    print("\n".join([*lines, f"wrote {args.output}"]))
    return 0


def _import(args: argparse.Namespace) -> list[str]:
    from olmo_lns.export.atomic import atomic_folder
    from olmo_lns.export.options import HF, Options
    from olmo_lns.export.sources import source_of
    from olmo_lns.norm.dtypes import DTYPES

    options = Options(str(args.output), HF, DTYPES.get(args.dtype or ""), tokenizer=args.tokenizer)
    write = source_of(args.checkpoint).train(args.checkpoint, options)
    with atomic_folder(args.output) as folder:
        return write(folder)


def _setting(text: str) -> tuple[str, Any]:
    import yaml

    name, equals, value = text.partition("=")
    if not equals or not name:
        raise argparse.ArgumentTypeError(f"expected name=value, found {text!r}")
    return name, yaml.safe_load(value)


def _parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="olmo-lns hf", description=__doc__, epilog=_EPILOG, formatter_class=raw)
    commands = parser.add_subparsers(dest="what", required=True, metavar="what")
    init = commands.add_parser("init", help="a model with fresh weights, to train from scratch")
    init.add_argument("source", help="folder or hub name with a config.json, or a model type such as llama")
    init.add_argument("--scheme", default="lns", help="such as lns or lns:exponent=0.25 (default %(default)s)")
    init.add_argument("--initialization", default="", help="plain (default), scaled, depth_scaled or upstream")
    init.add_argument("--set", type=_setting, action="append", default=[], metavar="name=value", help="of the config")
    init.add_argument("--head", default="CausalLM", help="CausalLM (default), SequenceClassification, …")
    init.add_argument("--seed", type=int, default=0, help="of the fresh weights (default %(default)s)")
    init.add_argument("--no-weights", dest="weights", action="store_false", help="config and tokenizer only")
    brought = commands.add_parser("import", help="a checkpoint as it was trained, to train on in transformers")
    brought.add_argument("checkpoint", type=Path, help="of OLMo, OLMo-core or Megatron; a folded one is unfolded")
    brought.add_argument("--tokenizer", help="tokenizer.json, a folder, a hub name, or none; default: its own")
    for command in (init, brought):
        command.add_argument("-o", "--output", type=Path, required=True, help="folder to create; must not exist")
        command.add_argument("--dtype", choices=DTYPES, help="of the weights (default: fp32; import: as they are)")
    return parser
