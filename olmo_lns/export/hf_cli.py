"""``olmo-lns hf``: model folders for transformers that carry a scheme."""

from __future__ import annotations

import argparse
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Iterator, Sequence

from olmo_lns import hub
from olmo_lns.arguments import DTYPES, seed
from olmo_lns.errors import LNSConfigError, did_you_mean, one_line
from olmo_lns.record import Record
from olmo_lns.schemes import parse
from olmo_lns.schemes.initialization import resolve

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
    from olmo_lns.integrations.transformers import register

    register()
    lines = _init(args) if args.what == "init" else _import(args)
    print("\n".join([*lines, f"wrote {args.output}"]))
    return 0


def _import(args: argparse.Namespace) -> list[str]:
    from olmo_lns.export.atomic import atomic_folder
    from olmo_lns.export.cli import source_of
    from olmo_lns.export.sources import HF, Options
    from olmo_lns.norm.dtypes import DTYPES

    options = Options(str(args.output), HF, DTYPES.get(args.dtype or ""), tokenizer=args.tokenizer)
    target = source_of(args.checkpoint).train(args.checkpoint, options)
    with atomic_folder(args.output) as folder:
        return target.write(folder)


def _init(args: argparse.Namespace) -> list[str]:
    """Config, tokenizer and fresh weights; returns the report."""
    import torch
    import transformers

    from olmo_lns.export.atomic import atomic_folder
    from olmo_lns.export.transformers_folder import set_dtype
    from olmo_lns.integrations.transformers.configs import record_of
    from olmo_lns.integrations.transformers.families import FAMILIES, stock_type
    from olmo_lns.integrations.transformers.sites import require_supported
    from olmo_lns.norm.dtypes import DTYPES

    config, dtype = _lns_config(_stock_config(args.source, dict(args.set)), args), args.dtype or "fp32"
    record = record_of(config)
    require_supported(FAMILIES[stock_type(config.model_type)], record.scheme, config.num_hidden_layers)
    name = f"AutoModelFor{args.head}"
    if not hasattr(transformers, name):
        raise LNSConfigError(f"--head {args.head}: transformers has no {name}")
    lines = [f"{config.model_type}: {record}"]
    with atomic_folder(args.output) as folder:
        lines += _copy_tokenizer(args.source, folder)
        if not args.weights:
            set_dtype(config, DTYPES[dtype])
            config.save_pretrained(folder)
            return [*lines, f"no weights: build it with {name}.from_config, in {dtype}"]
        torch.manual_seed(args.seed)
        try:
            model = getattr(transformers, name).from_config(config)
        except ValueError as error:
            raise LNSConfigError(f"--head {args.head}: {one_line(error)}") from error
        model.to(DTYPES[dtype]).save_pretrained(folder)
        count = sum(parameter.numel() for parameter in model.parameters())
    return [*lines, f"{type(model).__name__}: {count:,} parameters, {dtype}, seed {args.seed}"]


def _stock_config(source: str, changes: dict[str, Any]) -> Any:
    """The config of a folder or hub name, or the default one of a model type."""
    from transformers import AutoConfig

    from olmo_lns.integrations.transformers.configs import available, stock_config_class

    known = {family.model_type: family for family in available()}
    if source in known and not Path(source).exists():
        cls = stock_config_class(known[source])
        with _values_judged():
            config, made = cls(), cls(**changes)
        # A name that it does not know it keeps as it is; one that it converts it does not.
        unknown = [name for name in changes if name in vars(made) and not hasattr(config, name)]
    else:
        try:
            config = made = AutoConfig.from_pretrained(source, local_files_only=hub.cached_only(source, "config.json"))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise LNSConfigError(f"{source}: no config could be read: {one_line(error)}") from error
        unknown = [name for name in changes if not hasattr(config, name)]
        for name in changes.keys() - unknown:
            with _values_judged():
                setattr(config, name, changes[name])
    for name in unknown:
        raise LNSConfigError(f"--set {name}: {type(config).__name__} has none{did_you_mean(name, vars(config))}")
    return made


@contextmanager
def _values_judged() -> Iterator[None]:
    """What a config class says of its values, in one line; its checks have error classes of their own."""
    try:
        yield
    except Exception as error:
        raise LNSConfigError(f"--set: the config refuses a value: {one_line(error.__cause__ or error)}") from error


