"""A model with a scheme under torch's ``fully_shard``, in two processes."""

import json
import runpy
import sys
from pathlib import Path

import pytest
import torch
from support import launch
from support.transformers_models import environment, inputs, stock

from olmo_lns.integrations.transformers import apply, register

register()
PROGRAM = Path(__file__).parent / "programs" / "shard.py"


@pytest.mark.exhaustive
@pytest.mark.slow
def test_two_processes_under_fully_shard_train_as_one_does(tmp_path, monkeypatch):
    import transformers

    apply(stock("llama", large=False), "lns:exponent=0.7").save_pretrained(tmp_path / "model")
    program = [str(PROGRAM), str(tmp_path / "model")]
    monkeypatch.setattr(sys, "argv", [*program, str(tmp_path / "one")])
    runpy.run_path(program[0])
    done = launch.torchrun(sys.executable, 2, *program, tmp_path / "two", cwd=tmp_path, env=environment()).ok()
    assert "LayerNorm Scaling on: 6 norms (LlamaRMSNorm)" in done.text
    one, two = (json.loads((tmp_path / name / "found.json").read_text()) for name in ("one", "two"))
    assert (one["world"], two["world"]) == (1, 2)
    assert two["losses"] == pytest.approx(one["losses"], rel=1e-5)
    models = [transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("one", "two")]
    assert all(type(loaded).__name__ == "LNSLlamaForCausalLM" for loaded in models)
    with torch.no_grad():
        expected, logits = (loaded.eval()(**inputs("llama")).logits for loaded in models)
    assert (logits - expected).abs().max() <= 1e-3 * expected.abs().max()
