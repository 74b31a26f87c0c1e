"""Schemes as values: one spelling, plans against the formulas, and what derives from a plan."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from olmo_lns import schemes
from olmo_lns.errors import LNSConfigError
from olmo_lns.schemes import LNS, PRE_LN, Definition, Learned, Parameter, Plan, Scheme, parse, registry
from olmo_lns.schemes.initialization import factor, resolve

EXPONENTS = st.floats(0, 8, allow_nan=False)


@given(EXPONENTS)
def test_what_is_spelled_is_read_back(exponent):
    scheme = Scheme.of("lns", exponent=exponent)
    assert parse(str(scheme)) == scheme
    assert scheme.parameters == {"exponent": exponent} and hash(parse(str(scheme))) == hash(scheme)
    assert str(parse(str(scheme))) == str(scheme)


def test_defaults_are_left_out_of_the_spelling():
    assert str(LNS) == str(parse("lns:exponent=0.5")) == str(parse(" lns : exponent = .5 ".replace(" :", ":"))) == "lns"
    assert str(parse("lns:exponent=2.50e-1")) == "lns:exponent=0.25"
    assert str(PRE_LN) == "preln" and PRE_LN.is_pre_ln and not LNS.is_pre_ln


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lsn", "unknown scheme 'lsn' .did you mean 'lns'.*expected one of preln, lns, postln"),
        ("", "unknown scheme ''"),
        ("lns:0.25", "found '0.25', expected name:key=value"),
        ("lns:exponent=", "found 'exponent=', expected"),
        ("lns:exponent=0.1,exponent=0.2", "found 'exponent=0.2', expected"),
        ("lns:exponent=0.1,", "found '', expected"),
        ("lns:exponant=0.1", "unknown parameter 'exponant' .did you mean 'exponent'.*expected one of exponent"),
        ("preln:exponent=0.1", "unknown parameter 'exponent': it has none"),
        ("lns:exponent=half", "expected a finite number, found 'half'"),
        ("lns:exponent=nan", "expected a finite number, found 'nan'"),
        ("lns:exponent=-0.5", "exponent must be a finite number >= 0, got -0.5"),
    ],
)
def test_other_texts_are_refused(text, message):
    with pytest.raises(LNSConfigError, match=message):
        parse(text)


@pytest.mark.parametrize("wrong", [True, None, [0.5], math.inf, 10**400])
def test_values_that_are_no_number_are_refused(wrong):
    with pytest.raises(LNSConfigError, match="'lns': exponent: expected a finite number"):
        Scheme.of("lns", exponent=wrong)


@pytest.mark.parametrize(
    ("value", "read"), [(3, 3), ("3", 3), (3.0, 3), (3.5, None), ("3.5", None), (10**400, None), (math.nan, None)]
)
def test_integers_are_read_as_integers(value, read):
    parameter = Parameter(2, lambda number: None, "")
    if read is None:
        with pytest.raises(ValueError, match="expected an integer"):
            parameter.read(value)
    else:
        assert parameter.read(value) == read and type(parameter.read(value)) is int


GATE = Learned(per_channel=True, start=0.1)


@pytest.fixture
def table(monkeypatch):
    """A copy of the table that a test may add to."""
    monkeypatch.setattr(registry, "_table", dict(registry._table))


def test_one_block_with_another_form_decides_for_the_model(table):
    """Post-norm in the first blocks, as Mix-LN: sites, keys, foldability and parameters are sums over blocks."""

    def plan(layer_number, n_layers, sub_layer, *, blocks):
        first = layer_number <= blocks
        return Plan(pre=not first, post=first, gate=GATE if sub_layer == "ff" else None)

    blocks = Parameter(1, lambda value: None, "how many blocks start with post-norm")
    schemes.define(Definition("mixed", "Mixed", "Mixed", plan, "a test", {"blocks": blocks}))
    mixed = parse("mixed:blocks=2")
    assert schemes.names()[:2] == ("preln", "lns") and schemes.names()[-1] == "mixed" and str(mixed) == "mixed:blocks=2"
    assert mixed.sites(4) == 8 and mixed.extra_parameters(4, 8, 16) == 4 * 8
    assert not (mixed.keeps_forward(4) or mixed.stock_keys(4) or mixed.folds_into_pre_ln(4))
    order = [(number, sub_layer) for number, sub_layer, _ in mixed.plans(2)]
    assert order == [(1, "attn"), (1, "ff"), (2, "attn"), (2, "ff")]
    assert parse("mixed:blocks=0").folds_into_pre_ln(4)


@pytest.mark.parametrize("name", ["lns", "Toy", "toy-2", "toy:x", ""])
def test_a_name_that_cannot_be_spelled_or_is_taken_is_refused(table, name):
    with pytest.raises(ValueError, match=f"scheme name '{name}'"):
        schemes.define(Definition(name, "", "", lambda *_: Plan(), ""))


def test_initializations():
    assert factor("plain", 3, 8) == 1.0
    assert factor("scaled", 3, 8) == pytest.approx(0.25) == factor("scaled", 8, 8)
    assert factor("depth_scaled", 8, 12) == pytest.approx(0.25)
    assert factor("depth_scaled", 2, 12) == pytest.approx(0.5)
    with pytest.raises(LNSConfigError, match="'upstream' has no factor of its own"):
        factor("upstream", 1, 1)
    assert (resolve("", PRE_LN), resolve("", LNS), resolve("scaled", LNS)) == ("upstream", "plain", "scaled")
    with pytest.raises(LNSConfigError, match="unknown initialization 'plane' .did you mean 'plain'"):
        resolve("plane", LNS)
