"""Model folders that carry a scheme, made fresh."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Iterator, Mapping

from olmo_lns import hub
from olmo_lns.errors import LNSConfigError, did_you_mean, one_line
from olmo_lns.integrations.transformers.configs import available, config_class, record_of, stock_config_class
from olmo_lns.integrations.transformers.families import FAMILIES, stock_type
from olmo_lns.record import Record
from olmo_lns.schemes import parse
from olmo_lns.schemes.initialization import resolve

__all__ = ["Fresh", "init", "lns_config"]


@dataclass(frozen=True)
class Fresh:
    """A model to make.

    :param source: folder or hub name with a ``config.json``, or a model type. :param changes: of that config.
    :param head: ``CausalLM``, ``SequenceClassification``, …: of transformers' ``AutoModelFor`` classes.
    :param weights: whether to draw them; else config and tokenizer only.
    """

    source: str
    scheme: str = "lns"
    initialization: str = ""
    changes: Mapping[str, Any] = field(default_factory=dict)
    head: str = "CausalLM"
    weights: bool = True
    seed: int = 0
    dtype: str = "fp32"


def init(fresh: Fresh, output: Path) -> list[str]:
    """``olmo-lns hf init``: write config, tokenizer and fresh weights into a new folder; returns the report."""
    import torch
    import transformers

    from olmo_lns.export.atomic import atomic_folder
    from olmo_lns.integrations.transformers.sites import require_supported
    from olmo_lns.norm.dtypes import DTYPES

    config = lns_config(_stock_config(fresh.source, dict(fresh.changes)), fresh.scheme, fresh.initialization)
    family = FAMILIES[stock_type(config.model_type)]
    record = record_of(config)
    require_supported(family, record.scheme, config.num_hidden_layers)
    name = f"AutoModelFor{fresh.head}"
    if not hasattr(transformers, name):
        raise LNSConfigError(f"--head {fresh.head}: transformers has no {name}")
    lines = [f"{config.model_type}: {record}"]
    with atomic_folder(output) as folder:
        lines += _copy_tokenizer(fresh.source, folder)
        if not fresh.weights:
            setattr(config, "dtype" if hasattr(config, "dtype") else "torch_dtype", DTYPES[fresh.dtype])  # since 4.56
            config.save_pretrained(folder)
            return [*lines, f"no weights: build it with {name}.from_config, in {fresh.dtype}"]
        torch.manual_seed(fresh.seed)
        try:
            model = getattr(transformers, name).from_config(config)
        except ValueError as error:
            raise LNSConfigError(f"--head {fresh.head}: {one_line(error)}") from error
        model.to(DTYPES[fresh.dtype]).save_pretrained(folder)
        count = sum(parameter.numel() for parameter in model.parameters())
    return [*lines, f"{type(model).__name__}: {count:,} parameters, {fresh.dtype}, seed {fresh.seed}"]


def _stock_config(source: str, changes: dict[str, Any]) -> Any:
    """The config of a folder or hub name, or the default one of a model type."""
    from transformers import AutoConfig

    known = {family.model_type: family for family in available()}
    if source in known and not Path(source).exists():
        return _of_type(stock_config_class(known[source]), changes)
    try:
        config = AutoConfig.from_pretrained(source, local_files_only=hub.cached_only(source, "config.json"))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise LNSConfigError(f"{source}: no config could be read: {one_line(error)}") from error
    for name, value in changes.items():
        if not hasattr(config, name):
            raise _no_setting(name, config)
        with _values_judged():
            setattr(config, name, value)
    return config


def _of_type(cls: Any, changes: dict[str, Any]) -> Any:
    """A new config. A name that it does not know it keeps as it is; one that it converts it does not."""
    with _values_judged():
        default, config = cls(), cls(**changes)
    for name in changes:
        if name in vars(config) and not hasattr(default, name):
            raise _no_setting(name, default)
    return config


def _no_setting(name: str, config: Any) -> LNSConfigError:
    return LNSConfigError(f"--set {name}: {type(config).__name__} has none{did_you_mean(name, vars(config))}")


@contextmanager
def _values_judged() -> Iterator[None]:
    """What a config class says of its values, in one line; its checks have error classes of their own."""
    try:
        yield
    except Exception as error:
        raise LNSConfigError(f"--set: the config refuses a value: {one_line(error.__cause__ or error)}") from error


def lns_config(config: Any, scheme: str, initialization: str = "") -> Any:
    """A config of ours with the values of a stock one.

    :raises LNSConfigError: a family that the integration does not know, or a config that has a scheme.
    """
    known = {family.model_type: family for family in available()}
    if config.model_type not in known:
        raise LNSConfigError(
            f"model_type {config.model_type!r}{did_you_mean(config.model_type, known)}: "
            f"the transformers integration knows {', '.join(known)}"
        )
    if (present := record_of(config)).folded:
        raise LNSConfigError(f"the config is of {present}: start from one without a scheme")
    wanted = parse(scheme)
    if wanted.is_pre_ln:
        raise LNSConfigError("scheme preln is the stock model: transformers' from_config makes it")
    record = Record(wanted, "", resolve(initialization, wanted))
    values = {name: value for name, value in config.to_dict().items() if name not in ("model_type", "architectures")}
    with _values_judged():
        return config_class(known[config.model_type])(**values, lns_record=record.as_dict())


def _copy_tokenizer(source: str, folder: Path) -> list[str]:
    from transformers import AutoTokenizer
    from transformers.utils import cached_file

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
