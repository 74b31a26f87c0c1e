"""OLMo-core's own example script, unmodified, from a checkout: ``OLMO_CORE_SRC=~/OLMo-core``.

The script comes from the checkout; OLMo-core itself is the installed package.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("olmo_core.nn", reason="needs ai2-olmo-core 2.5 to 3.0 (make test-olmo-core)")

import numpy as np
from support.launch import REPOSITORY, environment, run, torchrun

SOURCE = os.environ.get("OLMO_CORE_SRC")
SCRIPT = Path(SOURCE or "") / "src" / "examples" / "llm" / "train.py"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not SOURCE, reason="OLMO_CORE_SRC does not name a checkout of OLMo-core"),
]

LNS = ["--model.block._CLASS_=olmo_lns.olmo_core.BlockConfig", "--model.block.scheme=lns"]
#: A model and data small enough for a CPU; everything else is the script's own.
SMALL = """
    --sequence-length=32 --dataset.tokenizer.vocab_size=512 --dataset.tokenizer.eos_token_id=0
    --dataset.tokenizer.pad_token_id=0 --data_loader.num_workers=0 --data_loader.global_batch_size=128
    --model.d_model=32 --model.n_layers=4 --model.vocab_size=512 --model.block.sequence_mixer.n_heads=4
    --model.block.feed_forward.hidden_size=64 --train_module.rank_microbatch_size=64
    --train_module.compile_model=false --train_module.dp_config.param_dtype=float32
    --trainer.callbacks.lm_evaluator.enabled=false --trainer.callbacks.downstream_evaluator.enabled=false
    --trainer.callbacks.checkpointer.save_interval=2 --trainer.callbacks.checkpointer.ephemeral_save_interval=null
    --trainer.callbacks.checkpointer.save_async=false --trainer.metrics_collect_interval=1
"""
LINE = "LayerNorm Scaling on: 8 norms (RMSNorm); s = 1 (block 1) to 0.5 (block 4); exponent 0.5"


def train(folder, save, *flags, steps=4, ranks=1, **variables):
    """Run the script with data of ``folder``."""
    np.random.default_rng(0).integers(1, 512, 20_000).astype(np.uint16).tofile(folder / "data.npy")
    words = ["tiny", *SMALL.split(), f"--save-folder={folder / save}", f"--work-dir={folder}/work", *flags]
    words += [f"--dataset.paths=[{folder}/data.npy]", f"--trainer.hard_stop={{value: {steps}, unit: steps}}"]
    env = environment(PYTHONPATH=str(REPOSITORY / "tests" / "support" / "olmo_core_site"), **variables)
    return torchrun(ranks, SCRIPT, *words, cwd=folder, env=env)


def test_a_stopped_run_resumes_with_the_flags_and_is_refused_without_them(tmp_path):
    first = train(tmp_path, "lns", *LNS, ranks=2).ok()
    assert first.text.count(LINE) == 1
    assert '"scheme": "lns"' in (tmp_path / "lns" / "step2" / "config.json").read_text()
    resumed = train(tmp_path, "lns", *LNS, steps=6).ok()
    assert LINE in resumed.text and "step4" in resumed.text
    forgotten = train(tmp_path, "lns", steps=8)
    assert forgotten.code and "CheckpointMismatchError" in forgotten.text and "this run has preln" in forgotten.text
    disabled = train(tmp_path, "lns", *LNS, steps=8, OLMO_LNS_DISABLE="1")
    assert disabled.code and "OLMO_LNS_DISABLE=1 is set, but a block config names a scheme" in disabled.text


def test_without_the_flags_the_package_changes_nothing(tmp_path):
    found, stock = train(tmp_path, "found").ok(), train(tmp_path, "stock", OLMO_LNS_DISABLE="1").ok()
    assert found.losses() == stock.losses() and len(found.losses()) >= 4 and "LayerNorm Scaling" not in found.text


def test_the_patch_for_upstream_passes_its_own_tests(tmp_path):
    """The patch is applied to a copy of the checkout. Without its code, the tests that it adds fail."""
    patch, last = REPOSITORY / "patches" / "olmo_core" / "layernorm-scaling-float.patch", {}
    words = [
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "test/nn/transformer/model_test.py",
        "-k",
        "layer_norm_scaled",
    ]
    for parts in ("src/*", "src/test/*"):
        tree = tmp_path / str(len(last))
        shutil.copytree(Path(SOURCE) / "src", tree / "src")
        subprocess.run(["git", "apply", f"--include={parts}", str(patch)], cwd=tree, check=True, capture_output=True)
        env = environment(PYTHONPATH=str(tree / "src"), OLMO_LNS_DISABLE="1")
        last[parts] = run([sys.executable, *words], cwd=tree / "src", env=env).last_line()
    assert last["src/*"].startswith("5 passed") and last["src/test/*"].startswith("5 failed"), last
