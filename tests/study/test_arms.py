"""The table of arms: the settings that each framework gets for an arm, and an arm that is added at run time."""

from dataclasses import replace

import pytest
from support.studies import REPOSITORY

from olmo_lns import schemes, sites
from olmo_lns.schemes import LNS, PRE_LN, Definition, Plan, Scheme, registry
from olmo_lns.study import arms, cli
from olmo_lns.study.arms import ARMS, Arm
from olmo_lns.study.engines import MEGATRON, OLMO, settings_of
from olmo_lns.study.engines.olmo import load
from olmo_lns.study.plan.check import arm_problems, init_problems
from olmo_lns.study.plan.spec import Study


def arm(scheme, initialization, init_fn=""):
    return Arm("x", "X", "black", "-", "o", scheme, initialization, "", init_fn)


QUARTER = Scheme.of("lns", exponent=0.25)


@pytest.mark.parametrize(
    ("given", "olmo", "megatron"),
    [
        (arm(PRE_LN, "plain"), ("rms", "normal"), {"no_scaled_init": True}),
        (arm(PRE_LN, "scaled"), ("rms", "normal_scaled"), {}),
        (arm(PRE_LN, "depth_scaled"), ("rms", "normal_depth_scaled"), None),
        (arm(PRE_LN, "upstream"), None, {}),
        (arm(PRE_LN, "upstream", "mitchell"), ("rms", "mitchell"), None),
        (arm(LNS, "plain"), ("lns_rms", "normal"), {"layernorm_scaling": True}),
        (arm(LNS, "plain", "full_megatron"), ("lns_rms", "full_megatron"), None),
        (arm(Scheme.of("mixln", alpha=0.5), "plain"), ("mixln_rms:alpha=0.5", "normal"), None),
        (
            arm(QUARTER, "scaled"),
            ("lns_rms:exponent=0.25", "normal_scaled"),
            {"layernorm_scaling": True, "layernorm_scaling_exponent": 0.25, "layernorm_scaling_keep_scaled_init": True},
        ),
    ],
    ids=lambda value: f"{value.scheme} {value.initialization}" if isinstance(value, Arm) else "",
)
def test_scheme_and_initialization_of_an_arm_give_the_settings_of_each_framework(given, olmo, megatron):
    assert OLMO.arm(given) == (olmo and {"model.layer_norm_type": olmo[0], "model.init_fn": olmo[1]})
    assert MEGATRON.arm(given) == megatron


def test_every_scheme_is_a_shipped_arm_with_plain_initialization():
    assert list(ARMS)[:3] == ["preln", "preln_scaled_init", "lns"]
    assert not {"preln_full_megatron", "preln_mitchell", "lns_scaled_init", "lns_head"} & {
        name for name, arm in ARMS.items() if arm.isolates
    }
    # Every scheme of the table is an arm under its own name, with plain initialization.
    assert {name for name, found in ARMS.items() if name == found.scheme.name and found.initialization == "plain"} == {
        *schemes.names()
    }
    assert len({(arm.line, arm.marker) for arm in ARMS.values()}) == len({a.colour for a in ARMS.values()}) == len(ARMS)
    shown = {ARMS[name].scheme.name for name in Study.load(REPOSITORY / "configs" / "study" / "tiny-schemes.yaml").arms}
    assert shown == {*schemes.names()}


