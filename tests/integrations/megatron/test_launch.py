"""The real ``megatron.training`` of the checkout named by MEGATRON_LM_SRC."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support import megatron_launch

#: Parses like pretrain_gpt.py does and prints what arrived on the config.
PROGRAM = """
import json, sys
from megatron.training import arguments
from megatron.training.arguments import parse_args, validate_args, core_transformer_config_from_args
if "--help" in sys.argv:
    parse_args()
args = parse_args()
try:
    validate_args(args, {"tokenizer_type": "NullTokenizer"})
    config = core_transformer_config_from_args(args)
    found = {n: getattr(config, n) for n in vars(config) if n.startswith("layernorm_scaling") or n == "no_scaled_init"}
    found["plain"] = config.output_layer_init_method is config.init_method
    found["arg"] = args.layernorm_scaling_exponent
except Exception as error:
    found = {"error": f"{type(error).__name__}: {error}"}
print("FOUND " + json.dumps(found))
"""


#: Loads a checkpoint as examples/post_training/modelopt does. ModelOpt's own functions have no part in it.
MODELOPT = """
import sys
from unittest import mock
from megatron.training import get_args
from megatron.training.arguments import parse_args, validate_args, core_transformer_config_from_args
from megatron.training.global_vars import set_args
sys.modules.update({
    "modelopt" + name: mock.MagicMock()
    for name in ("", ".torch", ".torch.opt", ".torch.opt.plugins", ".torch.opt.plugins.mcore_dist_checkpointing",
                 ".torch.quantization", ".torch.quantization.utils", ".torch.utils")
})
from megatron.post_training.checkpointing import load_modelopt_checkpoint
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


def parse(*flags: str, program: str = PROGRAM) -> subprocess.CompletedProcess[str]:
    return run_program(program, *megatron_launch.model_flags(), *flags)


def run_program(program: str, *words: str) -> subprocess.CompletedProcess[str]:
    tree = megatron_launch.checkout()
    environment = megatron_launch.environment() | {
        "PYTHONPATH": f"{tree}:{megatron_launch.environment()['PYTHONPATH']}"
    }
    return subprocess.run(
        [sys.executable, "-c", program, *words],
        cwd=tree, env=environment, capture_output=True, text=True, timeout=300,
    )  # fmt: skip


def parsed(*flags: str) -> dict[str, Any]:
    done = parse(*flags)
    line = next((x for x in done.stdout.splitlines() if x.startswith("FOUND ")), None)
    assert line is not None, done.stderr[-2000:]
    return json.loads(line.removeprefix("FOUND "))


def test_flags_reach_the_config() -> None:
    flags = ("--layernorm-scaling", "--layernorm-scaling-exponent", "0.25")
    assert parsed(*flags) == {
        "layernorm_scaling": True,
        "layernorm_scaling_exponent": 0.25,
        "layernorm_scaling_keep_scaled_init": False,
        "no_scaled_init": False,
        "plain": True,
        "arg": 0.25,
    }


def test_without_flags_the_config_is_stock() -> None:
    found = parsed()
    assert not found["layernorm_scaling"] and not found["plain"]


def test_contradicting_flags_are_refused() -> None:
    assert "contradict each other" in parsed("--layernorm-scaling-keep-scaled-init", "--no-scaled-init")["error"]


def test_help_shows_the_flags() -> None:
    done = parse("--help")
    if "unsupported format character" in done.stderr:
        pytest.skip("--help of this Megatron fails by itself: a bare % in one of its own help texts")
    assert done.returncode == 0, done.stderr[-2000:]
    for flag in (
        "--layernorm-scaling ",
        "--layernorm-scaling-exponent",
        "--layernorm-scaling-keep",
        "--no-scaled-init",
    ):
        assert flag in done.stdout


def test_the_guards_are_there_when_modelopt_comes_first() -> None:
    """As in quantize.py of 0.14.0, where nothing of Megatron was imported before."""
    program = MODELOPT.partition("from megatron.training import")[0] + MODELOPT[MODELOPT.index("sys.modules.update") :]
    program = (
        program.partition("from support")[0] + "print('PATCHED', hasattr(load_modelopt_checkpoint, '__wrapped__'))"
    )
    done = parse(program=program)
    assert "PATCHED True" in done.stdout, done.stderr[-3000:]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """One checkpoint with LNS and one without, three steps each."""
    tree = megatron_launch.checkout()
    megatron_launch.build_helpers(tree)
    folders = []
    for name, flags in (("lns", ["--layernorm-scaling"]), ("stock", [])):
        folder = tmp_path_factory.mktemp(name)
        done = megatron_launch.pretrain(
            tree, *flags, "--save", str(folder), "--save-interval", "3", "--exit-interval", "3"
        )
        assert (folder / "latest_checkpointed_iteration.txt").is_file(), done.stderr[-3000:]
        folders.append(folder)
    return folders[0], folders[1]


