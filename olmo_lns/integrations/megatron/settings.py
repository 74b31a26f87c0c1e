"""The four settings, and how they travel: command line -> args -> TransformerConfig -> checkpoint.

The attribute names are the same on ``args``, on the config and in a saved checkpoint, and the
same as the fields of the in-tree patch, so either implementation resumes the other's checkpoints.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from typing import Any

from olmo_lns.errors import LNSConfigError
from olmo_lns.record import PRE_LN, LNSRecord
from olmo_lns.scale import DEFAULT_EXPONENT, lns_scale

__all__ = ["FLAGS", "Settings", "add_flags"]

#: Option strings, in the order of ``Settings``' fields.
FLAGS = (
    "--layernorm-scaling",
    "--layernorm-scaling-exponent",
    "--layernorm-scaling-keep-scaled-init",
    "--no-scaled-init",
)


@dataclass(frozen=True)
class Settings:
    """What was asked for. ``exponent`` is None where nothing was said (then 0.5, the paper's)."""

    layernorm_scaling: bool = False
    layernorm_scaling_exponent: float | None = None
    layernorm_scaling_keep_scaled_init: bool = False
    no_scaled_init: bool = False

    @classmethod
    def of(cls, holder: Any) -> Settings:
        """Read from parsed arguments, a ``TransformerConfig`` or the arguments of a checkpoint."""
        exponent = getattr(holder, "layernorm_scaling_exponent", None)
        return cls(
            bool(getattr(holder, "layernorm_scaling", False)),
            None if exponent is None else float(exponent),
            bool(getattr(holder, "layernorm_scaling_keep_scaled_init", False)),
            bool(getattr(holder, "no_scaled_init", False)),
        )

    def store(self, holder: Any) -> None:
        """Write all four attributes, the exponent as the number that is used."""
        holder.layernorm_scaling = self.layernorm_scaling
        holder.layernorm_scaling_exponent = self.exponent
        holder.layernorm_scaling_keep_scaled_init = self.layernorm_scaling_keep_scaled_init
        holder.no_scaled_init = self.no_scaled_init

    @property
    def exponent(self) -> float:
        return DEFAULT_EXPONENT if self.layernorm_scaling_exponent is None else self.layernorm_scaling_exponent

    @property
    def scaled_init_off(self) -> bool:
        """Whether the residual output projections get plain initialization."""
        return self.no_scaled_init or (self.layernorm_scaling and not self.layernorm_scaling_keep_scaled_init)

    def check(self) -> Settings:
        """:raises LNSConfigError: the settings contradict each other."""
        if self.layernorm_scaling_keep_scaled_init and self.no_scaled_init:
            raise LNSConfigError(f"{FLAGS[2]} and {FLAGS[3]} contradict each other: give one of them.")
        if not self.layernorm_scaling:
            for flag, given in (
                (FLAGS[1], self.exponent != DEFAULT_EXPONENT),
                (FLAGS[2], self.layernorm_scaling_keep_scaled_init),
            ):
                if given:
                    raise LNSConfigError(f"{flag} was given without {FLAGS[0]}: add {FLAGS[0]}, or drop it.")
        try:
            lns_scale(1, exponent=self.exponent)
        except ValueError as error:
            raise LNSConfigError(f"{FLAGS[1]}: {error}") from None
        return self

    def filled_from(self, saved: Settings) -> Settings:
        """These settings, with everything that was not given on the command line taken from ``saved``."""
        if saved.layernorm_scaling and not self.layernorm_scaling:
            ours = replace(self, layernorm_scaling=True)
        else:
            ours = self
        if ours.layernorm_scaling and saved.layernorm_scaling and ours.layernorm_scaling_exponent is None:
            ours = replace(ours, layernorm_scaling_exponent=saved.exponent)
        if not (ours.no_scaled_init or ours.layernorm_scaling_keep_scaled_init):
            ours = replace(
                ours,
                no_scaled_init=saved.no_scaled_init,
                layernorm_scaling_keep_scaled_init=ours.layernorm_scaling and saved.layernorm_scaling_keep_scaled_init,
            )
        return ours

    def record(self, holder: Any = None) -> LNSRecord:
        """What identifies the model; ``layernorm_scaling_folded`` of ``holder`` marks folded weights."""
        folded = bool(getattr(holder, "layernorm_scaling_folded", False))
        if self.layernorm_scaling or folded:
            policy = "keep" if self.layernorm_scaling_keep_scaled_init else "auto"
            return LNSRecord(type="lns", exponent=self.exponent, scaled_init=policy, folded=folded)
        return LNSRecord(type=PRE_LN, scaled_init="off" if self.no_scaled_init else "auto")


def add_flags(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the four options, in a group of their own."""
    group = parser.add_argument_group("LayerNorm Scaling", "olmo-lns: y = l**-exponent * Norm(x) in block l")
    group.add_argument(
        FLAGS[0],
        action="store_true",
        help="Multiply both norms of block l (1-based, global) by 1/sqrt(l) and initialize the residual "
        "output projections like every other matrix (arXiv 2502.05795).",
    )
    group.add_argument(
        FLAGS[1],
        type=float,
        default=None,
        metavar="P",
        help=f"Use l**-P instead of 1/sqrt(l). Default: {DEFAULT_EXPONENT} (with --use-checkpoint-args: as saved).",
    )
    group.add_argument(
        FLAGS[2],
        action="store_true",
        help="Keep Megatron's std/sqrt(2L) for the residual output projections together with "
        f"{FLAGS[0]} (the paper's ablation).",
    )
    group.add_argument(
        FLAGS[3],
        action="store_true",
        help="Initialize the residual output projections like every other matrix, without std/sqrt(2L); "
        f"works without {FLAGS[0]}.",
    )
    return parser
