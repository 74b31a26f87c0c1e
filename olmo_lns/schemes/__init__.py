"""The schemes in pure Python: what each scheme does in a block, and how a text spells it.

A :class:`Scheme` maps (layer_number, n_layers, sub_layer) to a :class:`Plan`. An integration makes the blocks of one
framework follow these plans.
"""

from __future__ import annotations

from olmo_lns.schemes.depth_factor import INITIALIZATIONS
from olmo_lns.schemes.factor import DEFAULT_EXPONENT, lns_factor
from olmo_lns.schemes.plan import SUB_LAYERS, Learned, Plan
from olmo_lns.schemes.registry import Definition, Parameter, Scheme, as_scheme, define_scheme, definition, names, parse
from olmo_lns.schemes.table import LNS, PRE_LN

__all__ = [
    "DEFAULT_EXPONENT",
    "INITIALIZATIONS",
    "LNS",
    "PRE_LN",
    "SUB_LAYERS",
    "Definition",
    "Learned",
    "Parameter",
    "Plan",
    "Scheme",
    "as_scheme",
    "define_scheme",
    "definition",
    "lns_factor",
    "names",
    "parse",
]
