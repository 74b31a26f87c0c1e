"""The schemes: one row each. A new one is a row here and a test of its equation.

In the equations x is the stream, f the sub-layer, N a norm of the model's base type, l the 1-based number of the
block, L how many there are. LNS is arXiv 2502.05795, Mix-LN arXiv 2412.13795. Defaults and what the published
code does otherwise: docs/schemes.md.
"""

from __future__ import annotations

import math
from decimal import ROUND_HALF_UP, Decimal
from typing import Callable

from olmo_lns.schemes.factor import DEFAULT_EXPONENT, lns_scale
from olmo_lns.schemes.plan import Learned, Plan
from olmo_lns.schemes.registry import Definition, Parameter, Scheme, define

_LNS_PAPER, _MIX_LN_PAPER = "arXiv 2502.05795", "arXiv 2412.13795"


def _exponent(value: float) -> None:
    lns_scale(1, exponent=value)


def _share(value: float) -> None:
    if not 0 <= value <= 1:
        raise ValueError(f"expected a share of the blocks from 0 to 1, found {value!r}")


def _count(value: float) -> None:
    if value < 1:
        raise ValueError(f"expected an integer >= 1, found {value!r}")


def _start(value: float) -> None:
    if value < 0:
        raise ValueError(f"expected a number >= 0, found {value!r}")


EXPONENT = Parameter(DEFAULT_EXPONENT, _exponent, "of the factor layer_number ** -exponent; 0.5 is the paper's")
ALPHA = Parameter(0.25, _share, "share of the blocks, from the first, that are Post-LN; round(alpha * L), half up")
GROUPS = Parameter(8, _count, "groups of d_model / groups channels over which a norm's statistics are taken")
START = Parameter(0.0, _start, "first value of the learned factor; 0 is the scheme's own formula")


def _pre_ln(layer_number: int, n_layers: int, sub_layer: str) -> Plan:
    """x + f(N(x))"""
    return Plan()


def _lns(layer_number: int, n_layers: int, sub_layer: str, *, exponent: float) -> Plan:
    """x + f(N(x) / sqrt(l))"""
    return Plan(norm_scale=lns_scale(layer_number, exponent=exponent))


def _post_ln(layer_number: int, n_layers: int, sub_layer: str) -> Plan:
    """N(x + f(x)); the model's final norm stays, so that it ends in two norms, as in the papers' code."""
    return Plan(pre=False, post=True)


def _mix_ln(layer_number: int, n_layers: int, sub_layer: str, *, alpha: float) -> Plan:
    """Post-LN in the first round(alpha * L) blocks (half up), Pre-LN above; alpha 0.25, 0.0625 for 7B (table 7)."""
    # Of the decimal that was written: in floats 0.29 * 50 is less than 14.5.
    posts = (Decimal(str(alpha)) * n_layers).to_integral_value(ROUND_HALF_UP)
    return _post_ln(1, 1, "") if layer_number <= posts else Plan()


def _deep_norm(layer_number: int, n_layers: int, sub_layer: str) -> Plan:
    """N((2L)^(1/4) x + f(x)); v, o and both feed-forward matrices start times (8L)^(-1/4).

    arXiv 2203.00555, decoder-only. The LNS and Mix-LN papers' code draws with the inverse of this gain.
    """
    gain = (8 * n_layers) ** -0.25
    gains = tuple((role, gain) for role in ("v", "o", "ff_in", "ff_out"))
    return Plan(pre=False, post=True, alpha=(2 * n_layers) ** 0.25, gains=gains)


def _sandwich(layer_number: int, n_layers: int, sub_layer: str) -> Plan:
    """x + N'(f(N(x))): arXiv 2105.13290; the block of Peri-LN, arXiv 2502.02732."""
    return Plan(branch=True)


def _sandwich_depth(layer_number: int, n_layers: int, sub_layer: str, *, exponent: float) -> Plan:
    """x + l^-exponent N'(f(N(x))): sandwich with LNS's factor on the branch. In no paper."""
    return Plan(branch=True, branch_scale=lns_scale(layer_number, exponent=exponent))


def _branch_ln(layer_number: int, n_layers: int, sub_layer: str) -> Plan:
    """x + N(f(x)): OLMo 2's order (arXiv 2501.00656), which OLMo calls norm_after."""
    return Plan(pre=False, branch=True)


def _branch_ln_depth(layer_number: int, n_layers: int, sub_layer: str, *, exponent: float) -> Plan:
    """x + l^-exponent N(f(x)): OLMo 2's order with LNS's factor. In no paper."""
    return Plan(pre=False, branch=True, branch_scale=lns_scale(layer_number, exponent=exponent))


def _admin(layer_number: int, n_layers: int, sub_layer: str) -> Plan:
    """N(w * x + f(x)), w a learned vector from sqrt((2L + 1) / ln(2L + 1) - 1).

    arXiv 2004.08249 in the closed form of its authors' admin-torch; the profiling pass is not built.
    """
    sub_layers = 2 * n_layers
    start = math.sqrt((sub_layers + 1) / math.log(sub_layers + 1) - 1)
    return Plan(pre=False, post=True, omega=Learned(per_channel=True, start=start))


