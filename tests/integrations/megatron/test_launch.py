"""The real, unmodified programs of the checkout named by MEGATRON_LM_SRC."""

import re
import shutil
import subprocess
import sys

import pytest
from support import launch, megatron_launch
from support.megatron_launch import pretrain

pytestmark = pytest.mark.slow

LNS = "--layernorm-scaling"
LINE = "LayerNorm Scaling on: 8 norms (RMSNorm), 8 in this process (blocks 1-4); s = 1 (block 1) to 0.5 (block 4)"


@pytest.fixture(scope="module")
def tree():
    found = megatron_launch.checkout()
    megatron_launch.build_helpers(found)
    return found


@pytest.fixture(scope="module")
def saved(tree, tmp_path_factory):
    """The checkpoint of the third step, for LayerNorm Scaling and for Pre-LN."""
    found = {}
    for flags in ((LNS,), ()):
        folder = found[flags] = str(tmp_path_factory.mktemp("saved"))
        done = pretrain(tree, *flags, "--save", folder, "--save-interval", "3", "--exit-interval", "3").ok()
        assert not flags or (LINE in done.text and "measured: output, gradient, initialization" in done.text)
    return found


def refused(done, words):
    assert done.code and re.search(words, done.text, re.DOTALL), done.text[-3000:]


def test_a_run_resumes_and_refuses_another_scheme(saved, tree):
    folder = saved[(LNS,)]
    given = pretrain(tree, "--load", folder, LNS).ok().losses()
    assert pretrain(tree, "--load", folder, "--use-checkpoint-args").ok().losses() == given and len(given) == 3
    done = pretrain(tree, "--load", folder, "--finetune")
    refused(
        done,
        r"CheckpointMismatchError: [^\n]*its config says lns[^\n]*but this run has preln[^\n]*\(--layernorm-scaling\)",
    )
    for more in ((), ("--use-checkpoint-args",)):
        refused(pretrain(tree, "--load", saved[()], LNS, *more), "its config says preln.*but this run has lns")


def test_the_scheme_is_compared_before_a_weight_is_read(saved, tree, tmp_path):
    """Without the files of the weights, another scheme is still what stops the run."""
    folder = tmp_path / "saved"
    shutil.copytree(saved[(LNS,)], folder)
    weights = list(folder.rglob("*.distcp"))
    for path in weights:
        path.unlink()
    refused(pretrain(tree, "--load", folder), "CheckpointMismatchError: .*its config says lns.*this run has preln")
    assert weights and "CheckpointMismatchError" not in pretrain(tree, "--load", folder, LNS).text


def test_training_equals_the_reference_and_stock_is_stock(tree):
    """A stock launch under hooks, with the plugin off. Two pipeline stages: scripts/snapshots.py."""
    lns, installed = pretrain(tree, LNS).losses(), pretrain(tree).losses()
    launcher = pretrain(tree, LNS, script="-m olmo_lns pretrain_gpt.py", MEGATRON_NO_HOOK="1")
    stock = pretrain(tree, OLMO_LNS_DISABLE="1").losses()
    reference = pretrain(tree, OLMO_LNS_DISABLE="1", MEGATRON_REFERENCE="1").losses()
    assert lns == launcher.losses() == pytest.approx(reference, rel=2e-6) and len(lns) == 6
    assert installed == stock
    assert max(abs(a - b) for a, b in zip(lns, stock, strict=True)) > 1e-3


def test_a_patched_megatron_has_the_guards_of_the_plugin(saved, tree, tmp_path, monkeypatch):
    """The start-up hook is off, so that only the patch can load the plugin."""
    patched = tmp_path / "Megatron-LM"
    shutil.copytree(tree, patched, ignore=shutil.ignore_patterns(".git", "__pycache__"))
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    patches = sorted((launch.REPOSITORY / "patches" / "megatron").glob("load-plugins-*.patch"))
    if all(subprocess.run(["git", "apply", str(p)], cwd=patched, capture_output=True).returncode for p in patches):
        pytest.skip("no patch fits this Megatron")
    words = ("--load", saved[(LNS,)], "--finetune")
    done = pretrain(patched, *words, LNS, MEGATRON_NO_HOOK="1").ok()
    assert len(done.losses()) == 6 and LINE in done.text
    refused(pretrain(patched, *words, MEGATRON_NO_HOOK="1"), "its config says lns")


def test_a_hybrid_model_of_plain_blocks_equals_the_gpt_model(tree):
    """pretrain_hybrid.py (up to 0.17 pretrain_mamba.py): the same weights, the same factors, the same losses."""
    new = (tree / "pretrain_hybrid.py").is_file()
    script = "pretrain_hybrid.py" if new else "pretrain_mamba.py"
    if not (tree / script).is_file():
        pytest.skip(f"{tree} has no {script}")
    pattern = ["--hybrid-layer-pattern"] if new else ["--is-hybrid-model", "--hybrid-override-pattern"]
    model = ["--spec", "support.megatron_hybrid", "hybrid_stack_spec", LNS, *pattern]
    hybrid = pretrain(tree, "--num-layers", "8", *model, "*-*-*-*-", script=script).ok()
    assert LINE in hybrid.text
    assert hybrid.losses() == pytest.approx(pretrain(tree, LNS).losses(), rel=1e-5)
    done = pretrain(tree, "--num-layers", "3", *model, "*-*", script=script)
    refused(done, "attention and MLP in turn")


def test_a_folded_checkpoint_runs_without_the_plugin(saved, tree, tmp_path):
    """After ``olmo-lns export --format megatron``, stock pretrain_gpt.py has the loss of the LNS model."""
    source, folded, disabled = saved[(LNS,)], str(tmp_path / "folded"), {"OLMO_LNS_DISABLE": "1"}
    export = [sys.executable, "-m", "olmo_lns", "export", source, folded, "--format", "megatron"]
    launch.run(export, cwd=tmp_path).ok()
    refused(pretrain(tree, "--load", folded, "--finetune", LNS), "its config says preln, but this run has lns")
    expected, taken, stock, unfolded = (
        pretrain(tree, "--load", folder, "--finetune", *flags, **variables).ok().losses()[0]
        for folder, flags, variables in (
            (source, (LNS,), {}), (folded, (), {}), (folded, (), disabled), (source, (), disabled),
        )
    )  # fmt: skip
    assert taken == pytest.approx(expected, rel=1e-6) == stock
    assert unfolded != pytest.approx(expected, rel=1e-6), "the loss does not depend on the factor"
