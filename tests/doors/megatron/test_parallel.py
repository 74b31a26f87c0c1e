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


Found = dict[str, list[dict[str, Any]]]


def launch(ranks: int, *layouts: dict[str, Any]) -> list[Found]:
    """One launch; of each layout: for each mode of ``lns``, or scheme, what each rank found."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}",
         "-m", "support.megatron_ranks", json.dumps(layouts)],
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
    return [
        {mode: [rank[number][mode] for rank in found] for mode in found[0][number]} for number in range(len(layouts))
    ]


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


#: Of each kind of residual addition one: a constant, a norm with a constant, a learned vector, a learned number.
SCHEMES = ("lnsafterbranch", "sandwich_depth", "layerscale:start=0.5", "skipinit")
#: The global batch is one: from one checkpoint they train as one process does.
MODEL_PARALLEL = [name for name, layout in LAYOUTS.items() if {"tp", "pp"} & set(layout)]
#: Each rank has batches of its own: what they are compared with has two ranks too.
DATA_PARALLEL: list[dict[str, Any]] = [{}, {"distopt": True}, {"fsdp2": True}, {"mfsdp": True}]


@pytest.fixture(scope="module", autouse=True)
def megatron_fsdp_can_run() -> None:
    pytest.importorskip("einops", reason="Megatron-FSDP needs it: pip install 'olmo-lns[test]'")


@pytest.fixture(scope="module")
def trained() -> dict[str, Found]:
    """LayerNorm Scaling under every layout, beside the hooked and the stock model."""
    found = launch(2, *({"lns": "plugin,hooks,off", **layout} for layout in LAYOUTS.values()))
    return dict(zip(LAYOUTS, found, strict=True))


@pytest.mark.parametrize("name", LAYOUTS)
def test_training_follows_the_hooked_reference(name: str, trained: dict[str, Found]) -> None:
    results = trained[name]
    found, expected = results["plugin"], losses(results["hooks"])
    tolerance = 1e-2 if "bf16" in name else 1e-5
    assert losses(found) == pytest.approx(expected, rel=tolerance)
    assert losses(found) != pytest.approx(losses(results["off"]), rel=1e-5)
    once = [site for rank in found for site in rank["sites"]]
    if "pp" not in LAYOUTS[name]:  # every rank holds every block
        once = found[0]["sites"]
        assert found[1]["sites"] == once
    assert sorted(map(tuple, once)) == sorted((block, block**-0.5) for block in range(1, BLOCKS + 1) for _ in "ab")


@pytest.fixture(scope="module")
def resharded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Found, dict[str, Found]]:
    """Three steps from one checkpoint: in one process, and under each layout."""
    folder = tmp_path_factory.mktemp("start")
    for scheme in SCHEMES:
        (folder / scheme.split(":")[0]).mkdir()
    start = {"schemes": SCHEMES, "load": str(folder), "steps": 3}
    _, alone = launch(1, {"schemes": SCHEMES, "save": str(folder), "steps": 0}, start)
    found = launch(2, *(start | LAYOUTS[name] for name in MODEL_PARALLEL))
    return alone, dict(zip(MODEL_PARALLEL, found, strict=True))


@pytest.mark.parametrize("name", MODEL_PARALLEL)
def test_schemes_train_alike_under_every_layout(name: str, resharded: tuple[Found, dict[str, Found]]) -> None:
    """Learned factors and norms are sharded, reduced and updated as in one process."""
    alone, found = resharded
    for scheme in SCHEMES:
        expected = losses(alone[scheme])
        assert losses(found[name][scheme]) == pytest.approx(expected, rel=2e-5), scheme
        assert len(set(expected)) == 4
        numbers = {site[0] for rank in found[name][scheme] for site in rank["sites"]}
        assert numbers == set(range(1, BLOCKS + 1)), scheme


def test_schemes_under_the_distributed_optimizer_and_fsdp() -> None:
    expected, *others = launch(2, *({"schemes": SCHEMES, **layout} for layout in DATA_PARALLEL))
    for layout, found in zip(DATA_PARALLEL[1:], others, strict=True):
        for scheme in SCHEMES:
            assert losses(found[scheme]) == pytest.approx(losses(expected[scheme]), rel=1e-5), (layout, scheme)


def test_a_checkpoint_gives_the_same_loss_under_another_layout(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    load = {"load": str(folder)}
    saved, without = launch(1, {"lns": "plugin", "save": str(folder)}, {"lns": "off"} | load)
    expected = losses(saved["plugin"])[-1]
    for found in launch(2, *({"lns": "plugin", **load, **layout} for layout in ({"tp": 2}, {"pp": 2}))):
        assert losses(found["plugin"])[-1] == pytest.approx(expected, rel=1e-5)
    assert losses(without["off"])[-1] != pytest.approx(expected, rel=1e-4)
