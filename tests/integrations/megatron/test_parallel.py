"""On two ranks the factor follows the global layer number, and training equals the hooked reference."""

import json
from pathlib import Path

import pytest

# The ranks are forks of a process that has imported this file, and with it what they need of Megatron.
pytest.importorskip("megatron.core.optimizer", reason="megatron-core is not installed")

from support import forked, megatron_ranks

pytestmark = pytest.mark.slow

RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
#: Name -> the options of megatron_ranks.run.
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


def train(rank, folder):
    """Run every layout in every mode, one after the other, in this rank of two; write what it found."""
    runs = [LAYOUTS[name] | {"mode": mode} for name in LAYOUTS for mode in MODES]
    found = megatron_ranks.run_all(rank, runs, folder)
    (Path(folder) / f"{rank}.json").write_text(json.dumps(found))


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """(layout, mode) -> what each rank found. One launch, since a launch costs more than its steps."""
    folder = tmp_path_factory.mktemp("ranks")
    forked.run_ranks(__file__, "train", str(folder))
    ranks = (json.loads((folder / f"{rank}.json").read_text()) for rank in range(2))
    names = [(name, mode) for name in LAYOUTS for mode in MODES]
    return dict(zip(names, zip(*ranks, strict=True), strict=True))


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
