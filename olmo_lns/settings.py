"""The two settings of the OLMo plugin, from environment variables so that every worker sees them."""

from __future__ import annotations

import difflib
import math
import os
from dataclasses import dataclass

from olmo_lns.errors import LNSConfigError
from olmo_lns.scale import DEFAULT_EXPONENT

__all__ = ["EXPONENT", "SCALED_INIT", "SCALED_INIT_POLICIES", "Settings"]

EXPONENT = "OLMO_LNS_EXPONENT"
SCALED_INIT = "OLMO_LNS_SCALED_INIT"
SCALED_INIT_POLICIES = ("auto", "keep", "off")


@dataclass(frozen=True)
class Settings:
    """:param exponent: of the factor ``layer_number ** -exponent``; 0.5 is the paper's.
    :param scaled_init: ``auto`` (off with LNS, upstream's without), ``keep`` (upstream's always,
        the paper's ablation) or ``off`` (also without LNS).
    """

    exponent: float = DEFAULT_EXPONENT
    scaled_init: str = "auto"

    @classmethod
    def current(cls) -> Settings:
        """Read the environment.

        :raises LNSConfigError: a value that is not allowed, with what is.
        """
        text = os.environ.get(EXPONENT, "").strip()
        try:
            exponent = float(text) if text else DEFAULT_EXPONENT
        except ValueError:
            exponent = math.nan
        if not math.isfinite(exponent) or exponent < 0:
            raise LNSConfigError(f"{EXPONENT}={text!r}: expected a finite number >= 0 (0.5 is the paper's)")
        policy = os.environ.get(SCALED_INIT, "").strip() or "auto"
        if policy not in SCALED_INIT_POLICIES:
            near = difflib.get_close_matches(policy, SCALED_INIT_POLICIES, n=1)
            hint = f" (did you mean {near[0]!r}?)" if near else ""
            raise LNSConfigError(f"{SCALED_INIT}={policy!r}{hint}: expected one of {', '.join(SCALED_INIT_POLICIES)}")
        return cls(exponent, policy)

    def scaled_init_off(self, *, lns: bool) -> bool:
        """Whether the residual output projections are drawn without their depth factor."""
        return self.scaled_init == "off" or (lns and self.scaled_init == "auto")
