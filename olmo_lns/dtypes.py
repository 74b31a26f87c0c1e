"""The dtypes of weights by their names on the command line; torch is loaded where one is needed, not for ``--help``."""

from __future__ import annotations

__all__ = ["NAMES"]

#: Name on the command line -> torch's; :data:`olmo_lns.norm.dtypes.DTYPES` has the dtypes themselves.
NAMES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
