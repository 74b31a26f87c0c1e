"""The settings, and how they travel: command line -> args -> TransformerConfig -> checkpoint.

The attribute names are the same on ``args``, on the config and in a saved checkpoint. LayerNorm Scaling stands in two
attributes of its own, whichever flag asked for it; every other scheme stands in ``norm_scheme``.
"""

from __future__ import annotations

import argparse
import functools
import importlib
from dataclasses import dataclass, field, fields, make_dataclass, replace
from itertools import pairwise
from typing import Any, Sequence

from olmo_lns.errors import LNSConfigError
from olmo_lns.record import Record
from olmo_lns.schemes import DEFAULT_EXPONENT, LNS, PRE_LN, Scheme, lns_scale, names, parse

#: Option strings, in the order of ``Settings``' fields.
FLAGS = (
    "--layernorm-scaling",
    "--layernorm-scaling-exponent",
    "--layernorm-scaling-keep-scaled-init",
    "--no-scaled-init",
    "--norm-scheme",
)

#: ``--apply-layernorm-1p`` in arguments: up to Megatron Core 0.15, and from 0.16 on; and in a config.
ZERO_CENTRED = ("apply_layernorm_1p", "layernorm_zero_centered_gamma")

#: Sub-layer -> the layer's attribute that adds its output to the stream, and the name of what it saves.
SLOTS = {"attn": "self_attn_bda", "ff": "mlp_bda"}

#: A flag with a number above 1 -> Megatron asserts one connection for it, on GPUs up to Hopper.
_ONE_CONNECTION = ("--tensor-model-parallel-size", "--context-parallel-size")
#: With these it asserts more than one, or leaves the choice to the user.
_MORE_CONNECTIONS = ("--use-megatron-fsdp", "--use-torch-fsdp2", "--overlap-moe-expert-parallel-comm")

#: Mark of a config whose vision tower is to be scaled too.
VISION = "layernorm_scaling_vision"


