"""Stock training programs in processes of their own: killed and resumed, two processes, sharded parameters."""

from __future__ import annotations

import json
import runpy
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support import launch
from support.transformers_models import environment, inputs, stock

from olmo_lns.integrations.transformers import apply, register

register()
pytest.importorskip("accelerate", reason="Trainer needs accelerate: pip install 'olmo-lns[hf]'")

PROGRAMS = Path(__file__).parent / "programs"
OPTIONS = {"use_cpu": True, "per_device_train_batch_size": 4}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    apply(stock("llama", large=False), "lns:exponent=0.7").save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def unbroken(model, tmp_path_factory) -> Path:
    """What one process gives that nobody disturbs."""
    train(model, folder := tmp_path_factory.mktemp("unbroken"))
    return folder


def ran(done: launch.Result, code: int = 0) -> None:
    assert done.code == code, done.text[-4000:]
    assert "LayerNorm Scaling on: 6 norms (LlamaRMSNorm)" in done.text


def found(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "found.json").read_text())


def train(model: Path, output: Path, *launcher: str, code: int = 0, **options: Any) -> dict[str, Any]:
    command = [*(launcher or [sys.executable]), str(PROGRAMS / "train.py"), str(model), str(output)]
    ran(launch.run([*command, json.dumps({**OPTIONS, **options})], cwd=model, env=environment()), code)
    return {} if code else found(output)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_killed_and_resumed_is_as_never_stopped(model, unbroken, tmp_path):
    """Trainer's own shuffling, warm-up and cosine; killed after step 5, two steps past its checkpoint."""
    whole = found(unbroken)
    assert whole["class"] == "LNSLlamaForCausalLM" and len(whole["losses"]) == 8
    train(model, tmp_path / "cut", code=-signal.SIGKILL, die_at=5)
    assert [path.name for path in (tmp_path / "cut").glob("checkpoint-*")] == ["checkpoint-3"]
    resumed = train(model, tmp_path / "cut", resume=True)
    assert resumed == whole
    last = [(folder / "checkpoint-8" / "model.safetensors").read_bytes() for folder in (unbroken, tmp_path / "cut")]
    assert last[0] == last[1]


@pytest.mark.exhaustive
@pytest.mark.slow
def test_accelerate_with_two_processes_is_as_one(model, unbroken, tmp_path):
    accelerate = str(Path(sys.executable).with_name("accelerate"))
    quiet = ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"]
    launcher = [accelerate, "launch", "--multi_gpu", "--num_processes", "2", *quiet, "--main_process_port", "0"]
    one = found(unbroken)
    two = train(model, tmp_path / "two", *launcher, per_device_train_batch_size=2, ddp_backend="gloo")
    assert (one["world"], two["world"]) == (1, 2) and two["distributed"].endswith("MULTI_CPU")
    assert two["losses"] == pytest.approx(one["losses"], rel=1e-5)
    assert two["norms"] == pytest.approx(one["norms"], rel=1e-4)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_fully_shard_is_as_one_process(model, tmp_path, monkeypatch):
    import transformers

    program = [str(PROGRAMS / "shard.py"), str(model)]
    monkeypatch.setattr(sys, "argv", [*program, str(tmp_path / "one")])
    runpy.run_path(program[0])
    ran(launch.torchrun(sys.executable, 2, *program, tmp_path / "two", cwd=tmp_path, env=environment()))
    one, two = found(tmp_path / "one"), found(tmp_path / "two")
    assert (one["world"], two["world"]) == (1, 2)
    assert two["losses"] == pytest.approx(one["losses"], rel=1e-5)
    models = [transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("one", "two")]
    assert all(type(loaded).__name__ == "LNSLlamaForCausalLM" for loaded in models)
    with torch.no_grad():
        expected, logits = (loaded.eval()(**inputs("llama")).logits for loaded in models)
    assert (logits - expected).abs().max() <= 1e-3 * expected.abs().max()
