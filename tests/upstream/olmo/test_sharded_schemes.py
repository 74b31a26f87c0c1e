"""OLMo's sharded checkpointers and the parameters that schemes add: gates, second norms, omegas."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import pytest
from support import launch

pytest.importorskip("olmo", reason="needs pip install 'olmo-lns[olmo]'")

pytestmark = pytest.mark.slow

#: Of each kind of key one, and a scheme of stock keys.
KINDS = {"layerscale_rms": "gate", "skipinit_rms": "gate", "sandwich_rms": "norm_out", "admin_rms": "omega"}
CHECKPOINTERS = ("torch_new", "torch_legacy", "local", "olmo_core")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("sharded")
    paths = [os.environ.get(launch.OLMO_SRC, ""), str(launch.REPOSITORY / "tests"), str(launch.REPOSITORY)]
    # torch_legacy pickles the tensors' shards, which torch.load refuses by default since 2.6, stock's as ours.
    env = launch.environment(PYTHONPATH=":".join(filter(None, paths)), TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD="1")
    kinds = ",".join(("rms", *KINDS, "postln_rms"))
    command = [launch.PROGRAMS / "sharded.py", kinds, ",".join(CHECKPOINTERS), folder]
    launch.torchrun(sys.executable, 2, *command, cwd=folder, env=env).ok()
    found: dict[str, Any] = json.loads((folder / "results.json").read_text())
    return found


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", [*KINDS, "postln_rms"])
@pytest.mark.parametrize("checkpointer", CHECKPOINTERS)
def test_a_model_is_loaded_into_another_and_goes_on_alike(results: Any, checkpointer: str, kind: str) -> None:
    stock, ours = results[checkpointer]["rms"], results[checkpointer][kind]
    assert ours.get("written", 0.0) == 0.0 and ("written" in ours or checkpointer == "local"), ours
    if "error" in stock:
        assert ours["error"].partition(":")[0] == stock["error"].partition(":")[0], (stock, ours)
        pytest.skip(f"this OLMo's {checkpointer} fails with its own models too: {stock['error'][:200]}")
    assert "error" not in ours, ours
    assert ours["step"] == 1 and ours["apart"] > 1e-3, "two models that are equal already show nothing"
    assert ours["loaded"] == 0.0 and ours["next"] == 0.0
    new = [f"{part}_{KINDS[kind]}." for part in ("attn", "ff")] if kind in KINDS else []
    assert len(ours["own"]) == 2 * 4 * bool(new), ours["own"]
    assert all(any(word in name for word in new) for name in ours["own"])