@dataclass(frozen=True)
class Settings:
    """What was asked for.

    :param layernorm_scaling_exponent: None where nothing was said (then 0.5, the paper's).
    :param norm_scheme: a scheme as text, ``""`` where nothing was said; never ``lns``, see :meth:`of`.
    """

    layernorm_scaling: bool = False
    layernorm_scaling_exponent: float | None = None
    layernorm_scaling_keep_scaled_init: bool = False
    no_scaled_init: bool = False
    norm_scheme: str = ""

    @classmethod
    def of(cls, holder: Any) -> Settings:
        """Read from parsed arguments, a ``TransformerConfig`` or the arguments of a checkpoint.

        :raises LNSConfigError: an unknown scheme, or two schemes.
        """
        found = {each.name: getattr(holder, each.name, None) for each in fields(cls)}
        if (exponent := found["layernorm_scaling_exponent"]) is not None:
            found["layernorm_scaling_exponent"] = float(exponent)  # printed arguments are text
        return cls(**{name: value for name, value in found.items() if value is not None})._with_one_spelling()

    @classmethod
    def of_scheme(cls, scheme: Scheme, *, keep_scaled_init: bool = False) -> Settings:
        """Those of ``scheme``, as :meth:`of` reads them."""
        return cls(layernorm_scaling_keep_scaled_init=keep_scaled_init, norm_scheme=str(scheme))._with_one_spelling()

    def _with_one_spelling(self) -> Settings:
        """Move ``lns`` into its own two attributes; leave any other scheme in ``norm_scheme``."""
        if not self.norm_scheme:
            return self
        try:
            scheme = parse(self.norm_scheme)
        except LNSConfigError as error:
            raise LNSConfigError(f"{FLAGS[4]}: {error}") from None
        if scheme.name != LNS.name:
            if self.layernorm_scaling:
                raise LNSConfigError(f"{FLAGS[0]} is short for {FLAGS[4]} lns, but {FLAGS[4]} {scheme} was given too.")
            return replace(self, norm_scheme=str(scheme))
        exponent = scheme.parameters["exponent"]
        if self.layernorm_scaling_exponent not in (None, exponent):
            raise LNSConfigError(
                f"{FLAGS[1]} is {self.layernorm_scaling_exponent:g}, but {FLAGS[4]} {self.norm_scheme} has exponent "
                f"{exponent:g}: give one of them."
            )
        return replace(self, layernorm_scaling=True, layernorm_scaling_exponent=exponent, norm_scheme="")

    def store(self, holder: Any) -> None:
        """Write all attributes, the exponent as the number that is used."""
        for name, value in vars(replace(self, layernorm_scaling_exponent=self.exponent)).items():
            setattr(holder, name, value)

    @property
    def exponent(self) -> float:
        return DEFAULT_EXPONENT if self.layernorm_scaling_exponent is None else self.layernorm_scaling_exponent

    @property
    def scheme(self) -> Scheme:
        if self.layernorm_scaling:
            return Scheme.of(LNS.name, exponent=self.exponent)
        return parse(self.norm_scheme) if self.norm_scheme else PRE_LN

    @property
    def active(self) -> bool:
        """Whether the blocks get anything."""
        return not self.scheme.is_pre_ln

    @property
    def flag(self) -> str:
        """The option that asks for the scheme, as a user types it."""
        return FLAGS[0] if self.layernorm_scaling else f"{FLAGS[4]} {self.norm_scheme}"

    @property
    def words(self) -> str:
        """All options that give these settings, as a user types them."""
        words = [self.flag] * self.active
        words += [f"{FLAGS[1]} {self.exponent:g}"] * (self.layernorm_scaling and self.exponent != DEFAULT_EXPONENT)
        words += [FLAGS[2]] * self.layernorm_scaling_keep_scaled_init + [FLAGS[3]] * self.no_scaled_init
        return " ".join(words)

    @property
    def scaled_init_off(self) -> bool:
        """Whether the residual output projections get plain initialization."""
        return self.no_scaled_init or (self.active and not self.layernorm_scaling_keep_scaled_init)

    def check(self) -> Settings:
        """:raises LNSConfigError: the settings contradict each other."""
        if self.layernorm_scaling_keep_scaled_init and self.no_scaled_init:
            raise LNSConfigError(f"{FLAGS[2]} and {FLAGS[3]} contradict each other: give one of them.")
        try:
            lns_scale(1, exponent=self.exponent)
        except ValueError as error:
            raise LNSConfigError(f"{FLAGS[1]}: {error}") from None
        if not self.layernorm_scaling and self.exponent != DEFAULT_EXPONENT:
            raise LNSConfigError(f"{FLAGS[1]} was given without {FLAGS[0]}: add {FLAGS[0]}, or drop it.")
        if not self.active and self.layernorm_scaling_keep_scaled_init:
            raise LNSConfigError(f"{FLAGS[2]} was given without {FLAGS[0]} or {FLAGS[4]}: add one, or drop it.")
        return self

    def filled_from(self, saved: Settings) -> Settings:
        """These settings, with everything that was not given on the command line taken from ``saved``."""
        ours = self
        if not self.layernorm_scaling and not self.norm_scheme:
            ours = replace(self, layernorm_scaling=saved.layernorm_scaling, norm_scheme=saved.norm_scheme)
        if ours.layernorm_scaling and saved.layernorm_scaling and ours.layernorm_scaling_exponent is None:
            ours = replace(ours, layernorm_scaling_exponent=saved.exponent)
        if not (ours.no_scaled_init or ours.layernorm_scaling_keep_scaled_init):
            ours = replace(
                ours,
                no_scaled_init=saved.no_scaled_init,
                layernorm_scaling_keep_scaled_init=ours.active and saved.layernorm_scaling_keep_scaled_init,
            )
        return ours

    def record(self, holder: Any = None) -> Record:
        """What identifies the model; ``layernorm_scaling_folded`` of ``holder`` marks folded weights.

        Folded weights of another scheme than LayerNorm Scaling have its name in ``norm_scheme_folded``.
        """
        if not getattr(holder, "layernorm_scaling_folded", False):
            return Record(self.scheme, scaled_init=self.initialization)
        name = getattr(holder, "norm_scheme_folded", None)
        scheme = parse(name) if name else Scheme.of(LNS.name, exponent=self.exponent)
        return Record(scheme, scaled_init=self.initialization, folded=True)

    @property
    def initialization(self) -> str:
        """One of :data:`olmo_lns.schemes.INITIALIZATIONS`; Megatron's own is scaled."""
        return "plain" if self.scaled_init_off else "upstream"


