"""Define the command-line options, and the scheme and the initialization that they select.

Their values pass from the command line to Megatron's ``args``, from there to the ``TransformerConfig``, and with
``args`` into the checkpoint. The attributes of :class:`MegatronFlags` have the same names in all these places.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, fields, replace
from typing import Any

from olmo_lns.errors import LNSConfigError
from olmo_lns.schemes import DEFAULT_EXPONENT, LNS, PRE_LN, Scheme, lns_factor

#: Option strings, in the order of the fields of :class:`MegatronFlags`.
FLAGS = LNS_FLAG, EXPONENT_FLAG, KEEP_FLAG, PLAIN_FLAG = (
    "--layernorm-scaling",
    "--layernorm-scaling-exponent",
    "--layernorm-scaling-keep-scaled-init",
    "--no-scaled-init",
)


@dataclass(frozen=True)
class MegatronFlags:
    """The values of this package's command-line options, which select a scheme and an initialization."""

    layernorm_scaling: bool = False
    layernorm_scaling_exponent: float = DEFAULT_EXPONENT
    layernorm_scaling_keep_scaled_init: bool = False
    no_scaled_init: bool = False

    @classmethod
    def of(cls, holder: Any) -> MegatronFlags:
        """Read the flags from parsed arguments or a config."""
        values = {each.name: getattr(holder, each.name, None) for each in fields(cls)}
        return cls(**{name: value for name, value in values.items() if value is not None})

    @classmethod
    def of_saved(cls, arguments: Any) -> MegatronFlags:
        """Read the flags from the arguments of a checkpoint.

        :raises LNSConfigError: if a development version saved them with another scheme.
        """
        if other := getattr(arguments, "norm_scheme", ""):
            raise LNSConfigError(
                f"norm_scheme={other!r} is from a development version. Only LayerNorm Scaling can be loaded."
            )
        return cls.of(arguments)

    def store(self, holder: Any) -> None:
        """Store the fields as attributes of ``holder``, which is Megatron's ``args`` or a config."""
        for name, value in vars(self).items():
            setattr(holder, name, value)

    @property
    def scheme(self) -> Scheme:
        """The selected scheme, which is Pre-LN without ``--layernorm-scaling``."""
        active = self.layernorm_scaling
        return Scheme.of(LNS.name, exponent=self.layernorm_scaling_exponent) if active else PRE_LN

    @property
    def command_line(self) -> str:
        """The command-line options that have these values."""
        values = zip(FLAGS, vars(self).values(), vars(MegatronFlags()).values(), strict=True)
        changed = [(flag, value) for flag, value, default in values if value != default]
        return " ".join(flag if value is True else f"{flag} {value:g}" for flag, value in changed)

    @property
    def scaled_init_off(self) -> bool:
        """True if the residual output projections are initialized plainly, without std/sqrt(2L)."""
        return self.no_scaled_init or (self.layernorm_scaling and not self.layernorm_scaling_keep_scaled_init)

    def validated(self) -> MegatronFlags:
        """Return the flags themselves after a check.

        :raises LNSConfigError: if they contradict each other.
        """
        if self.layernorm_scaling_keep_scaled_init and self.no_scaled_init:
            raise LNSConfigError(f"{KEEP_FLAG} and {PLAIN_FLAG} contradict each other. Pass one of them.")
        try:
            lns_factor(1, exponent=self.layernorm_scaling_exponent)
        except ValueError as error:
            raise LNSConfigError(f"{EXPONENT_FLAG}: {error}") from None
        if not self.layernorm_scaling and replace(self, no_scaled_init=False) != MegatronFlags():
            raise LNSConfigError(
                f"{self.command_line} has no effect without {LNS_FLAG}. Add {LNS_FLAG}, or remove the other."
            )
        return self


def add_flags(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the options of this package to Megatron's parser, as a group."""
    add = parser.add_argument_group("LayerNorm Scaling", "olmo-lns: y = l**-exponent * Norm(x) in block l").add_argument
    add(
        LNS_FLAG,
        action="store_true",
        help="Multiply both norms of block l (1-based, global) by 1/sqrt(l) and initialize the residual output "
        "projections like every other matrix (arXiv 2502.05795).",
    )
    text = f"Use l**-P instead of 1/sqrt(l). Default: {DEFAULT_EXPONENT}."
    add(EXPONENT_FLAG, type=float, metavar="P", default=DEFAULT_EXPONENT, help=text)
    text = f"Keep Megatron's std/sqrt(2L) for the residual output projections together with {LNS_FLAG} (ablation)."
    add(KEEP_FLAG, action="store_true", help=text)
    text = "Initialize the residual output projections like every other matrix, without std/sqrt(2L); works without "
    add(PLAIN_FLAG, action="store_true", help=f"{text}{LNS_FLAG}.")
    return parser
