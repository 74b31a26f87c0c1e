"""Two ranks: the factor goes by the global number, and training is that of the hooked reference."""

from __future__ import annotations

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


def launch(ranks: int, **options: Any) -> dict[str, list[dict[str, Any]]]:
    """For each mode of ``lns`` what each rank found."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}",
         "-m", "support.megatron_ranks", json.dumps(options)],
        cwd=TESTS,
        env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [line.removeprefix("RANK ") for line in done.stdout.splitlines() if line.startswith("RANK ")]
    found = [json.loads(line) for line in lines]
    assert len(found) == ranks
    return {mode: [rank[mode] for rank in found] for mode in found[0]}


def losses(ranks: list[dict[str, Any]]) -> list[float]:
    """Those of the last pipeline stage."""
    return next(rank["losses"] for rank in ranks if rank["losses"][0] is not None)


LAYOUTS = {
    "TP2": {"tp": 2},
    "TP2, sequence parallel": {"tp": 2, "sp": True},
    "FSDP2": {"fsdp2": True},
    "Megatron-FSDP": {"mfsdp": True},
    "PP2": {"pp": 2},
    "PP2 x VPP2": {"pp": 2, "vpp": 2},
    "PP2, full recompute": {"pp": 2, "recompute": True},
    "DP2, distributed optimizer, bf16": {"distopt": True, "bf16": True},
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_training_follows_the_hooked_reference(name: str) -> None:
    if "mfsdp" in LAYOUTS[name]:
        pytest.importorskip("einops", reason="Megatron-FSDP needs it: pip install 'olmo-lns[test]'")
    results = launch(2, lns="plugin,hooks,off", **LAYOUTS[name])
    found, expected = results["plugin"], losses(results["hooks"])
    tolerance = 1e-2 if "bf16" in name else 1e-5
    assert losses(found) == pytest.approx(expected, rel=tolerance)
    assert losses(found) != pytest.approx(losses(results["off"]), rel=1e-5)
    once = [site for rank in found for site in rank["sites"]]
    if "pp" not in LAYOUTS[name]:  # every rank holds every block
        once = found[0]["sites"]
        assert found[1]["sites"] == once
    assert sorted(map(tuple, once)) == sorted((block, block**-0.5) for block in range(1, BLOCKS + 1) for _ in "ab")


#: Of each kind of residual addition one: a constant, a norm with a constant, a learned vector, a learned number.
SCHEMES = ("lnsafterbranch", "sandwich_depth", "layerscale:start=0.5", "skipinit")


@pytest.fixture(scope="module")
def in_one_process(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, list[float]]]:
    """A folder with the weights at the start, and the losses from there of three steps and the model after them."""
    folder = tmp_path_factory.mktemp("start")
    for scheme in SCHEMES:
        (folder / scheme.split(":")[0]).mkdir()
    launch(1, schemes=SCHEMES, steps=0, save=str(folder))
    found = launch(1, schemes=SCHEMES, steps=3, load=str(folder))
    return folder, {scheme: losses(found[scheme]) for scheme in SCHEMES}


@pytest.mark.parametrize("name", [name for name, layout in LAYOUTS.items() if {"tp", "pp"} & set(layout)])
def test_schemes_train_alike_under_every_layout(name: str, in_one_process: Any) -> None:
    """From one checkpoint, resharded: learned factors and norms are sharded, reduced and updated as in one process."""
    folder, expected = in_one_process
    found = launch(2, schemes=SCHEMES, **LAYOUTS[name], load=str(folder), steps=3)
    for scheme in SCHEMES:
        assert losses(found[scheme]) == pytest.approx(expected[scheme], rel=2e-5), scheme
        assert len(set(expected[scheme])) == 4
        numbers = {site[0] for rank in found[scheme] for site in rank["sites"]}
        assert numbers == set(range(1, BLOCKS + 1)), scheme


def test_schemes_under_the_distributed_optimizer_and_fsdp() -> None:
    """Where each rank has batches of its own."""
    pytest.importorskip("einops", reason="Megatron-FSDP needs it: pip install 'olmo-lns[test]'")
    expected = launch(2, schemes=SCHEMES)
    for layout in ({"distopt": True}, {"fsdp2": True}, {"mfsdp": True}):
        found = launch(2, schemes=SCHEMES, **layout)
        for scheme in SCHEMES:
            assert losses(found[scheme]) == pytest.approx(losses(expected[scheme]), rel=1e-5), (layout, scheme)


def test_a_checkpoint_gives_the_same_loss_under_another_layout(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    expected = losses(launch(1, lns="plugin", save=str(folder))["plugin"])[-1]
    for layout in ({"tp": 2}, {"pp": 2}):
        found = losses(launch(2, lns="plugin", load=str(folder), **layout)["plugin"])[-1]
        assert found == pytest.approx(expected, rel=1e-5)
    without = losses(launch(1, lns="off", load=str(folder))["off"])[-1]
    assert without != pytest.approx(expected, rel=1e-4)