def add_flags(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add our options to Megatron's, in a group of their own."""
    group = parser.add_argument_group("LayerNorm Scaling", "olmo-lns: y = l**-exponent * Norm(x) in block l")
    add = group.add_argument
    add(
        FLAGS[4],
        metavar="NAME[:KEY=VALUE,...]",
        help=f"How the blocks normalise: one of {', '.join(names())} (some are refused here, with the reason), with "
        f"parameters as in lns:exponent=0.25. {FLAGS[0]} is short for lns.",
    )
    add(
        FLAGS[0],
        action="store_true",
        help="Multiply both norms of block l (1-based, global) by 1/sqrt(l) and initialize the residual output "
        "projections like every other matrix (arXiv 2502.05795).",
    )
    words = f"Use l**-P instead of 1/sqrt(l). Default: {DEFAULT_EXPONENT} (with --use-checkpoint-args: as saved)."
    add(FLAGS[1], type=float, metavar="P", help=words)
    add(
        FLAGS[2],
        action="store_true",
        help=f"Keep Megatron's std/sqrt(2L) for the residual output projections together with {FLAGS[0]} or {FLAGS[4]} "
        "(the paper's ablation).",
    )
    add(
        FLAGS[3],
        action="store_true",
        help="Initialize the residual output projections like every other matrix, without std/sqrt(2L); works without "
        f"{FLAGS[0]}.",
    )
    return parser


def variables(flags: Sequence[str]) -> dict[str, str]:
    """What a launch with these flags needs in its environment, such as ``CUDA_DEVICE_MAX_CONNECTIONS=1``.

    >>> variables(["--tensor-model-parallel-size", "2"])
    {'CUDA_DEVICE_MAX_CONNECTIONS': '1'}
    """
    words = [part for flag in flags for part in flag.split("=", 1)]
    given = [value for flag, value in pairwise(words) if flag in _ONE_CONNECTION]
    one = any(value.isdecimal() and int(value) > 1 for value in given) and not set(words) & set(_MORE_CONNECTIONS)
    return {"CUDA_DEVICE_MAX_CONNECTIONS": "1"} if one else {}


def mark(config: Any, settings: Settings, *, vision: bool = False) -> None:
    """Give ``config`` the settings as dataclass fields, so that every copy of it has them.

    Its class becomes a generated subclass: ``dataclasses.replace``, a copy made field by field and Megatron Bridge's
    ``run_config.yaml`` then carry the fields.

    :raises LNSConfigError: plain initialization was asked for, and now scaled initialization is to be kept.
    """
    if settings.layernorm_scaling_keep_scaled_init and getattr(config, "no_scaled_init", False):
        raise LNSConfigError("keep_scaled_init=True contradicts plain_initialization(config): leave one of them out.")
    kind: type = type(config)
    config.__class__ = config_class(kind)
    settings.store(config)
    setattr(config, VISION, vision)


@functools.cache
def config_class(base: type) -> type:
    """A subclass of the dataclass ``base`` with the settings as fields.

    A saved config names it by module and qualified name; :func:`__getattr__` finds it again by that name.
    """
    if VISION in {each.name for each in fields(base)}:
        return base
    own = [(each.name, each.type, field(default=each.default)) for each in fields(Settings)]
    kind = make_dataclass(base.__name__, [*own, (VISION, bool, field(default=False))], bases=(base,), repr=False)
    kind.__module__, kind.__doc__ = __name__, base.__doc__
    kind.__qualname__ = "__".join((_PREFIX, *base.__module__.split("."), base.__qualname__))
    return kind


_PREFIX = "LNS"


def __getattr__(name: str) -> Any:
    """The class that a saved config names: ``LNS__`` and the path of its base, with ``__`` between the parts."""
    prefix, *module, base = name.split("__")
    if prefix != _PREFIX or not module:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return config_class(getattr(importlib.import_module(".".join(module)), base))
