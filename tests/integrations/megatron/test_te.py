"""The TE spec: Transformer Engine's own Python over a strict stand-in for its C++ module.

Wiring and gradients, not kernel numerics (those are in test_gpu.py).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support import te_python

pytestmark = pytest.mark.slow  # one process for all cases
TESTS = Path(__file__).parents[2]
FUSED = "folded into the fused kernel's gain"


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    """All cases, from one process in which TE was there before Megatron."""
    try:
        te_python.tree()
    except te_python.Unavailable as reason:
        pytest.skip(str(reason))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "support.te_worker"],
        cwd=TESTS,
        env=os.environ | {"PYTHONOPTIMIZE": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULTS ")]
    assert lines, f"the worker ended with {done.returncode}: {done.stderr[-2000:]}"
    return json.loads(lines[-1].removeprefix("RESULTS "))


def case(results: dict[str, Any], name: str) -> Any:
    found = results[name]
    assert not (isinstance(found, dict) and "failed" in found), found["failed"]
    return found


@pytest.mark.parametrize(
    "name",
    [
        *("RMSNorm", "LayerNorm", "zero-centred gain", "MoE", "selective recompute"),
        *("sandwich_depth", "sandwich_depth, LayerNorm", "sandwich_depth, zero-centred gain", "lnsafterbranch"),
        "layerscale, MoE, selective recompute",
    ],
)
def test_loss_and_all_gradients_are_those_of_the_hooked_local_model(results: dict[str, Any], name: str) -> None:
    found = case(results, name)
    assert found["same_parameters"]
    assert found["loss"] == pytest.approx(found["reference"], rel=1e-6)
    assert found["error"] < 2e-5, f"gradient of {found['worst']}"
    assert found["norms"] == ["transformer_engine"] * ("sandwich" in name)


def test_dense_layers_are_scaled_inside_the_fused_linears(results: dict[str, Any]) -> None:
    expected = [["TELayerNormColumnParallelLinear", block, FUSED] for block in (1, 1, 2, 2, 3, 3, 4, 4)]
    assert case(results, "RMSNorm")["sites"] == expected


def test_moe_layers_have_one_fused_and_one_standalone_site(results: dict[str, Any]) -> None:
    sites = case(results, "MoE")["sites"]
    assert [site[1] for site in sites] == [1, 1, 2, 2, 3, 3, 4, 4]
    assert [site[2] for site in sites[:2]] == [FUSED, "olmo_lns.norm (te)"]


def test_checkpoint_keys_are_those_of_stock_and_initialization_is_plain(results: dict[str, Any]) -> None:
    found = case(results, "keys")
    for name in ("state_dict", "sharded"):
        stock, lns = found[name]
        assert stock == lns
    assert found["std"] == pytest.approx([0.02 / 8**0.5, 0.02], rel=0.05)


def test_mtp_layers_go_on_after_the_last_block(results: dict[str, Any]) -> None:
    assert case(results, "MTP") == [1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6]


def test_mla_scales_neither_the_q_nor_the_kv_norm(results: dict[str, Any]) -> None:
    found = case(results, "MLA")
    assert found["sites"] == ["input_layernorm", "mlp.linear_fc1"] * 4
    assert found["others"] == ["linear_kv_up_proj", "linear_q_up_proj"]


def test_a_norm_that_is_read_past_its_forward_is_refused(results: dict[str, Any]) -> None:
    """Megatron's TEFusedMLP computes with the parameters of linear_fc1 and never calls it."""
    words = "TransformerLayer 1 did not call the forward of mlp.linear_fc1 in its own"
    assert words in case(results, "op fuser")
    assert case(results, "op fuser, branch") == "runs"  # a factor behind it is not read past


def test_a_fused_linear_with_a_forward_of_its_own_is_refused(results: dict[str, Any]) -> None:
    assert "Own overrides the forward of Megatron's TELayerNormColumnParallelLinear" in case(results, "subclass")
