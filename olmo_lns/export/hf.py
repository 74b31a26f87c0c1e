"""``olmo-lns hf``: model folders for transformers that carry a scheme, to train on."""

from __future__ import annotations

import argparse
import contextlib
from pathlib import Path
from typing import Any, Sequence

from olmo_lns.arguments import seed
from olmo_lns.errors import LNSConfigError, did_you_mean
from olmo_lns.schemes import parse

_EXAMPLES = """\
examples:
  olmo-lns hf init llama --set num_hidden_layers=12 --set hidden_size=768 -o out   needs no network
  olmo-lns hf init Qwen/Qwen2.5-0.5B --scheme lns -o qwen-lns        the shape of a model of the hub, fresh weights
"""


def main(argv: Sequence[str]) -> int:
    """Run ``olmo-lns hf``. :raises LNSError: refused or failed; nothing is left behind."""
    args = _parser().parse_args(argv)
    import torch
    from transformers import AutoModelForCausalLM

    from olmo_lns.export.convert import finished
    from olmo_lns.export.open import readable
    from olmo_lns.integrations.transformers import apply

    scheme = parse(args.scheme)
    if scheme.is_pre_ln:
        raise LNSConfigError("scheme preln is the stock model. transformers' from_config makes it.")
    with finished(args.output) as part:
        with readable(args.source):
            config = _stock_config(args.source, dict(args.set))
            if not scheme.keeps_forward(getattr(config.get_text_config(), "num_hidden_layers", None) or 1):
                raise LNSConfigError(
                    f"scheme {scheme}: a transformers model takes those that only multiply norms, as lns."
                )
            torch.manual_seed(args.seed)
            built = AutoModelForCausalLM.from_config(config)
        model: Any = apply(built, scheme, trained=False)
        model.float().save_pretrained(part)
        tokenizer = _copy_tokenizer(args.source, part)
    count = sum(parameter.numel() for parameter in model.parameters())
    print(f"{model.config.model_type}: {scheme}", tokenizer, sep="\n")
    print(f"{type(model).__name__}: {count:,} parameters, seed {args.seed}", f"wrote {args.output}", sep="\n")
    return 0


def _stock_config(source: str, changes: dict[str, Any]) -> Any:
    """Return the config of a folder or hub name, or the default one of a model type, with ``changes``.

    :raises LNSConfigError: it has no such setting, or is no name.
    """
    from transformers import CONFIG_MAPPING, AutoConfig

    fresh, here = source in CONFIG_MAPPING, Path(source).exists() or "/" in source
    if not fresh and not here and (hint := did_you_mean(source, CONFIG_MAPPING)):
        raise LNSConfigError(f"{source}{hint} is neither a folder nor a model type of transformers.")
    fresh = fresh and not here
    config = AutoConfig.for_model(source) if fresh else AutoConfig.from_pretrained(source)
    for name in changes:
        if not hasattr(config, name):
            raise LNSConfigError(f"--set {name}: {type(config).__name__} has none{did_you_mean(name, vars(config))}")
    if fresh:  # built again, so that what it derives from these values is right
        return AutoConfig.for_model(source, **changes)
    for name, value in changes.items():
        setattr(config, name, value)
    return config


def _copy_tokenizer(source: str, out: Path) -> str:
    """Save the tokenizer of a folder or hub name, if it has one. :returns: one line that says so."""
    from transformers import CONFIG_MAPPING, AutoTokenizer

    # A folder without one, and the name of a model type, would be looked up on the hub.
    if any(Path(source).glob("tokenizer*")) if Path(source).is_dir() else source not in CONFIG_MAPPING:
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
    for number in (int, float):  # YAML reads 010 as 8 and 1e-5 as text
        with contextlib.suppress(ValueError):
            return name, number(value)
    return name, yaml.safe_load(value)


def _parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    about = "Make model folders for transformers that carry a scheme."
    parser = argparse.ArgumentParser("olmo-lns hf", description=about, epilog=_EXAMPLES, formatter_class=raw)
    commands = parser.add_subparsers(dest="what", required=True, metavar="what")
    init = commands.add_parser("init", help="a model with fresh weights, to train from scratch")
    init.add_argument("source", help="a model type such as llama, or a folder or hub name with a config.json")
    init.add_argument("--scheme", default="lns", help="such as lns or lns:exponent=0.25 (default %(default)s)")
    init.add_argument("--set", type=_setting, action="append", default=[], metavar="name=value", help="of the config")
    init.add_argument("--seed", type=seed, default=0, help="of the fresh weights (default %(default)s)")
    init.add_argument("-o", "--output", type=Path, required=True, help="folder to create; must not exist")
    return parser
