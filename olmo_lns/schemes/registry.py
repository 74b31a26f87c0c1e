"""A scheme is a row of the table of schemes, with values for the row's parameters.

Flags, configs and checkpoints spell a scheme ``lns``, ``lns:exponent=0.25`` or ``name:key=value,key=value``. Parameters
that have their default are omitted.
"""

from __future__ import annotations

import functools
import importlib.metadata
import math
import reprlib
from dataclasses import dataclass, field
from typing import Any, Callable, Iterator, Mapping

from olmo_lns.errors import LNSConfigError, did_you_mean
from olmo_lns.schemes.plan import SUB_LAYERS, Plan

__all__ = ["Definition", "Parameter", "Scheme", "as_scheme", "define_scheme", "definition", "names", "parse"]


@dataclass(frozen=True)
class Parameter:
    """A numeric parameter of a scheme.

    :param default: default value. Its type, int or float, is the type of the parameter.
    :param check: function that raises ValueError for a number that is not allowed.
    :param help: what the parameter means.
    """

    default: float
    check: Callable[[float], None]
    help: str

    def read(self, value: Any) -> float:
        """Convert a number or its text to the type of the parameter.

        :raises ValueError: if ``value`` has another type, or is a number that is not allowed.
        """
        kind = type(self.default)
        wrong = f"expected {'an integer' if kind is int else 'a finite number'}, found {reprlib.repr(value)}"
        if isinstance(value, bool) or not isinstance(value, (int, float, str)):
            raise ValueError(wrong)
        try:
            number, exact = kind(value), float(value)
        except (ValueError, OverflowError):
            raise ValueError(wrong) from None
        if not math.isfinite(exact) or number != exact:
            raise ValueError(wrong)
        self.check(number)
        return number


@dataclass(frozen=True)
class Definition:
    """A row of the table of schemes.

    :param name: the name that flags and configs use.
    :param title: the name in the start-up line.
    :param label: the name in figures and tables.
    :param plan_function: called as ``plan_function(layer_number, n_layers, sub_layer, **parameters)``, where
        layer_number is 1-based and global. It returns the :class:`~olmo_lns.schemes.plan.Plan` of that sub-layer.
    :param source: paper and equation.
    :param parameters: name of a parameter -> its description.
    :param initialization: default initialization of the residual output projections
        (:mod:`olmo_lns.schemes.depth_factor`).
    """

    name: str
    title: str
    label: str
    plan_function: Callable[..., Plan]
    source: str
    parameters: Mapping[str, Parameter] = field(default_factory=dict)
    initialization: str = "plain"


_table: dict[str, Definition] = {}


#: Ends of a value of OLMo's flag that name the norm under the scheme, as in ``lns_rms``.
NORM_SUFFIXES = ("_rms", "_default", "_low_precision")


def define_scheme(definition: Definition) -> Definition:
    """Add a row to the table of schemes.

    docs/own-scheme.md has an example.

    :returns: ``definition``.
    :raises ValueError: if the name is taken, has other characters than lower-case letters and underscores, or ends in
        the name of a norm, as in ``mine_rms``.
    """
    if definition.name.endswith(NORM_SUFFIXES):
        raise ValueError(
            f"A scheme cannot be named {definition.name!r}. OLMo's flag reads the end of this name as the type of the "
            "norm. Choose a name that does not end in _rms, _default or _low_precision."
        )
    if definition.name in _table or not definition.name.replace("_", "").isalpha() or not definition.name.islower():
        raise ValueError(
            f"A scheme cannot be named {definition.name!r}. The name must be new, and consist of lower-case letters "
            "and underscores. Choose another name."
        )
    _table[definition.name] = definition
    return definition


#: Entry points of installed packages that name a module with :func:`define_scheme` calls.
GROUP = "olmo_lns.schemes"


@functools.cache
def _load_entry_points() -> None:
    for entry in importlib.metadata.entry_points(group=GROUP):
        try:
            entry.load()
        except Exception as error:
            raise LNSConfigError(
                f"The entry point {entry.name!r} of the group {GROUP} ({entry.value}) could not be loaded: {error}. "
                "Repair or uninstall its package."
            ) from error


def names() -> tuple[str, ...]:
    """Return the names of all schemes. Pre-LN is the first, and those of other packages are the last."""
    _load_entry_points()
    return tuple(_table)


def definition(name: str) -> Definition:
    """Return the row of a scheme: ``definition("lns").title`` is ``"LayerNorm Scaling"``.

    :raises LNSConfigError: if there is no such scheme. The message suggests the most similar name.
    """
    if name not in _table:
        _load_entry_points()
    if name not in _table:
        raise LNSConfigError(f"Unknown scheme {name!r}{did_you_mean(name, _table)}. Use one of {', '.join(_table)}.")
    return _table[name]