def _lns_config(config: Any, args: argparse.Namespace) -> Any:
    """A config of ours with the values of a stock one.

    :raises LNSConfigError: a family that the integration does not know, or a config that has a scheme.
    """
    from olmo_lns.integrations.transformers.configs import available, config_class, record_of
    from olmo_lns.integrations.transformers.families import stock_type

    known = {family.model_type: family for family in available()}
    if (present := record_of(config)).active:
        raise LNSConfigError(
            f"{args.source} is of {present} already: start from the stock config that it was made from, such as a hub "
            f"name, or from the type {stock_type(config.model_type)} and --set"
        )
    if config.model_type not in known:
        raise LNSConfigError(
            f"model_type {config.model_type!r}{did_you_mean(config.model_type, known)}: "
            f"the transformers integration knows {', '.join(known)}"
        )
    wanted = parse(args.scheme)
    if wanted.is_pre_ln:
        raise LNSConfigError("scheme preln is the stock model: transformers' from_config makes it")
    record = Record(wanted, "", resolve(args.initialization, wanted))
    dropped = ("model_type", "architectures", "lns", "lns_record")  # of a folded folder, whose shape is taken
    values = {name: value for name, value in config.to_dict().items() if name not in dropped}
    with _values_judged():
        return config_class(known[config.model_type])(**values, lns_record=record.as_dict())


def _copy_tokenizer(source: str, folder: Path) -> list[str]:
    from transformers import AutoTokenizer
    from transformers.utils import cached_file

    from olmo_lns.integrations.transformers.families import FAMILIES

    names = ("tokenizer.json", "tokenizer_config.json", "vocab.json", "tokenizer.model")
    quiet = {"_raise_exceptions_for_missing_entries": False, "_raise_exceptions_for_connection_errors": False}
    if source in FAMILIES or not any(cached_file(source, name, **quiet) for name in names):
        return [f"no tokenizer: {source} has none"]
    try:
        tokenizer = AutoTokenizer.from_pretrained(source)
    except (OSError, ValueError, KeyError, TypeError) as error:
        return [f"no tokenizer: {one_line(error)}"]
    tokenizer.save_pretrained(folder)
    return [f"tokenizer: {type(tokenizer).__name__} of {source}"]


def _setting(text: str) -> tuple[str, Any]:
    import yaml

    name, equals, value = text.partition("=")
    if not equals or not name:
        raise argparse.ArgumentTypeError(f"expected name=value, found {text!r}")
    return name, yaml.safe_load(value)


def _parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    about = "Make model folders for transformers that carry a scheme."
    parser = argparse.ArgumentParser(prog="olmo-lns hf", description=about, epilog=_EPILOG, formatter_class=raw)
    commands = parser.add_subparsers(dest="what", required=True, metavar="what")
    init = commands.add_parser("init", help="a model with fresh weights, to train from scratch")
    init.add_argument("source", help="folder or hub name with a config.json, or a model type such as llama")
    init.add_argument("--scheme", default="lns", help="such as lns or lns:exponent=0.25 (default %(default)s)")
    init.add_argument("--initialization", default="", help="plain (default), scaled, depth_scaled or upstream")
    init.add_argument("--set", type=_setting, action="append", default=[], metavar="name=value", help="of the config")
    init.add_argument("--head", default="CausalLM", help="CausalLM (default), SequenceClassification, …")
    init.add_argument("--seed", type=seed, default=0, help="of the fresh weights (default %(default)s)")
    init.add_argument("--no-weights", dest="weights", action="store_false", help="config and tokenizer only")
    brought = commands.add_parser("import", help="a checkpoint as it was trained, to train on in transformers")
    brought.add_argument("checkpoint", type=Path, help="of OLMo, OLMo-core or Megatron; a folded one is unfolded")
    brought.add_argument("--tokenizer", help="tokenizer.json, a folder, a hub name, or none; default: its own")
    for command in (init, brought):
        command.add_argument("-o", "--output", type=Path, required=True, help="folder to create; must not exist")
        command.add_argument("--dtype", choices=DTYPES, help="of the weights (default: fp32; import: as they are)")
    return parser
