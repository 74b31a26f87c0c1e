"""Megatron Bridge from PyPI: its providers, its checkpoints, its loader of Megatron-LM's, its exports."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from support import te_python

from olmo_lns.errors import UpstreamChangedError
from olmo_lns.integrations import patching
from olmo_lns.integrations.megatron import registration, upstream

TESTS = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """All cases, from one process in which TE's Python, which the Bridge imports, runs over its stand-in."""
    for name in ("megatron.bridge", "modelopt"):
        if importlib.util.find_spec(name) is None:
            pytest.skip(
                f"{name} is not installed: pip install --no-deps megatron-bridge==0.3.1 nvidia-modelopt pulp triton "
                "'transformers<5' 'tokenizers<0.23' 'huggingface_hub<1'"
            )
    try:
        te_python.tree()
    except te_python.Unavailable as reason:
        pytest.skip(str(reason))
    variables = {"PYTHONOPTIMIZE": "1", "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "support.bridge_worker", str(tmp_path_factory.mktemp("bridge"))],
        cwd=TESTS, env=os.environ | variables, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULTS ")]
    assert lines, f"the worker ended with {done.returncode}: {done.stderr[-2000:]}"
    return json.loads(lines[-1].removeprefix("RESULTS "))


@pytest.mark.slow
def test_a_provider_by_apply_and_by_layer_spec_is_the_hooked_model(results: dict[str, Any]) -> None:
    found = results["routes"]
    assert found["apply"] == found["layer_spec"] == pytest.approx(found["reference"], rel=1e-6), found
    assert found["stock"] != pytest.approx(found["reference"], rel=1e-4)


@pytest.mark.slow
def test_run_config_gives_the_scheme_back_and_the_weights_are_compared(results: dict[str, Any]) -> None:
    found = results["round_trip"]
    assert found["loaded"] == found["saved"], found
    assert "was saved with sandwich_depth:exponent=0.25" in found["refused"]


@pytest.mark.slow
def test_a_checkpoint_of_megatron_lm_keeps_its_scheme(results: dict[str, Any]) -> None:
    found = results["of_megatron_lm"]
    assert found["loaded"] == found["saved"], found


@pytest.mark.slow
def test_weights_for_and_from_stock_classes_are_refused(results: dict[str, Any]) -> None:
    found = results["hugging_face"]
    assert found["export, stock"] == found["import, stock"] == "", found
    assert "for a class without lns" in found["export, lns"]
    assert "saved with Pre-LN" in found["import, lns"]


def test_a_bridge_without_a_function_is_an_error_where_a_scheme_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patching, "_aside", {})
    name = "megatron.bridge.training.mlm_compat.arguments"
    for part in ("megatron.bridge", "megatron.bridge.training", "megatron.bridge.training.mlm_compat", name):
        monkeypatch.setitem(sys.modules, part, ModuleType(part))
    registration._extend(sys.modules[name])
    with pytest.raises(
        UpstreamChangedError, match=r"this Megatron Bridge was left untouched.*_transformer_config_from"
    ):
        patching.require_verified(upstream.BRIDGE)