def test_settings_that_contradict_the_arm_are_named():
    folder = {"model.layer_norm_type": "lns_rms:exponent=0.25", "model.init_fn": "mitchell"}
    assert OLMO.scheme(folder) == QUARTER
    assert "layer_norm_type='lns_rms:exponent=0.25', but arm 'lns'" in arm_problems("lns", folder, OLMO)[0]
    assert "scaled initialization 'mitchell'" in init_problems(folder, OLMO)[0]
    both = settings_of(ARMS["lns_scaled_init"], OLMO)  # the only arm that may have scaled initialization under LNS
    assert init_problems(both, OLMO, "lns") and init_problems(both, OLMO, "lns_scaled_init") == []
    printed = {"layernorm_scaling": True, "layernorm_scaling_exponent": "0.25", "no_scaled_init": False}
    assert MEGATRON.scheme(printed) == QUARTER
    (problem,) = arm_problems("lns", printed, MEGATRON)
    assert problem == "layernorm_scaling_exponent=0.25, but arm 'lns' is layernorm_scaling_exponent=0.5"
    assert arm_problems("lns", printed | {"layernorm_scaling_exponent": "0.5"}, MEGATRON) == []
    assert MEGATRON.scheme({}) == PRE_LN
    assert arm_problems("preln_mitchell", {}, MEGATRON) == ["arm 'preln_mitchell' exists for OLMo only"]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"name": "lns"}, "'lns': taken"),
        ({"name": "a-b"}, "'a-b': taken, or not lower-case letters"),
        ({"initialization": "big"}, "initialization 'big', expected one of"),
        ({"scheme": LNS, "initialization": "upstream", "init_fn": "mitchell"}, "'mitchell' is for Pre-LN"),
    ],
)
def test_an_invalid_arm_is_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        arms.define(replace(arm(PRE_LN, "plain"), **wrong))


@pytest.fixture
def added():
    """Define a scheme and an arm, and remove both afterwards."""
    toy = Definition("toy", "Halved norms", "Pre-LN / 2", lambda *_: Plan(norm_scale=0.5), "no paper")
    schemes.define(toy)
    yield arms.define(Arm("toy_arm", "Halved", "#123456", "--", "*", Scheme.of("toy"), "scaled", "halved norms"))
    del ARMS["toy_arm"], registry._table["toy"]


def test_an_added_arm_is_planned_reported_and_built(added, built, capsys):
    built.description["arms"] = ["preln", "lns", added.name]
    built.save()
    assert cli.main(["plan", str(built.path)]) == 0
    assert "All 9 runs (Pre-LN, Pre-LN + LNS, Halved)" in " ".join(capsys.readouterr().out.split())

    pytest.importorskip("matplotlib", reason="needs matplotlib")
    for run in built.study.runs:
        built.finish(run.name, 2.0 + run.seed / 10)
    assert cli.main(["collect", str(built.path), "--out", str(built.out)]) == 0
    assert cli.main(["report", str(built.path), "--out", str(built.out)]) == 0
    page = (built.out / "report" / "report.md").read_text()
    assert "| Halved | 2.1750 ± 0.0707 (2 seeds); +0.0000 ± 0.0000 (2 seeds) |" in page

    from olmo.model import OLMo

    run = next(run for run in built.study.runs if run.arm == added.name)
    assert sites.read_back(OLMo(run.loaded.model)) == Scheme.of("toy")


@pytest.mark.parametrize(("name", "factor"), [("preln_head", 1.0), ("lns_head", 3**-0.5)])
def test_under_a_scheme_full_megatron_changes_only_the_initialization_of_the_head(name, factor):
    """OLMo draws the head with std 1/sqrt(d) and every other matrix, residual outputs included, with init_std."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("olmo", reason="needs ai2-olmo")
    from olmo.model import OLMo

    torch.manual_seed(0)
    base = REPOSITORY / "configs" / "study" / "evidence-cpu-base.yaml"
    model = OLMo(load(base, settings_of(ARMS[name], OLMO)).model)
    block = model.transformer.blocks[2]
    cut = 0.9866  # std of a standard normal that is cut at 3 std
    assert model.transformer.ff_out.weight.std().item() == pytest.approx(128**-0.5 * cut, rel=0.02)
    for weight in (block.attn_out.weight, block.ff_out.weight, block.att_proj.weight):
        assert weight.std().item() == pytest.approx(0.0566 * cut, rel=0.02)
    assert block.attn_norm.lns_scale == pytest.approx(factor)
