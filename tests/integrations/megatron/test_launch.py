"""The real, unmodified programs of the checkout named by MEGATRON_LM_SRC."""

import re
import shutil
import subprocess
import sys

import pytest
from support import megatron_launch
from support.megatron_launch import losses, pretrain

#: What the wrapper of ModelOpt's loader relies on. Mocks stand in for ModelOpt's own modules.
MODELOPT = """
import inspect, sys
from unittest import mock
names = (".torch", ".torch.opt", ".torch.opt.plugins", ".torch.opt.plugins.mcore_dist_checkpointing",
         ".torch.quantization", ".torch.quantization.utils", ".torch.utils")
sys.modules.update({"modelopt" + name: mock.MagicMock() for name in ("", *names)})
from megatron.post_training.checkpointing import load_modelopt_checkpoint as loader
from olmo_lns import hook
stock = loader.__wrapped__
print(hook.is_wrapped(loader), "get_sharded_load_dir" in stock.__globals__, "load_arg" in inspect.signature(stock).parameters)
"""
LNS = "--layernorm-scaling"
THREE_STEPS = ("--save-interval", "3", "--exit-interval", "3")


@pytest.fixture(scope="module")
def tree():
    found = megatron_launch.checkout()
    megatron_launch.build_helpers(found)
    return found


@pytest.fixture(scope="module")
def saved(tree, tmp_path_factory):
    """For LayerNorm Scaling and for Pre-LN, the checkpoint of the third step and the finished run."""
    found = {}
    for flags in ((LNS,), ()):
        folder = tmp_path_factory.mktemp("saved")
        done = pretrain(tree, *flags, "--save", str(folder), *THREE_STEPS)
        assert (folder / "latest_checkpointed_iteration.txt").is_file(), done.stderr[-3000:]
        found[flags] = folder, done
    return found


def refused(done, words):
    assert done.returncode != 0
    assert re.search(words, done.stderr + done.stdout, re.DOTALL), done.stderr[-3000:]


@pytest.mark.slow
def test_a_run_trains_saves_resumes_and_refuses_another_scheme(saved, tree):
    folder, first = saved[(LNS,)]
    assert "on: 8 norms (RMSNorm), 8 in this process (blocks 1-4); s = 1 (block 1) to 0.5 (block 4)" in first.stdout
    assert "measured: output, gradient, initialization" in first.stdout
    given = pretrain(tree, "--load", str(folder), LNS)
    restored = pretrain(tree, "--load", str(folder), "--use-checkpoint-args")
    assert len(losses(given)) == 3, given.stderr[-3000:]
    assert losses(restored) == losses(given), restored.stderr[-3000:]
    done = pretrain(tree, "--load", str(folder), "--finetune")
    refused(done, "its config says lns.*but this run has preln")
    last = [line for line in done.stderr.splitlines() if "CheckpointMismatchError: " in line][-1]
    assert "(--layernorm-scaling)" in last
    for more in ((), ("--use-checkpoint-args",)):
        stock = pretrain(tree, "--load", str(saved[()][0]), LNS, *more)
        refused(stock, "its config says preln.*but this run has lns")


@pytest.mark.slow
def test_training_equals_the_reference_and_stock_is_stock(tree, monkeypatch):
    """A stock launch under hooks, with the plugin off. Two pipeline stages: scripts/snapshots.py."""
    lns, installed = losses(pretrain(tree, LNS)), losses(pretrain(tree))
    with monkeypatch.context() as without_hook:
        without_hook.setenv("MEGATRON_NO_HOOK", "1")
        assert losses(pretrain(tree, LNS, script="-m olmo_lns pretrain_gpt.py")) == lns
    monkeypatch.setenv("OLMO_LNS_DISABLE", "1")
    stock = losses(pretrain(tree))
    monkeypatch.setenv("MEGATRON_REFERENCE", "1")
    assert lns == pytest.approx(losses(pretrain(tree)), rel=2e-6) and len(lns) == 6
    assert installed == stock
    assert max(abs(a - b) for a, b in zip(lns, stock, strict=True)) > 1e-3


