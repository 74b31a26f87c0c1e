"""The settings, and how they travel: command line -> args -> TransformerConfig -> checkpoint.

The attribute names are the same on ``args``, on the config and in a saved checkpoint.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import Any, Sequence

from olmo_lns.errors import LNSConfigError
from olmo_lns.schemes import DEFAULT_EXPONENT, LNS, PRE_LN, Scheme, lns_scale

#: Option strings, in the order of ``Settings``' fields.
FLAGS = (
    "--layernorm-scaling",
    "--layernorm-scaling-exponent",
    "--layernorm-scaling-keep-scaled-init",
    "--no-scaled-init",
)

#: A flag with a number above 1 -> Megatron asserts one connection for it, on GPUs up to Hopper.
_ONE_CONNECTION = ("--tensor-model-parallel-size", "--context-parallel-size")
#: With these it asserts more than one, or leaves the choice to the user.
_MORE_CONNECTIONS = ("--use-megatron-fsdp", "--use-torch-fsdp2", "--overlap-moe-expert-parallel-comm")


@dataclass(frozen=True)
class Settings:
    """The scheme and the initialization that were asked for.

    :param layernorm_scaling_exponent: None where it was not given (then 0.5, the paper's).
    """

    layernorm_scaling: bool = False
    layernorm_scaling_exponent: float | None = None
    layernorm_scaling_keep_scaled_init: bool = False
    no_scaled_init: bool = False

    @classmethod
    def of(cls, holder: Any) -> Settings:
        """Read them from parsed arguments, a marked config or the arguments of a checkpoint."""
        found = {each.name: getattr(holder, each.name, None) for each in fields(cls)}
        if (exponent := found["layernorm_scaling_exponent"]) is not None:
            found["layernorm_scaling_exponent"] = float(exponent)  # printed arguments are text
        return cls(**{name: value for name, value in found.items() if value is not None})

    def store(self, holder: Any) -> None:
        """Write all attributes, the exponent as the number that is used."""
        for name, value in vars(replace(self, layernorm_scaling_exponent=self.exponent)).items():
            setattr(holder, name, value)

    @property
    def exponent(self) -> float:
        return DEFAULT_EXPONENT if self.layernorm_scaling_exponent is None else self.layernorm_scaling_exponent

    @property
    def scheme(self) -> Scheme:
        return Scheme.of(LNS.name, exponent=self.exponent) if self.layernorm_scaling else PRE_LN

    @property
    def active(self) -> bool:
        """True if the norms get a factor."""
        return self.layernorm_scaling

    @property
    def words(self) -> str:
        """All options that give these settings, as a user types them."""
        words = [FLAGS[0]] * self.active
        words += [f"{FLAGS[1]} {self.exponent:g}"] * (self.active and self.exponent != DEFAULT_EXPONENT)
        words += [FLAGS[2]] * self.layernorm_scaling_keep_scaled_init + [FLAGS[3]] * self.no_scaled_init
        return " ".join(words)

    @property
    def scaled_init_off(self) -> bool:
        """True if the residual output projections get plain initialization."""
        return self.no_scaled_init or (self.active and not self.layernorm_scaling_keep_scaled_init)

    def check(self) -> Settings:
        """:raises LNSConfigError: the settings contradict each other."""
        if self.layernorm_scaling_keep_scaled_init and self.no_scaled_init:
            raise LNSConfigError(f"{FLAGS[2]} and {FLAGS[3]} contradict each other: give one of them.")
        try:
            lns_scale(1, exponent=self.exponent)
        except ValueError as error:
            raise LNSConfigError(f"{FLAGS[1]}: {error}") from None
        given = {FLAGS[1]: self.exponent != DEFAULT_EXPONENT, FLAGS[2]: self.layernorm_scaling_keep_scaled_init}
        for flag in [flag for flag, is_given in given.items() if is_given and not self.active]:
            raise LNSConfigError(f"{flag} was given without {FLAGS[0]}: add {FLAGS[0]}, or drop it.")
        return self

    def filled_from(self, saved: Settings) -> Settings:
        """These settings, with everything that was not given on the command line taken from ``saved``."""
        ours = replace(self, layernorm_scaling=self.active or saved.active)
        if saved.active and self.layernorm_scaling_exponent is None:
            ours = replace(ours, layernorm_scaling_exponent=saved.exponent)
        if not (ours.no_scaled_init or ours.layernorm_scaling_keep_scaled_init):
            keep = ours.active and saved.layernorm_scaling_keep_scaled_init
            ours = replace(ours, no_scaled_init=saved.no_scaled_init, layernorm_scaling_keep_scaled_init=keep)
        return ours


def add_flags(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add our options to Megatron's, in a group of their own."""
    add = parser.add_argument_group("LayerNorm Scaling", "olmo-lns: y = l**-exponent * Norm(x) in block l").add_argument
    add(
        FLAGS[0],
        action="store_true",
        help="Multiply both norms of block l (1-based, global) by 1/sqrt(l) and initialize the residual output "
        "projections like every other matrix (arXiv 2502.05795).",
    )
    words = f"Use l**-P instead of 1/sqrt(l). Default: {DEFAULT_EXPONENT} (with --use-checkpoint-args: as saved)."
    add(FLAGS[1], type=float, metavar="P", help=words)
    words = f"Keep Megatron's std/sqrt(2L) for the residual output projections together with {FLAGS[0]} (ablation)."
    add(FLAGS[2], action="store_true", help=words)
    words = "Initialize the residual output projections like every other matrix, without std/sqrt(2L); works without "
    add(FLAGS[3], action="store_true", help=f"{words}{FLAGS[0]}.")
    return parser


def variables(flags: Sequence[str]) -> dict[str, str]:
    """Environment variables that a launch with these flags needs, such as ``CUDA_DEVICE_MAX_CONNECTIONS=1``.

    >>> variables(["--tensor-model-parallel-size", "2"])
    {'CUDA_DEVICE_MAX_CONNECTIONS': '1'}
    """
    words = [part for flag in flags for part in flag.split("=", 1)]
    given = [value for flag, value in pairwise(words) if flag in _ONE_CONNECTION]
    one = any(value.isdecimal() and int(value) > 1 for value in given) and not set(words) & set(_MORE_CONNECTIONS)
    return {"CUDA_DEVICE_MAX_CONNECTIONS": "1"} if one else {}
