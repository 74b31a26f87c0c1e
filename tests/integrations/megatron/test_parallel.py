"""On two ranks the factor follows the global layer number, and training equals the hooked reference."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).parents[2]
BLOCKS = 4

pytestmark = pytest.mark.slow

#: Key of a run -> what each rank found.
Found = dict[tuple[str, str], list[dict[str, Any]]]
RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
DISTRIBUTED = {"use_distributed_optimizer": True}
MEGATRON_FSDP = DISTRIBUTED | {
    "use_megatron_fsdp": True,
    "data_parallel_sharding_strategy": "optim_grads_params",
    "gradient_reduce_div_fusion": False,
}
#: Name -> the options of support.megatron_ranks.
LAYOUTS = {
    "TP2": {"tp": 2},
    "TP2, sequence parallel": {"tp": 2, "config": {"sequence_parallel": True}},
    "Megatron-FSDP": {"fsdp": True, "ddp": MEGATRON_FSDP},
    "PP2": {"pp": 2},
    # Without these settings Megatron trains wrongly on gloo, with or without LNS.
    "PP2 x VPP2": {"pp": 2, "vpp": 2, "config": {"overlap_p2p_comm": True, "batch_p2p_comm": False}},
    "PP2, full recompute": {"pp": 2, "config": RECOMPUTE},
    "DP2, distributed optimizer, bf16": {"ddp": DISTRIBUTED, "bf16": True},
}
#: The layouts of an exhaustive run only.
LATER = ("PP2", "PP2, full recompute", "DP2, distributed optimizer, bf16")


def launch(ranks, runs):
    """Do all runs in one launch, since a launch costs more than their steps."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}",
         "-m", "support.megatron_ranks", json.dumps(list(runs.values()))],
        cwd=TESTS, env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1"},
        capture_output=True, text=True, timeout=1200,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [line.removeprefix("RANK ") for line in done.stdout.splitlines() if line.startswith("RANK ")]
    assert len(lines) == ranks
    return dict(zip(runs, map(list, zip(*map(json.loads, lines), strict=True)), strict=True))


def compared(name):
    return {(name, mode): LAYOUTS[name] | {"mode": mode} for mode in ("plugin", "hooks", "off")}


def losses(ranks):
    """The losses of the last pipeline stage."""
    return next(rank["losses"] for rank in ranks if rank["losses"][0] is not None)


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    pytest.importorskip("einops", reason="Megatron-FSDP needs it: pip install 'olmo-lns[test]'")
    folder = str(tmp_path_factory.mktemp("saved"))
    alone = {("saved", "plugin"): {"save": folder}, ("loaded", "off"): {"mode": "off", "load": folder}}
    two = {key: run for name in LAYOUTS if name not in LATER for key, run in compared(name).items()}
    two |= {(f"loaded, {name}", "plugin"): {"load": folder, **LAYOUTS[name]} for name in ("TP2", "PP2")}
    return launch(1, alone) | launch(2, two)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.exhaustive] * (name in LATER)) for name in LAYOUTS]
)
def test_training_follows_the_hooked_reference(name, request):
    found = launch(2, compared(name)) if name in LATER else request.getfixturevalue("found")
    plugin, expected = found[name, "plugin"], losses(found[name, "hooks"])
    assert losses(plugin) == pytest.approx(expected, rel=1e-2 if "bf16" in name else 1e-5)
    assert losses(plugin) != pytest.approx(losses(found[name, "off"]), rel=1e-5)
    once = [site for rank in plugin for site in rank["sites"]]
    if "pp" not in LAYOUTS[name]:  # every rank holds every block
        once = plugin[0]["sites"]
        assert plugin[1]["sites"] == once
    assert sorted(map(tuple, once)) == sorted((block, block**-0.5) for block in range(1, BLOCKS + 1) for _ in "ab")


def test_a_checkpoint_gives_the_same_loss_under_another_layout(found):
    expected = losses(found["saved", "plugin"])[-1]
    for name in ("TP2", "PP2"):
        assert losses(found[f"loaded, {name}", "plugin"])[-1] == pytest.approx(expected, rel=1e-5)
    assert losses(found["loaded", "off"])[-1] != pytest.approx(expected, rel=1e-4)
