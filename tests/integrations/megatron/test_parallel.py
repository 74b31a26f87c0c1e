"""On two ranks the factor follows the global layer number, and training equals the hooked reference."""

import json

import pytest
from support import launch

pytestmark = pytest.mark.slow

RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
#: Name -> the options of support.megatron_ranks.
LAYOUTS = {
    "TP2": {"tp": 2},
    "TP2, sequence parallel": {"tp": 2, "config": {"sequence_parallel": True}},
    # Without these settings Megatron trains wrongly on gloo, with or without LNS.
    "PP2 x VPP2": {"pp": 2, "vpp": 2, "config": {"overlap_p2p_comm": True, "batch_p2p_comm": False}},
    "PP2, full recompute": {"pp": 2, "config": RECOMPUTE},
    "DP2, distributed optimizer, bf16": {"ddp": {"use_distributed_optimizer": True}, "bf16": True},
}
MODES = ("plugin", "hooks", "off")


def losses(ranks):
    """The losses of the last pipeline stage."""
    return next(rank["losses"] for rank in ranks if rank["losses"][0] is not None)


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """(layout, mode) -> what each rank found. One launch, since a launch costs more than its steps."""
    runs = {(name, mode): LAYOUTS[name] | {"mode": mode} for name in LAYOUTS for mode in MODES}
    env = launch.environment(PYTHONPATH=str(launch.REPOSITORY / "tests"), CUDA_DEVICE_MAX_CONNECTIONS="1")
    words = ["-m", "support.megatron_ranks", json.dumps(list(runs.values()))]
    done = launch.torchrun(2, *words, cwd=tmp_path_factory.mktemp("ranks"), env=env).ok()
    lines = [line.removeprefix("RANK ") for line in done.text.splitlines() if line.startswith("RANK ")]
    return dict(zip(runs, zip(*map(json.loads, lines), strict=True), strict=True))


@pytest.mark.parametrize("name", LAYOUTS)
def test_training_follows_the_hooked_reference(name, found):
    plugin, expected = found[name, "plugin"], losses(found[name, "hooks"])
    assert losses(plugin) == pytest.approx(expected, rel=1e-2 if "bf16" in name else 1e-5)
    assert losses(plugin) != pytest.approx(losses(found[name, "off"]), rel=1e-5)
    once = [site for rank in plugin for site in rank["sites"]]
    if "pp" not in LAYOUTS[name]:  # every rank holds every block
        once = plugin[0]["sites"]
        assert plugin[1]["sites"] == once
    assert sorted(map(tuple, once)) == sorted((block, block**-0.5) for block in range(1, 5) for _ in "ab")