@pytest.mark.slow
def test_resuming(checkpoints: tuple[Path, Path]) -> None:
    """Restored by --use-checkpoint-args; refused, with both values, where the flag and the checkpoint differ."""
    tree = megatron_launch.checkout()
    lns, stock = checkpoints
    given = megatron_launch.pretrain(tree, "--load", str(lns), "--layernorm-scaling")
    restored = megatron_launch.pretrain(tree, "--load", str(lns), "--use-checkpoint-args")
    assert len(megatron_launch.losses(given)) == 3, given.stderr[-3000:]
    assert megatron_launch.losses(restored) == megatron_launch.losses(given), restored.stderr[-3000:]
    assert "from the checkpoint's arguments: --layernorm-scaling (exponent 0.5)" in restored.stdout
    for folder, flags, words in (
        (lns, [], r"was saved with lns:exponent=0.5 .*but this run has Pre-LN"),
        (lns, ["--finetune"], r"was saved with lns:exponent=0.5 .*but this run has Pre-LN"),
        (stock, ["--layernorm-scaling"], r"was saved with Pre-LN.*but this run has lns:exponent=0.5"),
        (stock, ["--layernorm-scaling", "--use-checkpoint-args"], r"was saved with Pre-LN.*but this run has lns"),
        (lns, ["--layernorm-scaling", "--layernorm-scaling-exponent", "1"], r"exponent=0.5.*exponent=1"),
    ):
        refused = megatron_launch.pretrain(tree, "--load", str(folder), *flags)
        assert refused.returncode != 0
        assert re.search(words, refused.stderr + refused.stdout), refused.stderr[-3000:]


@pytest.mark.slow
def test_modelopt_loads_are_compared_too(checkpoints: tuple[Path, Path]) -> None:
    lns, stock = checkpoints
    for folder, flags in ((lns, ["--layernorm-scaling"]), (stock, [])):
        done = parse("--load", str(folder), *flags, program=MODELOPT)
        assert "LOADED" in done.stdout, done.stderr[-3000:]
    for folder, flags, words in (
        (lns, [], r"was saved with lns:exponent=0.5 .*but this run has Pre-LN"),
        (stock, ["--layernorm-scaling"], r"was saved with Pre-LN.*but this run has lns"),
    ):
        done = parse("--load", str(folder), *flags, program=MODELOPT)
        assert done.returncode != 0 and re.search(words, done.stderr), done.stderr[-3000:]


