"""The arithmetic of torchtitan's norms.

The plugin knows how torchtitan's RMSNorm computes, so it multiplies the gain inside of this norm. For every other class
of norm, it multiplies the output.
"""

from __future__ import annotations

from typing import Any

from torchtitan.models.common.nn_modules import RMSNorm

from olmo_lns.norm import DtypeRule, NormArithmetic

#: RMSNorm as torch computes it. In torchtitan's whole-DTensor backend the input is a DTensor. The output is multiplied
#: then.
_RMS_NORM = NormArithmetic(dtypes=DtypeRule.INPUT, multiplies_dtensors=True)


def keep_argument_names(norm: Any) -> None:
    """Let torchtitan read the names of a module's arguments from its stock forward. It shards the inputs by them."""
    getattr(norm, "_cache_pos_arg_names", lambda: None)()


def arithmetic_of(norm: Any) -> NormArithmetic | None:
    """Return the arithmetic of torchtitan's RMSNorm, or None for any other norm."""
    return _RMS_NORM if type(norm) is RMSNorm else None
