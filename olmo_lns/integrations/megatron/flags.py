"""The selected scheme and initialization on their way: command line -> args -> TransformerConfig -> checkpoint.

The attribute names are the same on ``args``, on the config and in a saved checkpoint.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import Any, Sequence

from olmo_lns.errors import LNSConfigError
from olmo_lns.schemes import DEFAULT_EXPONENT, LNS, PRE_LN, Scheme, lns_scale

#: Option strings, in the order of ``Selection``'s fields.
FLAGS = (
    "--layernorm-scaling",
    "--layernorm-scaling-exponent",
    "--layernorm-scaling-keep-scaled-init",
    "--no-scaled-init",
)

#: With a value above 1 of such a flag, Megatron asserts CUDA_DEVICE_MAX_CONNECTIONS=1 on GPUs up to Hopper.
_ONE_CONNECTION = ("--tensor-model-parallel-size", "--context-parallel-size")
#: Flags for which Megatron asserts more than one connection, or leaves the choice to the user.
_MORE_CONNECTIONS = ("--use-megatron-fsdp", "--use-torch-fsdp2", "--overlap-moe-expert-parallel-comm")


@dataclass(frozen=True)
class Selection:
    """The selected scheme and initialization."""

    layernorm_scaling: bool = False
    layernorm_scaling_exponent: float = DEFAULT_EXPONENT
    layernorm_scaling_keep_scaled_init: bool = False
    no_scaled_init: bool = False

    @classmethod
    def of(cls, holder: Any) -> Selection:
        """Read the selection from parsed arguments or a marked config."""
        values = {each.name: getattr(holder, each.name, None) for each in fields(cls)}
        return cls(**{name: value for name, value in values.items() if value is not None})

    @classmethod
    def of_saved(cls, arguments: Any) -> Selection:
        """Read the selection from the arguments of a checkpoint.

        :raises LNSConfigError: another scheme, which a development version saved.
        """
        if other := getattr(arguments, "norm_scheme", ""):
            raise LNSConfigError(f"found norm_scheme={other!r} of a development version, expected LayerNorm Scaling.")
        return cls.of(arguments)

    def store(self, holder: Any) -> None:
        """Store the fields as attributes."""
        for name, value in vars(self).items():
            setattr(holder, name, value)

    @property
    def scheme(self) -> Scheme:
        """The scheme of the norms."""
        active = self.layernorm_scaling
        return Scheme.of(LNS.name, exponent=self.layernorm_scaling_exponent) if active else PRE_LN

    @property
    def flags(self) -> str:
        """The command-line options for this selection."""
        values = zip(FLAGS, vars(self).values(), vars(Selection()).values(), strict=True)
        changed = [(flag, value) for flag, value, default in values if value != default]
        return " ".join(flag if value is True else f"{flag} {value:g}" for flag, value in changed)

    @property
    def scaled_init_off(self) -> bool:
        """True for plain initialization of the residual output projections."""
        return self.no_scaled_init or (self.layernorm_scaling and not self.layernorm_scaling_keep_scaled_init)

    def check(self) -> Selection:
        """Return the selection. :raises LNSConfigError: its fields contradict each other."""
        if self.layernorm_scaling_keep_scaled_init and self.no_scaled_init:
            raise LNSConfigError(f"{FLAGS[2]} and {FLAGS[3]} contradict each other: give one of them.")
        try:
            lns_scale(1, exponent=self.layernorm_scaling_exponent)
        except ValueError as error:
            raise LNSConfigError(f"{FLAGS[1]}: {error}") from None
        if not self.layernorm_scaling and replace(self, no_scaled_init=False) != Selection():
            raise LNSConfigError(f"{self.flags} was given without {FLAGS[0]}: add {FLAGS[0]}, or drop it.")
        return self


def add_flags(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add a group with this package's options to Megatron's."""
    add = parser.add_argument_group("LayerNorm Scaling", "olmo-lns: y = l**-exponent * Norm(x) in block l").add_argument
    add(
        FLAGS[0],
        action="store_true",
        help="Multiply both norms of block l (1-based, global) by 1/sqrt(l) and initialize the residual output "
        "projections like every other matrix (arXiv 2502.05795).",
    )
    text = f"Use l**-P instead of 1/sqrt(l). Default: {DEFAULT_EXPONENT}."
    add(FLAGS[1], type=float, metavar="P", default=DEFAULT_EXPONENT, help=text)
    text = f"Keep Megatron's std/sqrt(2L) for the residual output projections together with {FLAGS[0]} (ablation)."
    add(FLAGS[2], action="store_true", help=text)
    text = "Initialize the residual output projections like every other matrix, without std/sqrt(2L); works without "
    add(FLAGS[3], action="store_true", help=f"{text}{FLAGS[0]}.")
    return parser


def variables(flags: Sequence[str]) -> dict[str, str]:
    """Return the environment variables for a launch with these flags, such as ``CUDA_DEVICE_MAX_CONNECTIONS=1``.

    >>> variables(["--tensor-model-parallel-size", "2"])
    {'CUDA_DEVICE_MAX_CONNECTIONS': '1'}
    """
    arguments = [part for flag in flags for part in flag.split("=", 1)]
    is_parallel = any(
        value.isdecimal() and int(value) > 1 for flag, value in pairwise(arguments) if flag in _ONE_CONNECTION
    )
    return {"CUDA_DEVICE_MAX_CONNECTIONS": "1"} if is_parallel and not set(arguments) & set(_MORE_CONNECTIONS) else {}
