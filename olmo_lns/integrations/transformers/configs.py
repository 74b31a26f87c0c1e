"""Configs that carry a scheme: ``lns_llama`` for ``llama``, and so on.

A saved ``config.json`` names our model type, the record, and the factors in plain numbers for the
modeling file that is written beside it. Stock transformers stops at the model type. A stock class that is
named outright (``LlamaForCausalLM(config)`` or ``.from_pretrained``) does not look at it, so the activation
function has a preface that no transformers knows, in the file and in memory: the class stops there and
the message says why. Only while a class of ours builds a model does its config show the plain name.
"""

from __future__ import annotations

import functools
import importlib
import math
import os
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from string import Template
from typing import Any, Iterator

from olmo_lns import __version__
from olmo_lns.errors import CheckpointMismatchError, LNSConfigError
from olmo_lns.integrations.transformers.families import FAMILIES, PREFIX, Family, stock_type
from olmo_lns.record import Record
from olmo_lns.schemes import LNS, parse

__all__ = ["NEEDS", "SERVERS", "available", "building", "config_class", "record_of", "stock_config_class", "to_stock"]

#: In front of the activation's name in a config of ours.
NEEDS = "needs olmo-lns and an Auto class, or trust_remote_code: "
#: ``config._attn_implementation`` of servers that put norms of their own into the model after it was built.
SERVERS = ("vllm", "sglang")

_FILE = "modeling_lns.py"

_building: ContextVar[bool] = ContextVar("olmo_lns_building", default=False)


def available() -> list[Family]:
    """The families of the installed transformers that the integration knows."""
    return [family for family in FAMILIES.values() if family.sub_layers is not None and _module(family) is not None]


def _module(family: Family) -> Any:
    name = f"transformers.models.{family.model_type}.configuration_{family.model_type}"
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and error.name.startswith("transformers.models."):
            return None  # a family newer than this transformers
        raise


def stock_config_class(family: Family) -> Any:
    return getattr(_module(family), f"{family.stem}Config")


def record_of(config: Any) -> Record:
    """What a config says about its weights; Pre-LN where it says nothing."""
    values = getattr(config, "lns_record", None)
    return Record() if values is None else Record.from_dict(values, source="config.json: lns_record")


@contextmanager
def building(config: Any) -> Iterator[None]:
    """While a class of ours builds a model of ``config``.

    :raises LNSConfigError: it is built for a server that would drop the factors.
    """
    asked = getattr(config, "_attn_implementation", None)
    if isinstance(asked, str) and asked.startswith(SERVERS):
        raise LNSConfigError(
            f"attn_implementation {asked!r}: this server replaces the norms of a transformers model by its own, which "
            "know no factor. Serve the folded export (olmo-lns export FOLDER OUT --format hf)."
        )
    token = _building.set(True)
    try:
        yield
    finally:
        _building.reset(token)