def _group_ln(layer_number: int, n_layers: int, sub_layer: str, *, groups: int) -> Plan:
    """x + f(G(x)), G a norm over groups of channels of one token, with one gain per channel.

    Ours: the papers' code takes the statistics over all tokens of the sequence, future ones included.
    """
    return Plan(groups=groups)


def _layer_scale(layer_number: int, n_layers: int, sub_layer: str, *, start: float) -> Plan:
    """x + g * f(N(x)), g a learned vector from 0.1 up to 18 blocks, 1e-5 up to 24, 1e-6 above (arXiv 2103.17239)."""
    by_depth = 0.1 if n_layers <= 18 else 1e-5 if n_layers <= 24 else 1e-6
    return Plan(gate=Learned(per_channel=True, start=start or by_depth))


def _skip_init(layer_number: int, n_layers: int, sub_layer: str, *, start: float) -> Plan:
    """x + a f(N(x)), a one learned number from 1/sqrt(L) (arXiv 2002.10444; 0.001 in the papers' code)."""
    return Plan(gate=Learned(per_channel=False, start=start or n_layers**-0.5))


def _lns_before(layer_number: int, n_layers: int, sub_layer: str, *, exponent: float) -> Plan:
    """x + f(N(x / sqrt(l))): Pre-LN but for the norm's eps, since a norm cancels a factor."""
    return Plan(pre_scale=lns_scale(layer_number, exponent=exponent))


def _lns_after(*scaled: str) -> Callable[..., Plan]:
    """x + f(N(x)) / sqrt(l) for the sub-layers ``scaled``, Pre-LN for the others."""

    def plan(layer_number: int, n_layers: int, sub_layer: str, *, exponent: float) -> Plan:
        return Plan(branch_scale=lns_scale(layer_number, exponent=exponent) if sub_layer in scaled else 1.0)

    plan.__doc__ = f"x + f(N(x)) / sqrt(l) for {' and '.join(scaled)}"
    return plan


def _lns_after_residual(layer_number: int, n_layers: int, sub_layer: str, *, exponent: float) -> Plan:
    """(x + f(N(x))) / sqrt(l): Pre-LN whose branches grow with the running product of sqrt(l); it diverges."""
    return Plan(stream_scale=lns_scale(layer_number, exponent=exponent))


_POSITIONS = f"{_LNS_PAPER}, table 8"
_E = {"exponent": EXPONENT}

define(Definition("preln", "Pre-LN", "Pre-LN", _pre_ln, f"{_LNS_PAPER}, eq. 2-3", initialization="upstream"))
define(Definition("lns", "LayerNorm Scaling", "Pre-LN + LNS", _lns, f"{_LNS_PAPER}, eq. 12", _E))
define(Definition("postln", "Post-LN", "Post-LN", _post_ln, f"{_MIX_LN_PAPER}, figure 1a"))
define(Definition("mixln", "Mix-LN", "Mix-LN", _mix_ln, f"{_MIX_LN_PAPER}, section 4 and table 7", {"alpha": ALPHA}))
define(Definition("deepnorm", "DeepNorm", "DeepNorm", _deep_norm, "arXiv 2203.00555, figure 2"))
define(Definition("sandwich", "Sandwich-LN", "Sandwich-LN", _sandwich, "arXiv 2105.13290; arXiv 2502.02732"))
_title, _source = "Sandwich-LN with depth factor", f"none: sandwich with the factor of {_LNS_PAPER}"
define(Definition("sandwich_depth", _title, "Sandwich-LN / l^0.5", _sandwich_depth, _source, _E))
define(Definition("branchln", "Branch-LN", "OLMo 2's order", _branch_ln, "arXiv 2501.00656, section 3"))
_title, _source = "Branch-LN with depth factor", f"none: OLMo 2's order with the factor of {_LNS_PAPER}"
define(Definition("branchln_depth", _title, "OLMo 2's order / l^0.5", _branch_ln_depth, _source, _E))
define(Definition("admin", "Admin", "Admin", _admin, "arXiv 2004.08249; admin-torch's closed form"))
_source = f"{_LNS_PAPER}, table 7, made causal"
define(Definition("groupln", "Group-LN", "Group-LN", _group_ln, _source, {"groups": GROUPS}))
define(Definition("layerscale", "LayerScale", "LayerScale", _layer_scale, "arXiv 2103.17239, eq. 2", {"start": START}))
define(Definition("skipinit", "SkipInit", "SkipInit", _skip_init, f"{_LNS_PAPER}, section 6 (3)", {"start": START}))
define(Definition("lnsbefore", "LNS before the norm", "LNS before LN", _lns_before, _POSITIONS, _E))
_title, _plan = "LNS after attention and feed-forward", _lns_after("attn", "ff")
define(Definition("lnsafterbranch", _title, "LNS after Attn/FFN", _plan, _POSITIONS, _E))
define(Definition("lnsafterattn", "LNS after attention", "LNS after Attn", _lns_after("attn"), _POSITIONS, _E))
define(Definition("lnsafterff", "LNS after feed-forward", "LNS after FFN", _lns_after("ff"), _POSITIONS, _E))
_title = "LNS after the residual addition"
define(Definition("lnsafterresidual", _title, "LNS after residual", _lns_after_residual, _POSITIONS, _E))

#: Stock: nothing of a framework is touched.
PRE_LN = Scheme.of("preln")
#: LayerNorm Scaling with the paper's exponent.
LNS = Scheme.of("lns")