@pytest.mark.slow
def test_a_patched_megatron_has_the_guards_of_the_plugin(
    checkpoints: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the start-up hook, so that only the patch can have loaded it."""
    tree, patched = megatron_launch.checkout(), tmp_path / "Megatron-LM"
    shutil.copytree(tree, patched, ignore=shutil.ignore_patterns(".git", "__pycache__"))
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    patches = sorted((megatron_launch.TESTS.parent / "patches" / "megatron").glob("load-plugins-*.patch"))
    if all(
        subprocess.run(["git", "apply", str(patch)], cwd=patched, capture_output=True).returncode for patch in patches
    ):
        pytest.skip("no patch fits this Megatron")
    monkeypatch.setenv("MEGATRON_NO_HOOK", "1")
    lns, stock = checkpoints
    done = megatron_launch.pretrain(patched, "--load", str(lns), "--finetune", "--layernorm-scaling")
    assert len(megatron_launch.losses(done)) == 6, done.stderr[-3000:]
    assert "LayerNorm Scaling on: 8 norms (RMSNorm)" in done.stdout
    for folder, flags, words in (
        (lns, [], "was saved with lns:exponent=0.5"),
        (stock, ["--layernorm-scaling"], "was saved with Pre-LN"),
    ):
        refused = megatron_launch.pretrain(patched, "--load", str(folder), "--finetune", *flags)
        assert refused.returncode != 0 and words in refused.stderr, refused.stderr[-3000:]


#: tools/checkpoint/convert.py, which asks for TE's rope whatever the checkpoint was trained with, and never runs it.
CONVERT = """
import runpy, sys
sys.path.insert(0, "tools/checkpoint")
from megatron.core.models.common.embeddings import rope_utils
rope_utils.fused_apply_rotary_pos_emb = rope_utils.fused_apply_rotary_pos_emb_thd = object()
sys.argv[0] = "tools/checkpoint/convert.py"
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.slow
def test_a_converter_that_loses_a_schemes_parameters_is_refused(tmp_path: Path) -> None:
    tree = megatron_launch.checkout()
    megatron_launch.build_helpers(tree)
    save = ["--save", str(tmp_path / "run"), "--save-interval", "1", "--exit-interval", "1", "--ckpt-format", "torch"]
    done = megatron_launch.pretrain(tree, "--norm-scheme", "skipinit", *save)
    assert len(megatron_launch.losses(done)) == 1, done.stderr[-3000:]
    flags = ["--model-type", "GPT", "--loader", "core", "--saver", "core", "--megatron-path", "."]
    flags += ["--load-dir", str(tmp_path / "run"), "--save-dir", str(tmp_path / "converted")]
    flags += ["--loader-transformer-impl", "local", "--position-embedding-type", "rope"]
    done = run_program(CONVERT, *flags)
    assert done.returncode != 0
    assert "hands on a fixed list of tensors, without the gates or branch norms of skipinit" in done.stderr, done.stderr


@pytest.mark.slow
def test_legacy_models_have_no_site() -> None:
    """0.14.0 still builds them, of other layers; the run stops before its first step."""
    tree = megatron_launch.checkout()
    if "megatron.legacy.model.GPTModel" not in (tree / "pretrain_gpt.py").read_text():
        pytest.skip("the pretrain_gpt.py of this Megatron builds no legacy models itself")
    megatron_launch.build_helpers(tree)
    done = megatron_launch.pretrain(tree, "--use-legacy-models", "--layernorm-scaling", "--ckpt-format", "torch")
    assert done.returncode != 0 and megatron_launch.losses(done) == []
    assert "gpt_model.GPTModel was built without it in a single block" in done.stderr, done.stderr[-3000:]


@pytest.mark.slow
def test_a_hybrid_model_of_plain_blocks_is_the_gpt_model() -> None:
    """pretrain_hybrid.py (up to 0.17 pretrain_mamba.py): the same weights, the same factors, the same losses."""
    tree = megatron_launch.checkout()
    megatron_launch.build_helpers(tree)
    new = (tree / "pretrain_hybrid.py").is_file()
    script = "pretrain_hybrid.py" if new else "pretrain_mamba.py"
    if not (tree / script).is_file():
        pytest.skip(f"{tree} has no {script}")
    pattern = ["--hybrid-layer-pattern"] if new else ["--is-hybrid-model", "--hybrid-override-pattern"]
    model = ["--spec", "support.megatron_hybrid", "hybrid_stack_spec", "--layernorm-scaling", *pattern]
    hybrid = megatron_launch.pretrain(tree, "--num-layers", "8", *model, "*-*-*-*-", script=script)
    assert "LayerNorm Scaling on: 8 norms (RMSNorm), 8 in this process (blocks 1-4)" in hybrid.stdout, hybrid.stderr[
        -3000:
    ]
    gpt = megatron_launch.losses(megatron_launch.pretrain(tree, "--layernorm-scaling"))
    assert megatron_launch.losses(hybrid) == pytest.approx(gpt, rel=1e-5), hybrid.stderr[-3000:]
    refused = megatron_launch.pretrain(tree, "--num-layers", "3", *model, "*-*", script=script)
    assert refused.returncode != 0 and "attention without an MLP behind it" in refused.stderr, refused.stderr[-3000:]


@pytest.mark.slow
def test_a_folded_checkpoint_runs_without_the_plugin(
    checkpoints: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``olmo-lns export --format megatron``, then stock pretrain_gpt.py: the loss that the LNS model has."""
    tree = megatron_launch.checkout()
    lns, folded = checkpoints[0], tmp_path / "folded"
    export = [sys.executable, "-m", "olmo_lns", "export", str(lns), str(folded), "--format", "megatron"]
    subprocess.run(export, check=True, capture_output=True)
    expected = megatron_launch.losses(
        megatron_launch.pretrain(tree, "--load", str(lns), "--finetune", "--layernorm-scaling")
    )
    refused = megatron_launch.pretrain(tree, "--load", str(folded), "--finetune", "--layernorm-scaling")
    assert refused.returncode != 0 and "folded" in refused.stderr + refused.stdout
    taken = megatron_launch.pretrain(tree, "--load", str(folded), "--finetune")
    assert megatron_launch.losses(taken)[0] == pytest.approx(expected[0], rel=1e-6), taken.stderr[-3000:]
    assert "trained on as plain Pre-LN (--finetune)" in taken.stdout
    monkeypatch.setenv("OLMO_LNS_DISABLE", "1")
    stock = megatron_launch.pretrain(tree, "--load", str(folded), "--finetune")
    assert megatron_launch.losses(stock)[0] == pytest.approx(expected[0], rel=1e-6), stock.stderr[-3000:]
    unfolded = megatron_launch.pretrain(tree, "--load", str(lns), "--finetune")
    assert megatron_launch.losses(unfolded)[0] != pytest.approx(expected[0], rel=1e-6), "the factor is not felt"
