"""A scheme has one spelling, and each row of the table follows its source's formula, written out here by hand."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from olmo_lns import schemes
from olmo_lns.errors import LNSConfigError
from olmo_lns.schemes import (
    LNS,
    PRE_LN,
    SUB_LAYERS,
    Definition,
    Learned,
    Parameter,
    Plan,
    Scheme,
    parse,
    registry,
)
from olmo_lns.schemes.depth_factor import depth_factor

EXPONENTS = st.floats(0, 8, allow_nan=False)


@given(EXPONENTS)
def test_a_spelled_scheme_is_read_back(exponent):
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
        ("lsn", "Unknown scheme 'lsn' .did you mean 'lns'.*Use one of preln, lns, postln"),
        ("", "Unknown scheme ''"),
        ("lns:0.25", "cannot be read at '0.25'. Write name:key=value"),
        ("lns:exponent=0.1,exponent=0.2", "cannot be read at 'exponent=0.2'"),
        ("lns:exponant=0.1", "no parameter 'exponant' .did you mean 'exponent'.*Use one of exponent"),
        ("lns:exponent=half", "expected a finite number, found 'half'"),
        ("lns:exponent=-0.5", "exponent must be a finite number >= 0, got -0.5"),
        ("mixln:alpha=1.5", "expected a share of the blocks from 0 to 1, found 1.5"),
        ("groupln:groups=0", "expected an integer >= 1, found 0"),
        ("layerscale:start=-0.1", "expected a number >= 0, found -0.1"),
    ],
)
def test_a_text_that_is_not_a_scheme_is_refused(text, message):
    with pytest.raises(LNSConfigError, match=message):
        parse(text)


def test_values_are_numbers_and_integers_are_read_as_integers():
    for wrong in (True, None, math.inf, 10**400):
        with pytest.raises(
            LNSConfigError, match="'exponent' of the scheme 'lns' cannot be set: expected a finite number"
        ):
            Scheme.of("lns", exponent=wrong)
    whole = Parameter(2, lambda number: None, "")
    for value in (3, "3", 3.0):
        assert whole.read(value) == 3 and type(whole.read(value)) is int
    for wrong in (3.5, "3.5", 10**400, math.nan):
        with pytest.raises(ValueError, match="expected an integer"):
            whole.read(wrong)


def test_a_defined_scheme_is_spelled_and_its_name_is_taken_once(monkeypatch):
    monkeypatch.setattr(registry, "_table", dict(registry._table))
    blocks = Parameter(1, lambda value: None, "how many blocks")
    schemes.define_scheme(
        Definition("mixed", "Mixed", "Mixed", lambda *_, blocks: Plan(norm_before=blocks > 1), "", {"blocks": blocks})
    )
    assert schemes.names()[:2] == ("preln", "lns") and schemes.names()[-1] == "mixed"
    assert str(parse("mixed:blocks=2")) == "mixed:blocks=2" and parse("mixed:blocks=2").plan(1, 4, "ff") == Plan()
    with pytest.raises(ValueError, match="A scheme cannot be named 'mixed'. The name must be new"):
        schemes.define_scheme(schemes.definition("mixed"))
    with pytest.raises(ValueError, match="does not end in _rms"):
        schemes.define_scheme(Definition("mixed_rms", "Mixed", "Mixed", lambda *_: Plan(), "", {}))
    order = [(number, sub_layer) for number, sub_layer, _ in parse("mixed").plans(2)]
    assert order == [(1, "attn"), (1, "ff"), (2, "attn"), (2, "ff")]


def test_initializations_have_their_factors_and_defaults():
    assert depth_factor("plain", 3, 8) == 1.0
    assert depth_factor("scaled", 3, 8) == pytest.approx(0.25) == depth_factor("scaled", 8, 8)
    assert depth_factor("depth_scaled", 8, 12) == pytest.approx(0.25)
    assert depth_factor("depth_scaled", 2, 12) == pytest.approx(0.5)
    with pytest.raises(LNSConfigError, match="'upstream' has no known factor"):
        depth_factor("upstream", 1, 1)
    assert (PRE_LN.definition.initialization, LNS.definition.initialization) == ("upstream", "plain")


POST = Plan(norm_before=False, norm_on_sum=True)

#: Spelling -> the plan of block 4 of 16: one for both sub-layers, or (attention, feed-forward). test_block.py of OLMo
#: compares the default parameters with the formulas.
BLOCK_4_OF_16 = {
    "mixln:alpha=0.1": Plan(),
    "sandwich_depth:exponent=1.0": Plan(norm_on_output=True, output_scale=0.25),
    "groupln:groups=4": Plan(groups=4),
    "layerscale:start=0.0001": Plan(gate=Learned(True, 1e-4)),
    "skipinit:start=0.001": Plan(gate=Learned(False, 1e-3)),
    "lnsafterattn:exponent=1.0": (Plan(output_scale=0.25), Plan()),
    "lnsafterff:exponent=1.0": (Plan(), Plan(output_scale=0.25)),
}


@pytest.mark.parametrize("spelling", BLOCK_4_OF_16)
def test_each_spelling_gives_its_plan(spelling):
    scheme, expected = parse(spelling), BLOCK_4_OF_16[spelling]
    found = tuple(scheme.plan(4, 16, sub_layer) for sub_layer in SUB_LAYERS)
    assert str(scheme) == spelling and found == (expected if isinstance(expected, tuple) else (expected, expected))


@pytest.mark.parametrize(
    ("blocks", "alpha", "post"),
    [
        *((12, 0.25, 3), (24, 0.25, 6), (32, 0.0625, 2)),
        *((24, 0.167, 4), (24, 0.33, 8), (24, 0.417, 10), (24, 0.5, 12)),
        *((24, 0.0, 0), (24, 1.0, 24), (10, 0.25, 3), (2, 0.25, 1)),
        *((50, 0.29, 15), (50, 0.2899999, 14), (50, 0.57, 29), (90, 0.35, 32), (3, 1 / 3, 1)),
    ],
)
def test_mix_ln_has_as_many_post_ln_blocks_as_the_papers_tables(blocks, alpha, post):
    """Table 7's models, table 5's sweep on 24 blocks, and halves, which are rounded up."""
    plans = [Scheme.of("mixln", alpha=alpha).plan(number, blocks, "ff") for number in range(1, blocks + 1)]
    assert plans == [POST] * post + [Plan()] * (blocks - post)


def test_constants_are_the_published_ones():
    """DeepNorm's alpha and beta, Admin's omega, and where the gates of CaiT and of SkipInit start."""
    deep = {blocks: parse("deepnorm").plan(1, blocks, "attn") for blocks in (12, 24, 32)}
    assert [plan.alpha for plan in deep.values()] == pytest.approx([2.213, 2.632, 2.828], abs=1e-3)
    assert [dict(plan.init_factors)["v"] for plan in deep.values()] == pytest.approx([0.3195, 0.2686, 0.25], abs=1e-4)
    admin = [parse("admin").plan(1, blocks, "attn").omega.start for blocks in (12, 24)]
    assert admin == pytest.approx([2.601, 3.404], abs=1e-3)
    cait = [parse("layerscale").plan(1, blocks, "ff").gate.start for blocks in (18, 19, 24, 25)]
    assert cait == [0.1, 1e-5, 1e-5, 1e-6]
    assert parse("skipinit").plan(1, 16, "ff").gate == Learned(False, 0.25)


def test_properties_are_derived_from_the_plans():
    folded = ("preln", "lns", "layerscale", "skipinit", "lnsafterbranch", "lnsafterattn", "lnsafterff")
    others = (
        "postln",
        "mixln",
        "deepnorm",
        "sandwich",
        "branchln",
        "admin",
        "groupln",
        "lnsbefore",
        "lnsafterresidual",
    )
    for name in folded + others:  # folded: the factors and gates fit into the weights of a Pre-LN model
        scheme = parse(name)
        assert scheme.folds_into_pre_ln(4) is (name in folded) and scheme.only_scales_norms(4) is (
            name in ("preln", "lns")
        )
        assert scheme.norm_count(4) == (16 if name == "sandwich" else 8)
