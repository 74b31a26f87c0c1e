"""Config and model classes that carry a scheme: ``lns_llama`` for ``llama``, ``LNSLlamaForCausalLM``, and so on.

Nothing but the construction of a model differs from transformers' own class: after transformers has built it, its
blocks get their factors. Forward, state dict, saving, loading and generation are transformers' own.

A saved ``config.json`` names our model type, the record, and the factors in plain numbers for the modeling file that
is written beside it. Stock transformers refuses the model type. A stock class that is named outright
(``LlamaForCausalLM(config)`` or ``.from_pretrained``) does not read the model type. For it the name of the activation
function begins with words that no transformers knows, in the file and in memory: the class stops there, and the name
says why. The config shows the plain name only while a class of ours builds a model.
"""

from __future__ import annotations

import copy
import functools
import math
import os
import sys
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from string import Template
from typing import Any, Iterator

from olmo_lns import __version__
from olmo_lns.errors import CheckpointMismatchError, LNSConfigError
from olmo_lns.integrations.transformers.families import FAMILIES, PREFIX, Family
from olmo_lns.record import Record
from olmo_lns.schemes import LNS, SUB_LAYERS, parse

#: In front of the activation's name in a config of ours.
NEEDS = "needs olmo-lns and an Auto class, or trust_remote_code: "
#: ``config._attn_implementation`` of servers that put norms of their own into the model after it was built.
SERVERS = ("vllm", "sglang")
#: End of a class name -> the auto class that makes it. A family has those that transformers has.
HEADS = {"Model": "AutoModel", "LMHeadModel": "AutoModelForCausalLM"} | {
    f"For{task}": f"AutoModelFor{task}"
    for task in (
        "CausalLM",
        "SequenceClassification",
        "TokenClassification",
        "QuestionAnswering",
        "ImageClassification",
    )
}

_MODELING = "modeling_lns"
#: Attribute of a model whose weights came out of :func:`olmo_lns.integrations.transformers.fold`.
_FOLDED = "lns_folded"

_building: ContextVar[bool] = ContextVar("olmo_lns_building", default=False)


def available() -> list[Family]:
    """The families of the installed transformers that the integration knows."""
    return [family for family in FAMILIES.values() if family.sub_layers and stock_config_class(family) is not None]


def stock_config_class(family: Family) -> Any:
    """None for a family that is newer than the installed transformers."""
    import transformers

    return getattr(transformers, f"{family.stem}Config", None)


def heads(family: Family) -> dict[str, str]:
    """transformers' class name -> auto class, for the heads that the installed transformers has."""
    import transformers

    names = {f"{family.stem}{head}": auto for head, auto in HEADS.items()}
    return {name: auto for name, auto in names.items() if hasattr(transformers, name)}


def record_of(config: Any) -> Record:
    """The record in a config; Pre-LN if it has none."""
    values = getattr(config, "lns_record", None)
    return Record() if values is None else Record.from_dict(values, source="config.json: lns_record")


def record_of_model(model: Any) -> Record:
    """The record of a model. A fresh model from the config of a folded folder is Pre-LN, whatever its config says."""
    record = record_of(getattr(model, "config", None))
    return Record() if record.folded and not getattr(model, _FOLDED, False) else record


def set_folded(model: Any) -> None:
    """Note on ``model`` and the models inside it that their weights are those of a folded folder."""
    from transformers import PreTrainedModel

    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            setattr(module, _FOLDED, True)


@contextmanager
def building(config: Any) -> Iterator[None]:
    """Mark that a class of ours is building a model of ``config``, which then shows its plain activation name.

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


def _activation(name: str) -> property:
    """The config's activation function: plain while a class of ours builds a model, else after :data:`NEEDS`."""

    def shown(config: Any) -> Any:
        value = vars(config)[name]
        return NEEDS + value if isinstance(value, str) and not _building.get() else value

    def stored(config: Any, value: Any) -> None:
        vars(config)[name] = value.removeprefix(NEEDS) if isinstance(value, str) else value

    return property(shown, stored)


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
            written, scheme = kwargs.pop("lns_factors", None), kwargs.pop("lns", None)
            kwargs.pop("auto_map", None)
            kwargs.setdefault("lns_record", Record(LNS if scheme is None else parse(scheme), "", "plain").as_dict())
            super().__init__(**kwargs)
            if scheme is not None:
                self.lns = scheme
            record = record_of(self)
            if not record.active:
                raise CheckpointMismatchError(
                    f"config.json: model_type {self.model_type} with the record {record}: "
                    f"weights that need no scheme belong under model_type {family.model_type}"
                )
            if written is not None and not _same(written, _factors(self)):
                raise CheckpointMismatchError(
                    f"config.json: lns_factors are not those of {record.scheme} with {self.num_hidden_layers} blocks: "
                    "somebody edited one of the two. Restore the file."
                )
            register_models(family)

        def to_dict(self) -> dict[str, Any]:
            values = super().to_dict()
            values[family.activation] = NEEDS + values[family.activation]
            classes = {auto: f"{_MODELING}.LNS{name}" for name, auto in heads(family).items()}
            values["auto_map"] = {"AutoConfig": f"{_MODELING}.{type(self).__name__}", **classes}
            return values | {"lns": self.lns, "lns_factors": _factors(self)}

        def save_pretrained(self, save_directory: Any, *args: Any, **kwargs: Any) -> None:
            super().save_pretrained(save_directory, *args, **kwargs)
            _write_modeling_file(save_directory, family)

    setattr(Config, family.activation, _activation(family.activation))
    Config.__name__ = Config.__qualname__ = f"LNS{family.stem}Config"
    Config.__module__ = __name__  # whose __getattr__ resolves the name for pickle
    return Config


