"""The table of schemes, with one row for each. A new scheme needs a row and a test of its equation.

In the equations x is the stream, f the sub-layer, N a norm of the model's base type, l the 1-based number of the
block, L the number of blocks. LNS is arXiv 2502.05795, Mix-LN arXiv 2412.13795. docs/schemes.md has the defaults and
the deviations of the published code.
"""

from __future__ import annotations

import math
from decimal import ROUND_HALF_UP, Decimal
from typing import Any, Callable

from olmo_lns.schemes.factor import DEFAULT_EXPONENT, lns_factor
from olmo_lns.schemes.plan import SUB_LAYERS, Learned, Plan
from olmo_lns.schemes.registry import Definition, Parameter, Scheme, define_scheme

_LNS_PAPER, _MIX_LN_PAPER = "arXiv 2502.05795", "arXiv 2412.13795"


def _exponent(value: float) -> None:
    lns_factor(1, exponent=value)


def _share(value: float) -> None:
    if not 0 <= value <= 1:
        raise ValueError(f"expected a share of the blocks from 0 to 1, found {value!r}")


def _count(value: float) -> None:
    if value < 1:
        raise ValueError(f"expected an integer >= 1, found {value!r}")


def _start(value: float) -> None:
    if value < 0:
        raise ValueError(f"expected a number >= 0, found {value!r}")


EXPONENT = Parameter(DEFAULT_EXPONENT, _exponent, "exponent p of the factor layer_number ** -p; the paper has 0.5")
ALPHA = Parameter(
    0.25, _share, "share of the blocks that are Post-LN, from the first: round(alpha * L), where a half is rounded up"
)
GROUPS = Parameter(8, _count, "number of groups of channels; a norm takes its statistics over each group")
START = Parameter(0.0, _start, "first value of the learned factor; 0 stands for the formula of the scheme")

_PlanFunction = Callable[..., Plan]
_POST_LN = Plan(norm_before=False, norm_on_sum=True)


def _always(plan: Plan) -> _PlanFunction:
    """Return a function that gives the same plan for every block."""
    return lambda layer_number, n_layers, sub_layer: plan


def _with_factor(field: str, *sub_layers: str, **form: Any) -> _PlanFunction:
    """Return a plan function with LNS's factor in one field.

    :param sub_layers: the sub-layers with the factor; none means both.
    :param form: the other fields of the plan.
    """

    def plan(layer_number: int, n_layers: int, sub_layer: str, *, exponent: float) -> Plan:
        scaled = sub_layer in (sub_layers or SUB_LAYERS)
        factor: dict[str, Any] = {field: lns_factor(layer_number, exponent=exponent) if scaled else 1.0}
        return Plan(**factor, **form)

    return plan


def _mix_ln(layer_number: int, n_layers: int, sub_layer: str, *, alpha: float) -> Plan:
    """Post-LN in the first round(alpha * L) blocks, then Pre-LN. The paper has alpha 0.25, and 0.0625 for its 7B."""
    # In decimal arithmetic: in floats 0.29 * 50 is less than 14.5.
    posts = (Decimal(str(alpha)) * n_layers).to_integral_value(ROUND_HALF_UP)
    return _POST_LN if layer_number <= posts else Plan()


def _deep_norm(layer_number: int, n_layers: int, sub_layer: str) -> Plan:
    """N((2L)^(1/4) x + f(x)), where v, o and both feed-forward matrices are drawn times (8L)^(-1/4).

    The source is arXiv 2203.00555, decoder-only. The code of the LNS and Mix-LN papers draws with the inverse gain.
    """
    gain = (8 * n_layers) ** -0.25
    factors = tuple((role, gain) for role in ("v", "o", "ff_in", "ff_out"))
    return Plan(norm_before=False, norm_on_sum=True, alpha=(2 * n_layers) ** 0.25, init_factors=factors)


def _admin(layer_number: int, n_layers: int, sub_layer: str) -> Plan:
    """N(w * x + f(x)), where w is a learned vector that starts at sqrt((2L + 1) / ln(2L + 1) - 1).

    The source is arXiv 2004.08249, in the closed form of its authors' admin-torch, without the profiling pass.
    """
    sub_layers = 2 * n_layers
    start = math.sqrt((sub_layers + 1) / math.log(sub_layers + 1) - 1)
    return Plan(norm_before=False, norm_on_sum=True, omega=Learned(per_channel=True, start=start))


def _group_ln(layer_number: int, n_layers: int, sub_layer: str, *, groups: int) -> Plan:
    """x + f(G(x)), where G is a norm over groups of channels of one token, with one gain per channel.

    The papers' code takes the statistics over all tokens of the sequence, including future ones. This scheme is causal.
    """
    return Plan(groups=groups)


def _layer_scale(layer_number: int, n_layers: int, sub_layer: str, *, start: float) -> Plan:
    """x + g * f(N(x)), where g is a learned vector (arXiv 2103.17239).

    It starts at 0.1 in models of up to 18 blocks, at 1e-5 up to 24, and at 1e-6 above.
    """
    by_depth = 0.1 if n_layers <= 18 else 1e-5 if n_layers <= 24 else 1e-6
    return Plan(gate=Learned(per_channel=True, start=start or by_depth))


