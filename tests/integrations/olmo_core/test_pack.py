"""configs/olmo_core: every size and arm loads and builds, and two arms differ in the block only."""

import runpy
from pathlib import Path

import pytest

pytest.importorskip("olmo_core.nn", reason="needs ai2-olmo-core 2.5 to 3.0 (make test-olmo-core)")


from olmo_lns.errors import LNSConfigError
from olmo_lns.integrations.olmo_core.model import scheme_of_model
from olmo_lns.schemes import Scheme
from olmo_lns.study.describe import Study
from olmo_lns.study.engines import OLMO_CORE, olmo_core
from olmo_lns.study.planning import arm_problems, find_problems

PACK = Path(__file__).resolve().parents[3] / "configs" / "olmo_core"
#: The numbers of configs/olmo, which tests/configs checks.
PARAMETERS = {"60M": 85_074_432, "150M": 190_532_352, "300M": 371_491_840, "1B": 1_279_854_592, "7B": 6_888_361_984}
ARMS = ("preln", "lns")


def _run(path):
    return Study.from_config(path, OLMO_CORE).runs[0]


@pytest.mark.parametrize("size", PARAMETERS)
@pytest.mark.parametrize("arm", ARMS)
def test_every_config_passes_its_check_and_has_its_number_of_parameters(size, arm):
    run = _run(PACK / f"{size}-{arm}.yaml")
    assert run.arm == arm and find_problems(run, 8) == []
    assert OLMO_CORE.count(run.config, run.loaded) == run.workload.parameters == PARAMETERS[size]


def _model(path, overrides=None):
    from olmo_core.config import Config

    return Config.from_dict(olmo_core.read(path, overrides, placeholder=True)["model"])


def test_arms_differ_in_the_block_only():
    stock, scaled = (_model(PACK / f"60M-{arm}.yaml") for arm in ARMS)
    assert scheme_of_model(scaled.build(init_device="meta")) == Scheme.of("lns")
    assert scaled.block.stock() == stock.block
    scaled.block = stock.block
    assert scaled == stock


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("d_model: 512", "d_modle: 512", "The config has no key 'model.d_model'"),
        ("init_method: normal", "init_method: llama_depth", "model.init_method is 'llama_depth', but arm 'lns'"),
        ("exponent: 0.5", "exponent: 0.25", "but arm 'lns' needs 'lns'"),
        (
            "rank_microbatch_size: 32768",
            "rank_microbatch_size: 30000",
            "must be a multiple of the sequence length, 4096",
        ),
    ],
)
def test_the_check_finds_a_mistake_in_a_config(old, new, message, tmp_path):
    text = (PACK / "60M-lns.yaml").read_text()
    assert old in text
    path = tmp_path / "60M-lns.yaml"
    path.write_text(text.replace(old, new))
    try:
        run = _run(path)
        problems = " ".join(find_problems(run, 8))
    except LNSConfigError as error:
        problems = str(error)
    assert message in problems


def test_the_shapes_of_depthbench_have_the_parameters_of_its_table():
    """Millions, from its README. The sizes with 42 and 70 blocks are in the paper's table only, with about 400."""
    study = Study.load(PACK.parent / "study" / "depthbench.yaml")
    runs = {run.size: run for run in study.runs if run.arm == "preln"}
    table = {"L16": 407, "L20": 414, "L24": 405, "L28": 406, "L32": 399}
    found = {size: olmo_core.count_parameters(run.config, run.loaded) / 1e6 for size, run in runs.items()}
    assert {size: round(found[size]) for size in table} == table
    assert found["L42"] == pytest.approx(400, rel=0.03) and found["L70"] == pytest.approx(400, rel=0.03)
    for run in study.runs:
        rate = 5e-4 if run.size == "1B" else 1e-2 if "1e2" in run.size else 2e-3
        assert run.workload.learning_rate == rate and arm_problems(run.arm, run.settings, OLMO_CORE) == []
    assert sum(run.arm == "preln_scaled_init" for run in study.runs) == 15


def test_scaled_initialization_changes_the_residual_outputs_only():
    scale = runpy.run_path(str(PACK / "train.py"))["scale_residual_outputs"]
    overrides = {"model.d_model": 64, "model.n_layers": 3, "model.block.sequence_mixer.n_heads": 2}
    models = [_model(PACK / "60M-preln.yaml", overrides).build(init_device="cpu") for _ in range(2)]
    for model in models:
        model.init_weights()
    scale(models[1])
    for (name, plain), scaled in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        factor = 6**-0.5 if name.endswith(("attention.w_out.weight", "feed_forward.w2.weight")) else 1.0
        assert scaled.equal(plain * factor), name
