"""The table of arms: the settings that each framework gets for an arm."""

from dataclasses import replace

import pytest

from olmo_lns import arms, schemes
from olmo_lns.arms import ARMS, Arm, arm_from_text
from olmo_lns.errors import LNSConfigError
from olmo_lns.schemes import LNS, PRE_LN, Definition, Plan, Scheme, define_scheme, registry
from olmo_lns.study.engines import MEGATRON, OLMO, OLMO_CORE
from olmo_lns.study.planning import arm_problems


def arm(scheme, initialization, init_fn=""):
    return Arm("x", "X", "black", "-", "o", scheme, initialization, "", init_fn)


QUARTER = Scheme.of("lns", exponent=0.25)


@pytest.mark.parametrize(
    ("given", "olmo", "megatron"),
    [
        (arm(PRE_LN, "plain"), ("rms", "normal"), {"no_scaled_init": True}),
        (arm(PRE_LN, "scaled"), ("rms", "normal_scaled"), {}),
        (arm(PRE_LN, "depth_scaled"), ("rms", "normal_depth_scaled"), None),
        (arm(PRE_LN, "upstream", "mitchell"), ("rms", "mitchell"), None),
        (arm(LNS, "plain"), ("lns_rms", "normal"), {"layernorm_scaling": True}),
        (
            arm(QUARTER, "scaled"),
            ("lns_rms:exponent=0.25", "normal_scaled"),
            {"layernorm_scaling": True, "layernorm_scaling_exponent": 0.25, "layernorm_scaling_keep_scaled_init": True},
        ),
    ],
)
def test_scheme_and_initialization_of_an_arm_give_the_settings_of_each_framework(given, olmo, megatron):
    assert OLMO.arm_overrides(given) == (olmo and {"model.layer_norm_type": olmo[0], "model.init_fn": olmo[1]})
    assert MEGATRON.arm_overrides(given) == megatron


def test_every_scheme_is_an_arm_with_plain_initialization_and_a_style_of_its_own():
    assert list(ARMS)[:3] == ["preln", "preln_scaled_init", "lns"]
    arms = [arm_from_text(name) for name in schemes.names()]
    assert [arm.scheme.name for arm in arms] == [*schemes.names()] and {arm.initialization for arm in arms} == {"plain"}
    assert len({(arm.line, arm.marker) for arm in ARMS.values()}) == len({a.color for a in ARMS.values()}) == len(ARMS)


def test_settings_that_contradict_the_arm_are_named():
    folder = {"model.layer_norm_type": "lns_rms:exponent=0.25", "model.init_fn": "normal"}
    assert "layer_norm_type is 'lns_rms:exponent=0.25', but arm 'lns'" in arm_problems("lns", folder, OLMO)[0]
    printed = {"layernorm_scaling": True, "layernorm_scaling_exponent": "0.25", "no_scaled_init": False}
    (problem,) = arm_problems("lns", printed, MEGATRON)
    assert problem.startswith("layernorm_scaling_exponent is 0.25, but arm 'lns' needs 0.5.")
    assert arm_problems("lns", printed | {"layernorm_scaling_exponent": "0.5"}, MEGATRON) == []
    assert "use OLMo or Megatron" in arm_problems("lns_scaled_init", {}, OLMO_CORE)[0]
    (problem,) = arm_problems("preln_mitchell", {}, MEGATRON)
    assert problem.startswith("Megatron does not support arm 'preln_mitchell'") and "use OLMo." in problem


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"name": "lns"}, "'lns' exists already"),
        ({"name": "a-b"}, "'a-b' has a name that cannot be a folder"),
        ({"initialization": "big"}, "unknown initialization 'big'. Use one of"),
        (
            {"scheme": LNS, "initialization": "upstream", "init_fn": "mitchell"},
            "init_fn 'mitchell' with initialization 'upstream'",
        ),
    ],
)
def test_an_invalid_arm_is_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        arms.define_arm(replace(arm(PRE_LN, "plain"), **wrong))
    with pytest.raises(LNSConfigError, match="Unknown arm 'lnss' .did you mean 'lns'"):
        arms.arm_from_text("lnss")


def test_the_row_of_a_scheme_is_enough_for_a_study_in_olmo_core(monkeypatch):
    monkeypatch.setattr(registry, "_table", dict(registry._table))
    define_scheme(Definition("halves", "Halves", "Halves", lambda *place: Plan(norm_scale=0.5), "this test", {}))
    block = {
        name: overrides and (overrides["model.block.name"], overrides.get("model.block.scheme"))
        for name in (
            "halves",
            "preln",
            "lns",
            "lns:exponent=0.25",
            "branchln",
            "branchln_depth",
            "mixln:alpha=0.02",
            "postln",
        )
        for overrides in [OLMO_CORE.arm_overrides(arm_from_text(name))]
    }
    assert block == {
        "halves": ("default", "halves"),
        "preln": ("default", None),
        "lns": ("default", "lns"),
        "lns:exponent=0.25": ("default", "lns"),
        "branchln": ("reordered_norm", "branchln"),
        "branchln_depth": ("reordered_norm", "branchln_depth"),
        "mixln:alpha=0.02": None,
        "postln": None,
    }
