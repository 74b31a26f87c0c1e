"""The real, unmodified programs of the checkout named by MEGATRON_LM_SRC."""

import re
import shutil
import subprocess
import sys

import pytest
from support import megatron_launch
from support.megatron_launch import losses, pretrain

#: Loads a checkpoint as examples/post_training/modelopt does. Mocks stand in for ModelOpt's own functions.
MODELOPT = """
import sys
from unittest import mock
sys.modules.update({
    "modelopt" + name: mock.MagicMock()
    for name in ("", ".torch", ".torch.opt", ".torch.opt.plugins", ".torch.opt.plugins.mcore_dist_checkpointing",
                 ".torch.quantization", ".torch.quantization.utils", ".torch.utils")
})
from megatron.post_training.checkpointing import load_modelopt_checkpoint  # Megatron's first import, as in quantize.py
from megatron.training.arguments import parse_args, validate_args, core_transformer_config_from_args
from megatron.training.global_vars import set_args
from support import megatron_cpu, megatron_tiny
args = parse_args()
validate_args(args, {"tokenizer_type": "NullTokenizer"})
args.padded_vocab_size = 4224
set_args(args)
with megatron_cpu.single_process():
    from megatron.core.models.gpt.gpt_model import GPTModel
    cfg = core_transformer_config_from_args(args)
    model = GPTModel(cfg, megatron_tiny.local_spec(cfg), args.padded_vocab_size, args.max_position_embeddings,
                     share_embeddings_and_output_weights=False, position_embedding_type="rope")
    before = float(model.decoder.layers[0].mlp.linear_fc2.weight.sum())
    load_modelopt_checkpoint([model])
    assert float(model.decoder.layers[0].mlp.linear_fc2.weight.sum()) != before
    print("LOADED")
"""
#: Runs tools/checkpoint/convert.py, which needs TE's rope for every checkpoint but never calls it.
CONVERT = """
import runpy, sys
sys.path.insert(0, "tools/checkpoint")
from megatron.core.models.common.embeddings import rope_utils
rope_utils.fused_apply_rotary_pos_emb = rope_utils.fused_apply_rotary_pos_emb_thd = object()
sys.argv[0] = "tools/checkpoint/convert.py"
runpy.run_path(sys.argv[0], run_name="__main__")
"""
#: One scheme for each kind of slot, and its start-up line in a model of four blocks.
SCHEMES = {
    "lns": "8 norms (RMSNorm), 8 in this process (blocks 1-4); s = 1 (block 1) to 0.5 (block 4)",
    "sandwich_depth:exponent=0.25": "16 norms (RMSNorm), 16 in this process (blocks 1-4); branch_scale = 1 (block 1)",
    "skipinit": "8 norms (RMSNorm), 8 in this process (blocks 1-4); learned gate from 0.5 to 0.5",
}
THREE_STEPS = ("--save-interval", "3", "--exit-interval", "3")


@pytest.fixture(scope="module")
def tree():
    found = megatron_launch.checkout()
    megatron_launch.build_helpers(found)
    return found


def flags_of(scheme):
    return ["--layernorm-scaling"] if scheme == "lns" else ["--norm-scheme", scheme] if scheme else []


@pytest.fixture(scope="module")
def saved(tree, tmp_path_factory):
    """For each scheme, and "" for Pre-LN, the checkpoint of the third step and the finished run."""
    found = {}
    for scheme in ("", *SCHEMES):
        folder = tmp_path_factory.mktemp(scheme.split(":")[0] or "stock")
        done = pretrain(tree, *flags_of(scheme), "--save", str(folder), *THREE_STEPS)
        assert (folder / "latest_checkpointed_iteration.txt").is_file(), done.stderr[-3000:]
        found[scheme] = folder, done
    return found


def run_program(tree, program, *words):
    variables = megatron_launch.environment()
    variables["PYTHONPATH"] = f"{tree}:{variables['PYTHONPATH']}"
    return subprocess.run(
        [sys.executable, "-c", program, *words],
        cwd=tree, env=variables, capture_output=True, text=True, timeout=300,
    )  # fmt: skip


def refused(done, words):
    assert done.returncode != 0
    assert re.search(words, done.stderr + done.stdout, re.DOTALL), done.stderr[-3000:]