@pytest.mark.slow
def test_the_loader_of_modelopts_scripts_is_what_its_wrapper_expects(tree):
    variables = megatron_launch.environment()
    variables["PYTHONPATH"] = f"{tree}:{variables['PYTHONPATH']}"
    done = subprocess.run([sys.executable, "-c", MODELOPT], env=variables, capture_output=True, text=True)
    assert done.stdout.split()[-3:] == ["True"] * 3, done.stderr[-3000:]


@pytest.mark.slow
def test_a_patched_megatron_has_the_guards_of_the_plugin(saved, tree, tmp_path, monkeypatch):
    """The start-up hook is off, so that only the patch can load the plugin."""
    patched = tmp_path / "Megatron-LM"
    shutil.copytree(tree, patched, ignore=shutil.ignore_patterns(".git", "__pycache__"))
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    patches = sorted((megatron_launch.TESTS.parent / "patches" / "megatron").glob("load-plugins-*.patch"))
    if all(subprocess.run(["git", "apply", str(p)], cwd=patched, capture_output=True).returncode for p in patches):
        pytest.skip("no patch fits this Megatron")
    monkeypatch.setenv("MEGATRON_NO_HOOK", "1")
    done = pretrain(patched, "--load", str(saved[(LNS,)][0]), "--finetune", "--layernorm-scaling")
    assert len(losses(done)) == 6, done.stderr[-3000:]
    assert "LayerNorm Scaling on: 8 norms (RMSNorm)" in done.stdout
    refused(pretrain(patched, "--load", str(saved[(LNS,)][0]), "--finetune"), "its config says lns")


@pytest.mark.slow
def test_a_hybrid_model_of_plain_blocks_equals_the_gpt_model(tree):
    """pretrain_hybrid.py (up to 0.17 pretrain_mamba.py): the same weights, the same factors, the same losses."""
    new = (tree / "pretrain_hybrid.py").is_file()
    script = "pretrain_hybrid.py" if new else "pretrain_mamba.py"
    if not (tree / script).is_file():
        pytest.skip(f"{tree} has no {script}")
    pattern = ["--hybrid-layer-pattern"] if new else ["--is-hybrid-model", "--hybrid-override-pattern"]
    model = ["--spec", "support.megatron_hybrid", "hybrid_stack_spec", "--layernorm-scaling", *pattern]
    hybrid = pretrain(tree, "--num-layers", "8", *model, "*-*-*-*-", script=script)
    assert "LayerNorm Scaling on: 8 norms (RMSNorm), 8 in this process (blocks 1-4)" in hybrid.stdout, hybrid.stderr
    assert losses(hybrid) == pytest.approx(losses(pretrain(tree, "--layernorm-scaling")), rel=1e-5)
    done = pretrain(tree, "--num-layers", "3", *model, "*-*", script=script)
    refused(done, "attention and MLP in turn")


@pytest.mark.slow
def test_a_folded_checkpoint_runs_without_the_plugin(saved, tree, tmp_path, monkeypatch):
    """After ``olmo-lns export --format megatron``, stock pretrain_gpt.py has the loss of the LNS model."""
    source, folded, flag = str(saved[(LNS,)][0]), str(tmp_path / "folded"), "--layernorm-scaling"
    export = [sys.executable, "-m", "olmo_lns", "export", source, folded, "--format", "megatron"]
    subprocess.run(export, check=True, capture_output=True)
    expected = losses(pretrain(tree, "--load", source, "--finetune", flag))
    refused(pretrain(tree, "--load", folded, "--finetune", flag), "its config says preln, but this run has lns")
    taken = pretrain(tree, "--load", folded, "--finetune")
    assert losses(taken)[0] == pytest.approx(expected[0], rel=1e-6), taken.stderr[-3000:]
    monkeypatch.setenv("OLMO_LNS_DISABLE", "1")
    stock = pretrain(tree, "--load", folded, "--finetune")
    assert losses(stock)[0] == pytest.approx(expected[0], rel=1e-6), stock.stderr[-3000:]
    unfolded = pretrain(tree, "--load", source, "--finetune")
    assert losses(unfolded)[0] != pytest.approx(expected[0], rel=1e-6), "the loss does not depend on the factor"
