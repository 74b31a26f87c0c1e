"""Five schemes and their arms, by which the runs of E1, E2 and E4 take LNS apart.

The process that plans and the one that trains both need this module: name it in an entry point of the group
``olmo_lns.schemes``, as docs/own-scheme.md does, or import it before a description is read.

In the equations x is the stream, f the sub-layer, N the norm, l the number of the block from 1, L the number of blocks.
"""

from __future__ import annotations

from olmo_lns import arms
from olmo_lns.schemes import Definition, Parameter, Plan, Scheme, define_scheme

SOURCE = "none: a part of arXiv 2502.05795"


def _nonnegative(value: float) -> None:
    if value < 0:
        raise ValueError(f"expected an exponent >= 0, found {value!r}")


def _fraction(value: float) -> None:
    if not 0 < value <= 1:
        raise ValueError(f"expected a factor above 0, up to 1, found {value!r}")


E = {"exponent": Parameter(0.5, _nonnegative, "of the factor l ** -exponent")}
S = {"factor": Parameter(0.35, _fraction, "of every block; 0.35 is LNS's mean over 24 blocks")}


def _inputs_drawn_times(gain: float) -> tuple[tuple[str, float], ...]:
    return (("qkv", gain), ("ff_in", gain))


def value_path(layer_number: int, n_layers: int, sub_layer: str, *, exponent: float) -> Plan:
    """x + Attn(N(x)) / l^e, then x + FF(N(x) / l^e): LNS whose attention logits are Pre-LN's."""
    scale = layer_number**-exponent
    return Plan(output_scale=scale) if sub_layer == "attn" else Plan(norm_scale=scale)


def rate_alone(layer_number: int, n_layers: int, sub_layer: str, *, exponent: float) -> Plan:
    """x + f(N(x) / l^e) with q, k, v, gate and up drawn times l^e: LNS that starts as Pre-LN."""
    scale = layer_number**-exponent
    return Plan(norm_scale=scale, init_factors=_inputs_drawn_times(1 / scale))


def start_alone(layer_number: int, n_layers: int, sub_layer: str, *, exponent: float) -> Plan:
    """x + f(N(x)) with q, k, v, gate and up drawn times l^-e: Pre-LN that starts as LNS."""
    return Plan(init_factors=_inputs_drawn_times(layer_number**-exponent))


def uniform(layer_number: int, n_layers: int, sub_layer: str, *, factor: float) -> Plan:
    """x + f(s N(x)), s the same in every block."""
    return Plan(norm_scale=factor)


def reversed_profile(layer_number: int, n_layers: int, sub_layer: str, *, exponent: float) -> Plan:
    """x + f(N(x) / (L + 1 - l)^e): LNS's factors from the last block to the first."""
    return Plan(norm_scale=(n_layers + 1 - layer_number) ** -exponent)


define_scheme(Definition("lnsvalue", "LNS on values and feed-forward", "LNS, logits unscaled", value_path, SOURCE, E))
define_scheme(Definition("lnsrate", "LNS without its start", "LNS, started as Pre-LN", rate_alone, SOURCE, E))
define_scheme(
    Definition("lnsstart", "LNS's start without its factor", "Pre-LN, started as LNS", start_alone, SOURCE, E)
)
define_scheme(Definition("lnsuniform", "one factor for all blocks", "Pre-LN x s", uniform, SOURCE, S))
define_scheme(Definition("lnsreversed", "LNS with its profile reversed", "LNS, reversed", reversed_profile, SOURCE, E))

for _name, _label, _color, _line, _marker in (
    ("lnsvalue", "LNS, logits unscaled", "#393B79", "-", "8"),
    ("lnsrate", "LNS, started as Pre-LN", "#A55194", "--", "8"),
    ("lnsstart", "Pre-LN, started as LNS", "#5254A3", "-.", "8"),
    ("lnsuniform", "Pre-LN x 0.35", "#843C39", ":", "8"),
    ("lnsreversed", "LNS, reversed", "#3182BD", "-", "d"),
):
    _scheme = Scheme.of(_name)
    arms.define_arm(arms.Arm(_name, _label, _color, _line, _marker, _scheme, "plain", _scheme.definition.title))
