"""``olmo-lns hf``: model folders for transformers that carry a scheme, to train on."""

from __future__ import annotations

import argparse
import contextlib
from pathlib import Path
from typing import Any, Sequence

from olmo_lns.arguments import DTYPES, seed
from olmo_lns.errors import LNSConfigError, did_you_mean, one_line
from olmo_lns.schemes import parse

_EXAMPLES = """\
examples:
  olmo-lns hf init llama --set num_hidden_layers=12 --set hidden_size=768 -o out   needs no network
  olmo-lns hf init Qwen/Qwen2.5-0.5B --scheme lns -o qwen-lns        the shape of a model of the hub, fresh weights
"""


def main(argv: Sequence[str]) -> int:
    """Run ``olmo-lns hf``. :raises LNSError: refused or failed; nothing is left behind."""
    args = _parser().parse_args(argv)
    from olmo_lns.export.convert import finished
    from olmo_lns.integrations.transformers import register

    register()
    with finished(args.output) as part:
        lines = _init(args, part)
    print("\n".join([*lines, f"wrote {args.output}"]))
    return 0


def _init(args: argparse.Namespace, out: Path) -> list[str]:
    """Write config, tokenizer and fresh weights, and return the report."""
    import torch
    import transformers

    from olmo_lns.integrations.transformers import apply
    from olmo_lns.integrations.transformers.models import under_scheme
    from olmo_lns.norm.dtypes import DTYPES as TORCH

    scheme = parse(args.scheme)
    if scheme.is_pre_ln:
        raise LNSConfigError("scheme preln is the stock model. transformers' from_config makes it.")
    config, name = _stock_config(args.source, dict(args.set)), f"AutoModelFor{args.head}"
    if not hasattr(transformers, name):
        raise LNSConfigError(f"--head {args.head}: transformers has no {name}")
    torch.manual_seed(args.seed)
    dtype = args.dtype or "fp32"
    if not args.weights:
        config = under_scheme(config, scheme, args.initialization or "plain")
        config.dtype = TORCH[dtype]
        config.save_pretrained(out)
        built = f"no weights: build it with {name}.from_config, which finds its norms"
        return [f"{config.model_type}: {scheme}", _copy_tokenizer(args.source, out), built]
    try:
        built = getattr(transformers, name).from_config(config)
    except (ValueError, TypeError, AttributeError) as error:
        raise LNSConfigError(f"{name} cannot be built from this config: {one_line(error)}") from error
    model: Any = apply(built, scheme, initialization=args.initialization, trained=False)
    tokenizer = _copy_tokenizer(args.source, out)
    model.to(TORCH[dtype]).save_pretrained(out)
    count = sum(parameter.numel() for parameter in model.parameters())
    size = f"{type(model).__name__}: {count:,} parameters, {dtype}, seed {args.seed}"
    return [f"{model.config.model_type}: {scheme}", tokenizer, size]


def _stock_config(source: str, changes: dict[str, Any]) -> Any:
    """Return the config of a folder or hub name, or the default one of a model type, with ``changes``.

    :raises LNSConfigError: it cannot be read, has a scheme, or has no such setting.
    """
    from transformers import CONFIG_MAPPING, AutoConfig

    fresh = source in CONFIG_MAPPING and not Path(source).exists()
    hint = did_you_mean(source, CONFIG_MAPPING)
    if hint and not fresh and "/" not in source and not Path(source).exists():
        raise LNSConfigError(f"{source}{hint} is neither a folder nor a model type of transformers.")
    try:
        config = AutoConfig.for_model(source) if fresh else AutoConfig.from_pretrained(source)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise LNSConfigError(f"{source}: no config could be read: {one_line(error)}") from error
    if str(config.model_type).startswith("lns_"):
        raise LNSConfigError(f"{source} has a scheme already. Start from the stock config that it was made from.")
    for name in changes:
        if not hasattr(config, name):
            raise LNSConfigError(f"--set {name}: {type(config).__name__} has none{did_you_mean(name, vars(config))}")
    try:
        if fresh:  # built again, so that what it derives from these values is right
            return AutoConfig.for_model(source, **changes)
        for name, value in changes.items():
            setattr(config, name, value)
    except Exception as error:  # each config class has errors of its own
        raise LNSConfigError(f"--set: the config refuses a value: {one_line(error.__cause__ or error)}") from error
    return config


def _copy_tokenizer(source: str, out: Path) -> str:
    from transformers import CONFIG_MAPPING, AutoTokenizer

    if source in CONFIG_MAPPING and not Path(source).exists():
        return f"no tokenizer: {source} is a model type"
    if Path(source).is_dir() and not any(Path(source).glob("tokenizer*")):
        return f"no tokenizer: {source} has none"
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        tokenizer = AutoTokenizer.from_pretrained(source)
        tokenizer.save_pretrained(out)
        return f"tokenizer: {type(tokenizer).__name__} of {source}"
    return f"no tokenizer: {source} has none that could be loaded"


def _setting(text: str) -> tuple[str, Any]:
    import yaml

    name, equals, value = text.partition("=")
    if not equals or not name:
        raise argparse.ArgumentTypeError(f"expected name=value, found {text!r}")
    return name, yaml.safe_load(value)


def _parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    about = "Make model folders for transformers that carry a scheme."
    parser = argparse.ArgumentParser("olmo-lns hf", description=about, epilog=_EXAMPLES, formatter_class=raw)
    commands = parser.add_subparsers(dest="what", required=True, metavar="what")
    init = commands.add_parser("init", help="a model with fresh weights, to train from scratch")
    init.add_argument("source", help="a model type such as llama, or a folder or hub name with a config.json")
    init.add_argument("--scheme", default="lns", help="such as lns or lns:exponent=0.25 (default %(default)s)")
    init.add_argument("--initialization", default="", help="plain (default) or upstream")
    init.add_argument("--set", type=_setting, action="append", default=[], metavar="name=value", help="of the config")
    init.add_argument("--head", default="CausalLM", help="CausalLM (default), SequenceClassification, …")
    init.add_argument("--seed", type=seed, default=0, help="of the fresh weights (default %(default)s)")
    init.add_argument("--no-weights", dest="weights", action="store_false", help="config and tokenizer only")
    init.add_argument("-o", "--output", type=Path, required=True, help="folder to create; must not exist")
    init.add_argument("--dtype", choices=DTYPES, help="of the weights (default fp32)")
    return parser
