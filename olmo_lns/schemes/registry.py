"""A scheme as a value: a row of the table with values for its parameters.

Flags, configs and checkpoints spell a scheme ``lns``, ``lns:exponent=0.25`` or ``name:key=value,key=value``. The
spelling omits parameters at their default.
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

__all__ = ["Definition", "Parameter", "Scheme", "as_scheme", "define", "definition", "names", "parse"]


@dataclass(frozen=True)
class Parameter:
    """A numeric parameter of a scheme.

    :param default: default value; its type, int or float, is the parameter's.
    :param check: raises ValueError for a number that is not allowed.
    """

    default: float
    check: Callable[[float], None]
    help: str

    def read(self, value: Any) -> float:
        """Return a number or its text as a value. :raises ValueError: a wrong type, or a number that is not allowed."""
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
    """A row of the table.

    :param plan_function: ``plan(layer_number, n_layers, sub_layer, **parameters)``, layer_number 1-based and global.
    :param title: name in the start-up line. :param label: name in figures and tables.
    :param source: paper and equation.
    :param initialization: default initialization of the residual output projections
        (:mod:`olmo_lns.schemes.initialization`).
    """

    name: str
    title: str
    label: str
    plan_function: Callable[..., Plan]
    source: str
    parameters: Mapping[str, Parameter] = field(default_factory=dict)
    initialization: str = "plain"


_table: dict[str, Definition] = {}


def define(definition: Definition) -> Definition:
    """Add a row to the table of schemes; docs/own-scheme.md has an example.

    :raises ValueError: the name is taken, or has other characters than lower-case letters and underscores.
    """
    if definition.name in _table or not definition.name.replace("_", "").isalpha() or not definition.name.islower():
        raise ValueError(f"scheme name {definition.name!r}: taken, or not lower-case letters")
    _table[definition.name] = definition
    return definition


#: Entry points of installed packages that name a module with :func:`define` calls.
GROUP = "olmo_lns.schemes"


@functools.cache
def _load_entry_points() -> None:
    for entry in importlib.metadata.entry_points(group=GROUP):
        try:
            entry.load()
        except Exception as error:
            raise LNSConfigError(
                f"entry point {entry.name!r} of group {GROUP} ({entry.value}) cannot be loaded: {error}. Repair or "
                "uninstall its package."
            ) from error


def names() -> tuple[str, ...]:
    """Return the known schemes, Pre-LN first, those of installed packages last."""
    _load_entry_points()
    return tuple(_table)


def definition(name: str) -> Definition:
    """Return the row of a scheme: ``definition("lns").title`` is ``"LayerNorm Scaling"``.

    :raises LNSConfigError: an unknown scheme; the message has the nearest known one.
    """
    if name not in _table:
        _load_entry_points()
    if name not in _table:
        raise LNSConfigError(f"unknown scheme {name!r}{did_you_mean(name, _table)}: expected {', '.join(_table)}")
    return _table[name]


@dataclass(frozen=True)
class Scheme:
    """The normalisation of a model's blocks. Equal schemes give equal models.

    :func:`parse` and :meth:`of` make one; ``values`` holds every parameter, defaults included.
    """

    name: str
    values: tuple[tuple[str, float], ...] = ()

    @classmethod
    def of(cls, name: str, /, **parameters: Any) -> Scheme:
        """Return a scheme with these parameters, the others at their default: ``Scheme.of("lns", exponent=0.25)``.

        :raises LNSConfigError: an unknown scheme or parameter, or a value that is not allowed.
        """
        row = definition(name)
        for key in parameters:
            if key not in row.parameters:
                known = f"expected one of {', '.join(row.parameters)}" if row.parameters else "it has none"
                raise LNSConfigError(
                    f"scheme {name!r}: unknown parameter {key!r}{did_you_mean(key, row.parameters)}: {known}"
                )
        values = []
        for key, parameter in row.parameters.items():
            try:
                values.append((key, parameter.read(parameters.get(key, parameter.default))))
            except ValueError as error:
                raise LNSConfigError(f"scheme {name!r}: {key}: {error}") from None
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
        """The spelling of the parameters that are not at their default: ``exponent=0.25``."""
        defaults = self.definition.parameters
        return ",".join(f"{key}={value!r}" for key, value in self.values if value != defaults[key].default)

    def __str__(self) -> str:
        return f"{self.name}:{self.arguments}" if self.arguments else self.name

    def plan(self, layer_number: int, n_layers: int, sub_layer: str) -> Plan:
        """Return the plan of one sub-layer: ``LNS.plan(4, 16, "attn").norm_scale`` is 0.5.

        :param layer_number: 1-based, global. :param sub_layer: ``attn`` or ``ff``.
        """
        return self.definition.plan_function(layer_number, n_layers, sub_layer, **self.parameters)

    def plans(self, n_layers: int) -> Iterator[tuple[int, str, Plan]]:
        """Yield ``(layer_number, sub_layer, plan)`` for every sub-layer, in the order of their runs."""
        for layer_number in range(1, n_layers + 1):
            for sub_layer in SUB_LAYERS:
                yield layer_number, sub_layer, self.plan(layer_number, n_layers, sub_layer)

    def norm_count(self, n_layers: int) -> int:
        """Return the number of norms in the blocks of a model."""
        return sum(plan.norms for _, _, plan in self.plans(n_layers))

    def only_scales_norms(self, n_layers: int) -> bool:
        return all(plan.only_scales_norms for _, _, plan in self.plans(n_layers))

    def folds_into_pre_ln(self, n_layers: int) -> bool:
        return all(plan.folds_into_pre_ln for _, _, plan in self.plans(n_layers))


def parse(text: str) -> Scheme:
    """Return the scheme that a text spells: ``parse("lns:exponent=0.25").parameters`` is ``{"exponent": 0.25}``.

    :raises LNSConfigError: another form, or an error of :meth:`Scheme.of`.
    """
    name, colon, rest = str(text).strip().partition(":")
    parameters: dict[str, str] = {}
    for item in rest.split(",") if colon else []:
        key, equals, value = item.partition("=")
        if not equals or not key.strip() or not value.strip() or key.strip() in parameters:
            raise LNSConfigError(f"scheme {text!r}: found {item!r}, expected name:key=value[,key=value…]")
        parameters[key.strip()] = value.strip()
    return Scheme.of(name, **parameters)


def as_scheme(scheme: Any) -> Scheme:
    """Return the scheme of a text or a scheme. :raises LNSConfigError: another type, or an unknown scheme."""
    if not isinstance(scheme, (str, Scheme)):
        raise LNSConfigError(
            f"the scheme is a {type(scheme).__name__}: expected a text such as 'lns:exponent=0.25', or a Scheme. An "
            "input of the model is given as example=, as in apply(model, example=tokens)."
        )
    return parse(scheme) if isinstance(scheme, str) else scheme
