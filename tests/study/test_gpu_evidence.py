"""scripts/gpu/evidence.py on a CPU with a tiny shape: a run that is trained in slices."""

import importlib.util
import sys
import time

import numpy as np
import pytest
from support.studies import REPOSITORY

SCRIPT = REPOSITORY / "scripts" / "gpu" / "evidence.py"
SMALL = (
    "model.d_model: 32, model.n_layers: 3, model.n_heads: 2, model.mlp_hidden_size: 128, model.max_sequence_length: 32, "
    "model.init_std: 0.1131, global_train_batch_size: 4, device_train_microbatch_size: 4, scheduler.t_warmup: 2"
)


def test_a_run_in_slices_reaches_the_loss_of_a_run_in_one_piece(tmp_path, monkeypatch):
    """A signal ends the first slice after four of 30 steps, and a second slice finishes the run."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("olmo", reason="needs ai2-olmo")
    from olmo_lns.study.plan.spec import Study

    spec = importlib.util.spec_from_file_location("gpu_evidence", SCRIPT)
    script = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, script)
    spec.loader.exec_module(script)
    (tmp_path / "study.yaml").write_text(
        f"name: dry\nconfig: {REPOSITORY}/configs/study/evidence-gpu-base.yaml\ndata: packages\n"
        f"arms: [lns]\nseeds: [1]\nsizes: {{s: {{{SMALL}, optimizer.learning_rate: 0.01, max_duration: 30}}}}\n"
    )
    (planned,) = Study.load(tmp_path / "study.yaml").runs
    entry = {"run": planned.name, "size": planned.size, "arm": "lns", "seed": 1, "settings": planned.settings}
    tokens = np.frombuffer(b"the cat sat on the mat. " * 200, dtype=np.uint8).astype(np.int64)
    runs = [script.Run(entry, tmp_path / name, tmp_path) for name in ("whole", "parts")]
    forever = time.monotonic() + 1e6
    assert runs[0].train(tokens, tokens, torch.device("cpu"), forever)
    real = script.Run.batch

    def stops(self, data, step):
        if step == 3:
            script.STOPPED.append(15)
        return real(self, data, step)

    with monkeypatch.context() as patched:
        patched.setattr(script.Run, "batch", stops)
        assert not runs[1].train(tokens, tokens, torch.device("cpu"), forever)
    assert (runs[1].folder / "state.pt").is_file() and runs[1].result is None
    script.STOPPED.clear()
    assert runs[1].train(tokens, tokens, torch.device("cpu"), forever)
    assert runs[1].result["heldout"] == runs[0].result["heldout"] != pytest.approx(5.55, abs=0.05)
    rates = [runs[0].lr(step) for step in (1, 2, 4, 30)]
    from olmo.optim import build_scheduler

    scheduler = build_scheduler(planned.loaded)
    assert rates == pytest.approx([scheduler.get_lr(0.01, step, 30) for step in (1, 2, 4, 30)])
