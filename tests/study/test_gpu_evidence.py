"""scripts/gpu/evidence.py on a CPU with a tiny shape: packed, run where there is torch and numpy alone, and in slices."""

import csv
import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from support.studies import REPOSITORY

SCRIPT = REPOSITORY / "scripts" / "gpu" / "evidence.py"
SMALL = (
    "model.d_model: 32, model.n_layers: 3, model.n_heads: 2, model.mlp_hidden_size: 128, model.max_sequence_length: 32, "
    "model.init_std: 0.1131, global_train_batch_size: 4, device_train_microbatch_size: 4, scheduler.t_warmup: 2"
)


def describe(folder):
    """The shipped base at a tiny shape, at two rates."""
    sizes = [f"  3x{rate}: {{{SMALL}, optimizer.learning_rate: {rate}, max_duration: 30}}" for rate in (0.001, 0.01)]
    path = folder / "study.yaml"
    path.write_text(
        f"name: dry\nconfig: {REPOSITORY}/configs/study/evidence-gpu-base.yaml\ndata: packages\n"
        "arms: [preln, lns]\nseeds: [1]\nsizes:\n" + "\n".join(sizes) + "\n"
    )
    return path


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    pytest.importorskip("olmo", reason="needs ai2-olmo")
    folder = tmp_path_factory.mktemp("gpu")
    command = [sys.executable, SCRIPT, "pack", folder, "--study", describe(folder), "--tokens", "200000"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert (folder / "evidence.tar.xz").stat().st_size < 4_000_000 and "4 runs" in done.stdout
    return folder


def bare(folder, out):
    """In a Python that sees torch, numpy and what they need, by a folder of links, and nothing of this project."""
    import numpy

    site = folder / "site"
    site.mkdir()
    needed = {
        "torch", "numpy", "functorch", "torchgen", "sympy", "mpmath", "networkx", "jinja2", "markupsafe", "filelock",
        "fsspec", "typing_extensions",
    }  # fmt: skip
    for package in Path(numpy.__file__).parents[1].iterdir():
        if package.name.split("-")[0].split(".")[0] in needed:
            (site / package.name).symlink_to(package)
    code = f"import sys; sys.path.insert(0, {str(site)!r}); sys.argv = sys.argv[1:]; import runpy; "
    code += "runpy.run_path(sys.argv[0], run_name='__main__')"
    command = [sys.executable, "-S", "-c", code, SCRIPT, "run", folder, out, "--minutes", "20", "--device", "cpu"]
    environment = {"PATH": os.environ["PATH"], "HOME": str(folder), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, env=environment, cwd=folder)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_dry_run_without_olmo_installed_gives_a_report(packed, tmp_path):
    out = tmp_path / "out"
    code, text = bare(packed, out)
    assert code == 0 and "all done" in text, text
    results = {path.parent.name: json.loads(path.read_text()) for path in out.glob("*/result.json")}
    assert len(results) == 4
    assert results["3x0.001-preln-s1"]["heldout"] != results["3x0.001-lns-s1"]["heldout"]
    with (out / "3x0.01-lns-s1" / "curve.csv").open() as file:
        assert [row["step"] for row in csv.DictReader(file)] == ["10", "20", "30"]
    with (out / "runs.csv").open() as file:
        assert [row["heldout"] for row in csv.DictReader(file)] == [str(each["heldout"]) for each in ordered(out)]


def ordered(out):
    """The results as the table has them."""
    runs = [row["run"] for row in csv.DictReader((out / "runs.csv").open())]
    return [json.loads((out / run / "result.json").read_text()) for run in runs]


def test_a_slice_goes_on_where_the_last_one_stopped(tmp_path, monkeypatch):
    """A signal after the fourth step of 30, and a second slice: the loss of a run in one piece."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("olmo", reason="needs ai2-olmo")
    from olmo_lns.study.plan.spec import Study

    spec = importlib.util.spec_from_file_location("gpu_evidence", SCRIPT)
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, script)
    spec.loader.exec_module(script)
    study = Study.load(describe(tmp_path))
    planned = next(run for run in study.runs if run.name == "3x0.01-lns-s1")
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


def test_the_shipped_description():
    """154M parameters; the tokens of a run are among the packed hundred million."""
    pytest.importorskip("olmo", reason="needs ai2-olmo")
    from olmo_lns.study.plan.spec import Study

    study = Study.load(REPOSITORY / "configs" / "study" / "evidence-gpu.yaml")
    assert {run.shape.tokens for run in study.runs} == {39_321_600} and len(study.runs) == 6
    assert all(150e6 < run.shape.parameters < 158e6 for run in study.runs)