class _Activation:
    """A config's activation function: its plain name while a class of ours builds, else with the preface."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, config: Any, owner: Any = None) -> Any:
        if config is None:
            return self
        value = vars(config)[self.name]
        return NEEDS + value if isinstance(value, str) and not _building.get() else value

    def __set__(self, config: Any, value: Any) -> None:
        vars(config)[self.name] = value.removeprefix(NEEDS) if isinstance(value, str) else value


@functools.cache
def config_class(family: Family) -> Any:
    """The class of ``lns_<model_type>``; one for each family."""
    stock = stock_config_class(family)

    class Config(stock):  # type: ignore[misc, valid-type]
        model_type = PREFIX + family.model_type

        @property
        def lns(self) -> str:
            """The scheme of the record."""
            return str(record_of(self).scheme)

        @lns.setter
        def lns(self, scheme: str) -> None:
            if parse(scheme) != record_of(self).scheme:
                raise CheckpointMismatchError(
                    f"config.json: lns says {scheme}, lns_record {record_of(self).scheme}. A scheme is not changed by "
                    "editing either: leave lns_record and lns_factors out for fresh weights, else restore the file."
                )

        def __init__(self, **kwargs: Any) -> None:
            from olmo_lns.integrations.transformers.models import register_models

            written, scheme = kwargs.pop("lns_factors", None), kwargs.pop("lns", None)
            kwargs.pop("auto_map", None)
            kwargs.setdefault("lns_record", Record(LNS if scheme is None else parse(scheme), "", "plain").as_dict())
            super().__init__(**kwargs)
            if scheme is not None:
                self.lns = scheme
            _check(self, written)
            register_models(family)

        def to_dict(self) -> dict[str, Any]:
            values = super().to_dict()
            record = record_of(self)
            values[family.activation] = NEEDS + values[family.activation]
            values["lns"] = str(record.scheme)
            values["lns_factors"] = _factors(self, record)
            values["auto_map"] = _auto_map(family)
            return values

        def save_pretrained(self, save_directory: Any, *args: Any, **kwargs: Any) -> None:
            super().save_pretrained(save_directory, *args, **kwargs)
            _write_modeling_file(save_directory, family)

    setattr(Config, family.activation, _Activation(family.activation))
    Config.__name__ = Config.__qualname__ = f"LNS{family.stem}Config"
    Config.__module__ = "olmo_lns.integrations.transformers.models"  # which resolves the name for pickle
    return Config


def _check(config: Any, written: Any) -> None:
    record = record_of(config)
    if not record.active:
        raise CheckpointMismatchError(
            f"config.json: model_type {config.model_type} with the record {record}: "
            f"weights that need no scheme belong under model_type {stock_type(config.model_type)}"
        )
    expected = _factors(config, record)
    if written is not None and not _same(written, expected):
        raise CheckpointMismatchError(
            f"config.json: lns_factors are not those of {record.scheme} with {config.num_hidden_layers} blocks: "
            "somebody edited one of the two. Restore the file."
        )


def _same(written: Any, expected: Any) -> bool:
    """Equal, but for the last digits of a power: another machine's mathematical library may have written them."""
    if isinstance(expected, dict):
        same_keys = isinstance(written, dict) and written.keys() == expected.keys()
        return same_keys and all(_same(written[key], value) for key, value in expected.items())
    if isinstance(expected, list):
        same_length = isinstance(written, list) and len(written) == len(expected)
        return same_length and all(map(_same, written, expected))
    return isinstance(written, (int, float)) and math.isclose(written, expected, rel_tol=1e-14)


def _factors(config: Any, record: Record) -> dict[str, dict[str, list[float]]]:
    """``{"norm": {"attn": [...], "ff": [...]}, "branch": ...}``: every factor that is not 1, block by block."""
    found: dict[str, dict[str, list[float]]] = {"norm": {}, "branch": {}}
    for _, sub_layer, plan in record.scheme.plans(config.num_hidden_layers):
        found["norm"].setdefault(sub_layer, []).append(plan.norm_scale)
        found["branch"].setdefault(sub_layer, []).append(plan.branch_scale)
    return {
        place: {name: values for name, values in lists.items() if any(value != 1.0 for value in values)}
        for place, lists in found.items()
    }


def to_stock(config: Any, family: Family) -> Any:
    """The family's own config with the same values and without a scheme.

    :raises LNSConfigError: not a config of ours.
    """
    if not isinstance(config, config_class(family)):
        raise LNSConfigError(f"{type(config).__name__}: expected a config of model_type {PREFIX}{family.model_type}")
    config.__class__ = stock_config_class(family)
    del config.lns_record
    return config


def _heads(family: Family) -> dict[str, str]:
    """transformers' class name -> auto class, for the heads that the installed transformers has."""
    import transformers

    from olmo_lns.integrations.transformers.models import HEADS

    names = {f"{family.stem}{head}": auto for head, auto in HEADS.items()}
    return {name: auto for name, auto in names.items() if hasattr(transformers, name)}


def _auto_map(family: Family) -> dict[str, str]:
    """What ``config.json`` says about the file: auto class -> class in it."""
    module = _FILE.removesuffix(".py")
    classes = {auto: f"{module}.LNS{name}" for name, auto in _heads(family).items()}
    return {"AutoConfig": f"{module}.LNS{family.stem}Config", **classes}


def _write_modeling_file(folder: str | os.PathLike[str], family: Family) -> None:
    """For ``trust_remote_code`` where olmo-lns is not installed."""
    assert family.sub_layers is not None
    norms = {name: place.norm for name, place in family.sub_layers.items()}
    branches = {name: place.branch for name, place in family.sub_layers.items()}
    values: dict[str, Any] = {
        "stem": family.stem,
        "version": __version__,
        "needs": NEEDS,
        "places": {"norm": norms, "branch": branches if family.form.pre else norms},
        "outputs": [place.output for place in family.sub_layers.values()],
        "scaled": family.scaled,
        "servers": SERVERS,
        "heads": list(_heads(family)),
        "model_type": PREFIX + family.model_type,
        "activation": family.activation,
        "blocks": family.blocks,
    }
    template = Path(__file__).with_name(f"{_FILE}.in").read_text(encoding="utf-8")
    Path(folder, _FILE).write_text(Template(template).substitute(values), encoding="utf-8")