def _same(written: Any, expected: Any) -> bool:
    """Whether two tables of factors are equal up to the last digits, in which mathematical libraries differ."""
    if isinstance(expected, float):
        return isinstance(written, (int, float)) and math.isclose(written, expected, rel_tol=1e-14)
    if type(written) is not type(expected) or len(written) != len(expected):
        return False
    if isinstance(expected, dict):
        return written.keys() == expected.keys() and all(_same(written[key], expected[key]) for key in expected)
    return all(map(_same, written, expected))


def _factors(config: Any) -> dict[str, dict[str, list[float]]]:
    """``{"norm": {"attn": [...], "ff": [...]}, "branch": ...}``: every factor that is not 1, block by block."""
    plans, found = list(record_of(config).scheme.plans(config.num_hidden_layers)), {}
    for place in ("norm", "branch"):
        lists = {name: [getattr(plan, f"{place}_scale") for _, of, plan in plans if of == name] for name in SUB_LAYERS}
        found[place] = {name: values for name, values in lists.items() if any(value != 1.0 for value in values)}
    return found


def _write_modeling_file(folder: str | os.PathLike[str], family: Family) -> None:
    """Write the modeling file that ``trust_remote_code`` runs where olmo-lns is not installed."""
    values: dict[str, Any] = {
        **vars(family),
        "model_type": PREFIX + family.model_type,
        "version": __version__,
        "needs": NEEDS,
        "servers": SERVERS,
        "heads": list(heads(family)),
        "outputs": [place.output for place in family.sub_layers.values()],
        "places": {
            "norm": {name: place.norm for name, place in family.sub_layers.items()},
            "branch": {name: place.branch for name, place in family.sub_layers.items()},
        },
    }
    template = Path(__file__).with_name(f"{_MODELING}.py.in").read_text(encoding="utf-8")
    Path(folder, f"{_MODELING}.py").write_text(Template(template).substitute(values), encoding="utf-8")


@functools.cache
def model_class(stock: Any, family: Family) -> Any:
    """The class of ours for one of transformers' model classes of ``family``."""
    # torch: not before a model is wanted
    from olmo_lns.integrations.transformers.sites import attach_model, redraw

    class Model(stock):
        def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
            with building(config):
                super().__init__(config, *args, **kwargs)
                convert(self, family)
                attach_model(self, record_of(config))

        def _init_weights(self, module: Any) -> None:
            super()._init_weights(module)
            redraw(module)

    Model.config_class = config_class(family)
    Model.__name__ = Model.__qualname__ = f"LNS{stock.__name__}"
    Model.__module__ = __name__
    Model.__doc__ = f"``{stock.__name__}`` under a scheme."
    setattr(sys.modules[__name__], Model.__name__, Model)
    # transformers 5 finds what output_hidden_states= records by the name of the class, filled in as a model is built.
    registry = getattr(sys.modules["transformers.modeling_utils"], "_CAN_RECORD_REGISTRY", None)
    if registry is not None:
        dict.__setitem__(registry, str(Model), stock._can_record_outputs)
    return Model


def convert(model: Any, family: Family) -> None:
    """Make ``model`` and the models of the same config inside it (a head's base model) classes of ours, in place."""
    from transformers import PreTrainedModel

    for module in model.modules():
        if isinstance(module, PreTrainedModel) and module.config is model.config and stock_class(module) is None:
            stock: Any = type(module)
            module.__class__ = model_class(stock, family)


def own_config(model: Any) -> Any:
    """Give ``model`` and the models inside it a copy of their config, which may be shared; return the copy."""
    shared, own = model.config, copy.deepcopy(model.config)
    for module in model.modules():
        if vars(module).get("config") is shared:
            module.config = own
    return own


def stock_class(model: Any) -> type | None:
    """The transformers class from which our class of ``model`` was made; None if its class is not ours."""
    kind = type(model)
    return kind.__mro__[1] if kind.__module__ == __name__ else None


def class_of(config: Any) -> Any:
    """The class of ours that a saved model had.

    :raises LNSConfigError: its config names none.
    """
    for name in getattr(config, "architectures", None) or []:
        if name.startswith("LNS") and hasattr(sys.modules[__name__], name):
            return getattr(sys.modules[__name__], name)
    raise LNSConfigError(f"config.json: architectures {config.architectures} name no class of {config.model_type}")


@functools.cache
def register_models(family: Family) -> None:
    """Register our classes with the auto classes, and by name in ``transformers``, where TRL looks them up."""
    import transformers

    for name, auto in heads(family).items():
        ours = model_class(getattr(transformers, name), family)
        getattr(transformers, auto).register(config_class(family), ours, exist_ok=True)
        setattr(transformers, ours.__name__, ours)


def __getattr__(name: str) -> Any:
    """Make a class of ours when pickle or ``import`` asks for its name."""
    for family in available() if name.startswith("LNS") else ():
        if name == f"LNS{family.stem}Config":
            return config_class(family)
        if name.removeprefix("LNS") in heads(family):
            register_models(family)
            return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