@pytest.mark.slow
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_run_trains_saves_resumes_and_refuses_another_scheme(scheme, saved, tree):
    (folder, first), other = saved[scheme], "lns" if scheme != "lns" else "lnsafterff"
    assert re.search(rf"olmo-lns: [\w -]+ on: {re.escape(SCHEMES[scheme])}", first.stdout), first.stdout
    proj, fc2, qkv = (
        float(re.search(rf"probe: std {kind} ([0-9.]+)", first.stdout)[1])
        for kind in ("linear_proj", "linear_fc2", "linear_qkv")
    )
    assert proj == pytest.approx(qkv, rel=0.05) and fc2 == pytest.approx(qkv, rel=0.05)
    given = pretrain(tree, "--load", str(folder), *flags_of(scheme))
    restored = pretrain(tree, "--load", str(folder), "--use-checkpoint-args")
    assert len(losses(given)) == 3, given.stderr[-3000:]
    assert losses(restored) == losses(given), restored.stderr[-3000:]
    assert f"from the checkpoint's arguments: {' '.join(flags_of(scheme))}" in restored.stdout
    own = f"was saved with {scheme}"
    refused(pretrain(tree, "--load", str(folder), *flags_of(other)), rf"{own}.*but this run has {other}")
    if scheme == "lns":
        refused(pretrain(tree, "--load", str(folder), "--finetune"), rf"{own}.*but this run has Pre-LN")
        for more in ((), ("--use-checkpoint-args",)):
            stock = pretrain(tree, "--load", str(saved[""][0]), "--layernorm-scaling", *more)
            refused(stock, r"was saved with Pre-LN.*but this run has lns")


@pytest.mark.slow
def test_the_loader_for_modelopt_refuses_another_scheme_too(saved, tree):
    def load(source, running):
        words = [*megatron_launch.model_flags(), "--load", str(saved[source][0]), *flags_of(running)]
        return run_program(tree, MODELOPT, *words)

    for scheme in ("lns", ""):
        done = load(scheme, scheme)
        assert "LOADED" in done.stdout, done.stderr[-3000:]
    refused(load("lns", ""), r"was saved with lns:exponent=0.5 .*but this run has Pre-LN")
    refused(load("", "lns"), r"was saved with Pre-LN.*but this run has lns")


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
    done = pretrain(patched, "--load", str(saved["lns"][0]), "--finetune", "--layernorm-scaling")
    assert len(losses(done)) == 6, done.stderr[-3000:]
    assert "LayerNorm Scaling on: 8 norms (RMSNorm)" in done.stdout
    refused(pretrain(patched, "--load", str(saved["lns"][0]), "--finetune"), "was saved with lns:exponent=0.5")


@pytest.mark.slow
def test_a_converter_that_loses_a_schemes_parameters_is_refused(tree, tmp_path):
    save = ["--save", str(tmp_path / "run"), "--save-interval", "1", "--exit-interval", "1", "--ckpt-format", "torch"]
    done = pretrain(tree, "--norm-scheme", "skipinit", *save)
    assert len(losses(done)) == 1, done.stderr[-3000:]
    flags = ["--model-type", "GPT", "--loader", "core", "--saver", "core", "--megatron-path", "."]
    flags += ["--load-dir", str(tmp_path / "run"), "--save-dir", str(tmp_path / "converted")]
    flags += ["--loader-transformer-impl", "local", "--position-embedding-type", "rope"]
    words = "hands on a fixed list of tensors, without the gates or branch norms of skipinit"
    done = run_program(tree, CONVERT, *flags)
    if "missing 1 required positional argument: 'model_builder'" in done.stderr:
        pytest.skip("tools/checkpoint/convert.py of this Megatron (0.16 and newer) builds no model by itself")
    refused(done, words)


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
    refused(done, "attention without an MLP behind it")


@pytest.mark.slow
def test_a_folded_checkpoint_runs_without_the_plugin(saved, tree, tmp_path, monkeypatch):
    """After ``olmo-lns export --format megatron``, stock pretrain_gpt.py has the loss of the LNS model."""
    source, folded, flag = str(saved["lns"][0]), str(tmp_path / "folded"), "--layernorm-scaling"
    export = [sys.executable, "-m", "olmo_lns", "export", source, folded, "--format", "megatron"]
    subprocess.run(export, check=True, capture_output=True)
    expected = losses(pretrain(tree, "--load", source, "--finetune", flag))
    refused(pretrain(tree, "--load", folded, "--finetune", flag), "folded")
    taken = pretrain(tree, "--load", folded, "--finetune")
    assert losses(taken)[0] == pytest.approx(expected[0], rel=1e-6), taken.stderr[-3000:]
    assert "under Pre-LN they are a stock model's" in taken.stdout
    monkeypatch.setenv("OLMO_LNS_DISABLE", "1")
    stock = pretrain(tree, "--load", folded, "--finetune")
    assert losses(stock)[0] == pytest.approx(expected[0], rel=1e-6), stock.stderr[-3000:]
    unfolded = pretrain(tree, "--load", source, "--finetune")
    assert losses(unfolded)[0] != pytest.approx(expected[0], rel=1e-6), "the loss does not depend on the factor"
