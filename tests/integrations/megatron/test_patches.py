"""The patches apply. Those that load the plugin do what the hook does, and change nothing where it runs too."""

import importlib.util
import inspect
import json
import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support import megatron_launch
from support import megatron_tiny as tiny

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "patches" / "megatron"
#: Version of Megatron Core -> its patches; the second for main adds the method to Megatron, without this package.
PATCHES = {
    "0.16.1": ["load-plugins-core_v0.16.1"],
    "0.19.0": ["load-plugins-core_v0.19.0"],
    "0.19.1": ["load-plugins-core_v0.19.0"],
    "0.20.0": ["load-plugins-main", "layernorm-by-depth-main"],
}

#: Builds a model with and one without LNS. "alone" removes the hook, so that only the patch extends Megatron.
PROGRAM = """
import json, sys
if sys.argv[1] == "alone":
    sys.meta_path[:] = [f for f in sys.meta_path if not hasattr(f, "olmo_lns_start_up")]
import megatron.core.models.gpt.gpt_model as layer
from support.megatron_cpu import single_process
from support import megatron_tiny as tiny
wraps, function = 0, layer.GPTModel.__init__
while hasattr(function, "__wrapped__"):
    wraps, function = wraps + 1, function.__wrapped__
with single_process():
    losses = [float(tiny.loss_of(tiny.build(cfg), tiny.batch()).detach()) for cfg in (tiny.under(), tiny.config())]
print("FOUND " + json.dumps([layer.__file__, wraps, *losses]))
"""


def run(tree, *command, codes=(0,), **variables):
    done = subprocess.run(command, cwd=tree, env=os.environ | variables, capture_output=True, text=True, timeout=600)
    assert done.returncode in codes, done.stderr[-2000:]
    return done.stdout


def path_of(tree):
    """PYTHONPATH with the Megatron of the tree, which comes before the installed one, and this repository."""
    return f"{tree}:{ROOT}:{ROOT / 'tests'}"


def git_apply(tree, name, word):
    command = ["git", "apply", word, str(FOLDER / f"{name}.patch")]
    run(tree, *command, GIT_CEILING_DIRECTORIES=str(tree.parent))


@pytest.fixture(scope="module")
def patched(tmp_path_factory):
    """A copy of the installed megatron-core 0.16.1 with its patch."""
    import megatron.core

    if megatron.core.__version__ != "0.16.1":
        pytest.skip(f"the patch is for 0.16.1, installed is {megatron.core.__version__}")
    tree = tmp_path_factory.mktemp("patched")
    source = Path(inspect.getfile(megatron.core)).parent
    shutil.copytree(source, tree / "megatron" / "core", ignore=shutil.ignore_patterns("__pycache__"))
    git_apply(tree, *PATCHES["0.16.1"], "--include=megatron/core/*")
    return tree


@pytest.mark.slow
@pytest.mark.parametrize("mode", [pytest.param("alone", marks=pytest.mark.exhaustive), "with the hook"])
def test_the_patch_loads_the_plugin_once(patched, mode):
    losses = [float(tiny.loss_of(tiny.build(cfg), tiny.batch()).detach()) for cfg in (tiny.under(), tiny.config())]
    variables = {"PYTHONPATH": path_of(patched), "OMP_NUM_THREADS": "1"}
    out = run(patched, sys.executable, "-W", "ignore", "-c", PROGRAM, mode, **variables)
    file, wraps, *found = json.loads(out.partition("FOUND ")[2])
    assert file.startswith(str(patched)) and wraps == 1
    assert found == pytest.approx(losses, rel=1e-6) and losses[0] != pytest.approx(losses[1], rel=1e-4)
    assert out.count("LayerNorm Scaling on: 8 norms") == 1


@pytest.fixture(scope="module")
def checkout():
    """The tree that MEGATRON_LM_SRC names, and its version."""
    tree = megatron_launch.checkout()
    scope = runpy.run_path(str(tree / "megatron/core/package_info.py"))
    return tree, f"{scope['MAJOR']}.{scope['MINOR']}.{scope['PATCH']}"


def test_the_patches_fit_the_checkout(checkout):
    tree, version = checkout
    if version not in PATCHES:
        pytest.skip(f"there is no patch for {version}")
    for name in PATCHES[version]:
        git_apply(tree, name, "--check")


@pytest.mark.slow
def test_the_patch_for_upstream_passes_its_own_tests(checkout, tmp_path):
    """The patch is applied to a copy of main. Without its code, the tests that it adds fail."""
    tree, version = checkout
    if version != "0.20.0":
        pytest.skip(f"the patch is for main (0.20.0), the checkout is {version}")
    if importlib.util.find_spec("triton") is None:
        pytest.skip("Megatron main imports triton, which is not installed")
    last = {}
    for part in ("*", "tests/*"):
        copy = tmp_path / str(len(last))
        shutil.copytree(tree / "megatron", copy / "megatron", ignore=shutil.ignore_patterns("__pycache__"))
        git_apply(copy, "layernorm-by-depth-main", f"--include={part}")
        words = ["-p", "no:cacheprovider", "-p", "support.megatron_unit", "--noconftest", "-c", os.devnull]
        words += ["-W", "ignore", f"--rootdir={copy}", "tests/unit_tests"]
        variables = {"PYTHONPATH": path_of(copy), "OLMO_LNS_DISABLE": "1", "TORCHDYNAMO_DISABLE": "1"}
        last[part] = run(copy, sys.executable, "-m", "pytest", "-q", *words, codes=(0, 1), **variables).splitlines()[-1]
    assert last["*"].startswith("10 passed, 6 skipped"), last  # Transformer Engine's are skipped
    assert last["tests/*"].startswith("10 failed, 6 skipped"), last
