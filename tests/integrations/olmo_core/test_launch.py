"""OLMo-core's own example script, unmodified, from a checkout: ``OLMO_CORE_SRC=~/OLMo-core``.

The script comes from the checkout; OLMo-core itself is the installed package.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("olmo_core.nn", reason="needs ai2-olmo-core 2.5 to 3.0 (make test-olmo-core)")

import numpy as np

SOURCE = os.environ.get("OLMO_CORE_SRC")
SCRIPT = Path(SOURCE or "") / "src" / "examples" / "llm" / "train.py"
SITE = Path(__file__).resolve().parents[2] / "support" / "olmo_core_site"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not SOURCE, reason="OLMO_CORE_SRC does not name a checkout of OLMo-core"),
]

LNS = ["--model.block._CLASS_=olmo_lns.olmo_core.BlockConfig", "--model.block.scheme=lns"]
#: A model and data small enough for a CPU; everything else is the script's own.
SMALL = [
    "--sequence-length=32",
    "--dataset.tokenizer.vocab_size=512",
    "--dataset.tokenizer.eos_token_id=0",
    "--dataset.tokenizer.pad_token_id=0",
    "--data_loader.num_workers=0",
    "--data_loader.global_batch_size=128",
    "--model.d_model=32",
    "--model.n_layers=4",
    "--model.vocab_size=512",
    "--model.block.sequence_mixer.n_heads=4",
    "--model.block.feed_forward.hidden_size=64",
    "--train_module.rank_microbatch_size=64",
    "--train_module.compile_model=false",
    "--train_module.dp_config.param_dtype=float32",
    "--trainer.callbacks.lm_evaluator.enabled=false",
    "--trainer.callbacks.downstream_evaluator.enabled=false",
    "--trainer.callbacks.checkpointer.save_interval=2",
    "--trainer.callbacks.checkpointer.ephemeral_save_interval=null",
    "--trainer.callbacks.checkpointer.save_async=false",
    "--trainer.metrics_collect_interval=1",
]
LINE = "LayerNorm Scaling on: 8 norms (RMSNorm); s = 1 (block 1) to 0.5 (block 4); exponent 0.5"


@pytest.fixture(scope="module")
def launch(tmp_path_factory):
    base = tmp_path_factory.mktemp("launch")
    data = np.memmap(base / "data.npy", dtype=np.uint16, mode="w+", shape=(20_000,))
    data[:] = np.random.default_rng(0).integers(1, 512, 20_000)
    data.flush()

    def run(save, *flags, steps=4, ranks=1, **variables):
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        command += [str(SCRIPT), "tiny", *SMALL, f"--save-folder={save}", f"--work-dir={base}/work"]
        stop = f"--trainer.hard_stop={{value: {steps}, unit: steps}}"
        command += [f"--dataset.paths=[{base}/data.npy]", stop, *flags]
        environment = {**os.environ, "PYTHONPATH": str(SITE), "OMP_NUM_THREADS": "1", **variables}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        done = subprocess.run(command, env=environment, timeout=600, **pipes)
        return done.returncode, done.stdout

    return run


def _losses(output):
    return [float(value) for value in re.findall(r"train/CE loss=([\d.]+)", output)]


def test_a_stopped_run_resumes_with_the_flags_and_is_refused_without_them(launch, tmp_path):
    save = tmp_path / "lns"
    code, output = launch(save, *LNS, ranks=2)
    assert code == 0 and output.count(LINE) == 1, output[-4000:]
    assert '"scheme": "lns"' in (save / "step2" / "config.json").read_text()
    code, resumed = launch(save, *LNS, steps=6)
    assert code == 0 and LINE in resumed and "step4" in resumed, resumed[-4000:]
    code, forgotten = launch(save, steps=8)
    assert code != 0
    assert "CheckpointMismatchError" in forgotten and "this run has preln" in forgotten
    code, disabled = launch(save, *LNS, steps=8, OLMO_LNS_DISABLE="1")
    assert code != 0 and "OLMO_LNS_DISABLE=1 is set, but a block config names a scheme" in disabled


def test_without_the_flags_the_package_changes_nothing(launch, tmp_path):
    found = []
    for variables in ({}, {"OLMO_LNS_DISABLE": "1"}):
        code, output = launch(tmp_path / f"stock{len(found)}", **variables)
        assert code == 0 and "LayerNorm Scaling" not in output, output[-4000:]
        found.append(_losses(output))
    assert found[0] == found[1] and len(found[0]) >= 4


def test_the_patch_for_upstream_passes_its_own_tests(tmp_path):
    """The patch is applied to a copy of the checkout. Without its code, the tests that it adds fail."""
    patch = Path(__file__).resolve().parents[3] / "patches" / "olmo_core" / "layernorm-scaling-float.patch"
    failed = {}
    for parts in ("src/*", "src/test/*"):
        tree = tmp_path / str(len(failed))
        shutil.copytree(Path(SOURCE) / "src", tree / "src")
        subprocess.run(["git", "apply", f"--include={parts}", str(patch)], cwd=tree, check=True, capture_output=True)
        words = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "test/nn/transformer/model_test.py"]
        done = subprocess.run(
            [sys.executable, *words, "-k", "layer_norm_scaled"],
            cwd=tree / "src",
            env={**os.environ, "PYTHONPATH": str(tree / "src"), "OLMO_LNS_DISABLE": "1"},
            capture_output=True,
            text=True,
        )
        failed[parts] = done.stdout.strip().splitlines()[-1]
    assert failed["src/*"].startswith("5 passed") and failed["src/test/*"].startswith("5 failed"), failed