def _skip_init(layer_number: int, n_layers: int, sub_layer: str, *, start: float) -> Plan:
    """x + a f(N(x)), where a is one learned number (arXiv 2002.10444).

    It starts at 1/sqrt(L). In the papers' code it starts at 0.001.
    """
    return Plan(gate=Learned(per_channel=False, start=start or n_layers**-0.5))


_EXPONENT_ONLY = {"exponent": EXPONENT}  # p of l^-p
_TABLE_8, _IN_NO_PAPER = f"{_LNS_PAPER}, table 8", f"none: with the factor of {_LNS_PAPER}"


def _add(name: str, title: str, label: str, plan: _PlanFunction, source: str, **more: Any) -> None:
    define_scheme(Definition(name, title, label, plan, source, **more))


# x + f(N(x)); with LNS's factor: x + f(N(x) / sqrt(l))
_add("preln", "Pre-LN", "Pre-LN", _always(Plan()), f"{_LNS_PAPER}, eq. 2-3", initialization="upstream")
_add(
    "lns",
    "LayerNorm Scaling",
    "Pre-LN + LNS",
    _with_factor("norm_scale"),
    f"{_LNS_PAPER}, eq. 12",
    parameters=_EXPONENT_ONLY,
)
# N(x + f(x)); the model's final norm stays and the model ends in two norms, as in the papers' code
_add("postln", "Post-LN", "Post-LN", _always(_POST_LN), f"{_MIX_LN_PAPER}, figure 1a")
_add("mixln", "Mix-LN", "Mix-LN", _mix_ln, f"{_MIX_LN_PAPER}, section 4 and table 7", parameters={"alpha": ALPHA})
_add("deepnorm", "DeepNorm", "DeepNorm", _deep_norm, "arXiv 2203.00555, figure 2")
# x + N'(f(N(x))), also Peri-LN's block; with the factor: x + l^-exponent N'(f(N(x)))
_add("sandwich", "Sandwich-LN", "Sandwich-LN", _always(Plan(norm_on_output=True)), "arXiv 2105.13290; arXiv 2502.02732")
_add(
    "sandwich_depth",
    "Sandwich-LN with depth factor",
    "Sandwich-LN / l^0.5",
    _with_factor("output_scale", norm_on_output=True),
    _IN_NO_PAPER,
    parameters=_EXPONENT_ONLY,
)
# x + N(f(x)), OLMo's norm_after; with the factor: x + l^-exponent N(f(x))
_add(
    "branchln",
    "Branch-LN",
    "OLMo 2's order",
    _always(Plan(norm_before=False, norm_on_output=True)),
    "arXiv 2501.00656, section 3",
)
_add(
    "branchln_depth",
    "Branch-LN with depth factor",
    "OLMo 2's order / l^0.5",
    _with_factor("output_scale", norm_before=False, norm_on_output=True),
    _IN_NO_PAPER,
    parameters=_EXPONENT_ONLY,
)
_add("admin", "Admin", "Admin", _admin, "arXiv 2004.08249; admin-torch's closed form")
_add("groupln", "Group-LN", "Group-LN", _group_ln, f"{_LNS_PAPER}, table 7, made causal", parameters={"groups": GROUPS})
_add("layerscale", "LayerScale", "LayerScale", _layer_scale, "arXiv 2103.17239, eq. 2", parameters={"start": START})
_add("skipinit", "SkipInit", "SkipInit", _skip_init, f"{_LNS_PAPER}, section 6 (3)", parameters={"start": START})
# x + f(N(x / sqrt(l))): differs from Pre-LN only by the norm's eps, because a norm cancels a factor
_add(
    "lnsbefore",
    "LNS before the norm",
    "LNS before LN",
    _with_factor("input_scale"),
    _TABLE_8,
    parameters=_EXPONENT_ONLY,
)
# x + f(N(x)) / sqrt(l), in both sub-layers or one
_add(
    "lnsafterbranch",
    "LNS after attention and feed-forward",
    "LNS after Attn/FFN",
    _with_factor("output_scale"),
    _TABLE_8,
    parameters=_EXPONENT_ONLY,
)
_add(
    "lnsafterattn",
    "LNS after attention",
    "LNS after Attn",
    _with_factor("output_scale", "attn"),
    _TABLE_8,
    parameters=_EXPONENT_ONLY,
)
_add(
    "lnsafterff",
    "LNS after feed-forward",
    "LNS after FFN",
    _with_factor("output_scale", "ff"),
    _TABLE_8,
    parameters=_EXPONENT_ONLY,
)
# (x + f(N(x))) / sqrt(l): Pre-LN whose branches grow with the running product of sqrt(l); it diverges
_add(
    "lnsafterresidual",
    "LNS after the residual addition",
    "LNS after residual",
    _with_factor("stream_scale"),
    _TABLE_8,
    parameters=_EXPONENT_ONLY,
)

#: Stock Pre-LN: the framework is not changed.
PRE_LN = Scheme.of("preln")
#: LayerNorm Scaling with the paper's exponent.
LNS = Scheme.of("lns")