@dataclass(frozen=True)
class Scheme:
    """The normalization of a model's blocks. Two equal schemes build the same model.

    Make a scheme with :meth:`of`, or from a text with :func:`parse`.

    :param name: name of a row of the table.
    :param values: pairs of a parameter and its value, for every parameter of the row.

    Example: ``Scheme.of("lns", exponent=0.25)``.
    """

    name: str
    values: tuple[tuple[str, float], ...] = ()

    @classmethod
    def of(cls, name: str, /, **parameters: Any) -> Scheme:
        """Return a scheme with these parameters, and the defaults of the others: ``Scheme.of("lns", exponent=0.25)``.

        :raises LNSConfigError: if the scheme or a parameter is unknown, or a value is not allowed.
        """
        row = definition(name)
        for key in parameters:
            if key not in row.parameters:
                known = f"Use one of {', '.join(row.parameters)}" if row.parameters else "It has none"
                raise LNSConfigError(
                    f"The scheme {name!r} has no parameter {key!r}{did_you_mean(key, row.parameters)}. {known}."
                )
        values = []
        for key, parameter in row.parameters.items():
            try:
                values.append((key, parameter.read(parameters.get(key, parameter.default))))
            except ValueError as error:
                raise LNSConfigError(f"The parameter {key!r} of the scheme {name!r} cannot be set: {error}.") from None
        return cls(name, tuple(values))

    @property
    def definition(self) -> Definition:
        return definition(self.name)

    @property
    def parameters(self) -> dict[str, float]:
        return dict(self.values)

    @property
    def is_pre_ln(self) -> bool:
        """True for stock Pre-LN, for which the framework is not changed."""
        return self.name == "preln"

    @property
    def arguments(self) -> str:
        """The spelling of the parameters that differ from their default, such as ``exponent=0.25``."""
        defaults = self.definition.parameters
        return ",".join(f"{key}={value!r}" for key, value in self.values if value != defaults[key].default)

    def __str__(self) -> str:
        return f"{self.name}:{self.arguments}" if self.arguments else self.name

    def plan(self, layer_number: int, n_layers: int, sub_layer: str) -> Plan:
        """Return the plan of one sub-layer: ``LNS.plan(4, 16, "attn").norm_scale`` is 0.5.

        :param layer_number: number of the block, 1-based and global.
        :param n_layers: number of blocks in the whole model.
        :param sub_layer: ``attn`` or ``ff``.
        """
        return self.definition.plan_function(layer_number, n_layers, sub_layer, **self.parameters)

    def plans(self, n_layers: int) -> Iterator[tuple[int, str, Plan]]:
        """Yield ``(layer_number, sub_layer, plan)`` for every sub-layer, in the order in which they run."""
        for layer_number in range(1, n_layers + 1):
            for sub_layer in SUB_LAYERS:
                yield layer_number, sub_layer, self.plan(layer_number, n_layers, sub_layer)

    def norm_count(self, n_layers: int) -> int:
        """Return the number of norms in the blocks of a model."""
        return sum(plan.norm_count for _, _, plan in self.plans(n_layers))

    def only_scales_norms(self, n_layers: int) -> bool:
        return all(plan.only_scales_norms for _, _, plan in self.plans(n_layers))

    def require_only_scales_norms(self, n_layers: int, *, framework: str) -> None:
        """Check that the scheme multiplies norms, and does nothing else.

        :param n_layers: number of blocks.
        :param framework: what supports no other scheme, as in ``"torchtitan"``.
        :raises LNSConfigError: if it does something else, or if it is Pre-LN.
        """
        if self.is_pre_ln or not self.only_scales_norms(n_layers):
            raise LNSConfigError(
                f"The scheme is {self}, which does not only multiply the norms before attention and feed-forward. "
                f"{framework} supports lns with any exponent, such as lns:exponent=0.25, and schemes of your own that "
                "only multiply norms."
            )

    def folds_into_pre_ln(self, n_layers: int) -> bool:
        return all(plan.folds_into_pre_ln for _, _, plan in self.plans(n_layers))


def parse(text: str, exponent: Any = None) -> Scheme:
    """Return the scheme that a text spells: ``parse("lns:exponent=0.25").parameters`` is ``{"exponent": 0.25}``.

    :param exponent: the exponent, where a config has a field of its own for it. None takes the one in the text.
    :raises LNSConfigError: if the text has another form, if it spells another exponent than ``exponent``, or for the
        reasons of :meth:`Scheme.of`.
    """
    name, colon, rest = str(text).strip().partition(":")
    parameters: dict[str, str] = {}
    for item in rest.split(",") if colon else []:
        key, equals, value = item.partition("=")
        if not equals or not key.strip() or not value.strip() or key.strip() in parameters:
            raise LNSConfigError(
                f"The scheme {text!r} cannot be read at {item!r}. Write name:key=value, or name:key=value,key=value."
            )
        parameters[key.strip()] = value.strip()
    scheme = Scheme.of(name, **parameters)
    if exponent is None:
        return scheme
    # This also compares an exponent that equals the default, which the spelling of a scheme omits.
    if colon and scheme.parameters.get("exponent", exponent) != float(exponent):
        raise LNSConfigError(f"scheme={text} and exponent={exponent} contradict each other. Set one of them.")
    return Scheme.of(name, **{**scheme.parameters, "exponent": exponent})


def as_scheme(scheme: Any) -> Scheme:
    """Return the scheme that a text spells, or a scheme as it is.

    :raises LNSConfigError: if ``scheme`` has another type, or spells no scheme.
    """
    if not isinstance(scheme, (str, Scheme)):
        raise LNSConfigError(
            f"The scheme has the type {type(scheme).__name__}. Expected a text such as 'lns:exponent=0.25', or a "
            "Scheme. To pass an input of the model, name it: apply(model, example=tokens)."
        )
    return parse(scheme) if isinstance(scheme, str) else scheme
