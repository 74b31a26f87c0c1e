"""The patches. Those that load the plugin: they apply, alone they do what the hook does, beside it nothing more.

The one for upstream has the method itself, with a test in upstream's style, and knows nothing of this package.
"""

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
LOADERS = {version: FOLDER / f"load-plugins-{version}.patch" for version in ("core_v0.16.1", "core_v0.19.0", "main")}
UPSTREAM = FOLDER / "layernorm-by-depth-main.patch"

#: Builds a model with and one without LNS, in a Megatron that the patch alone ("alone") or also the hook extended.
PROGRAM = """
import json, sys
if sys.argv[1] == "alone":
    sys.meta_path[:] = [f for f in sys.meta_path if not hasattr(f, "olmo_lns_start_up")]
import megatron.core.transformer.transformer_layer as layer
from support.megatron_cpu import single_process
from support import megatron_tiny as tiny
wraps, function = 0, layer.TransformerLayer.__init__
while hasattr(function, "__wrapped__"):
    wraps, function = wraps + 1, function.__wrapped__
with single_process():
    losses = [float(tiny.loss_of(tiny.build(cfg), tiny.batch()).detach()) for cfg in (tiny.under(), tiny.config())]
print("FOUND " + json.dumps([layer.__file__, wraps, *losses]))
"""


def git_apply(tree, patch, *words):
    return subprocess.run(
        ["git", "apply", *words, str(patch)],
        cwd=tree,
        env=os.environ | {"GIT_CEILING_DIRECTORIES": str(tree.parent)},
        capture_output=True,
        text=True,
    )


def python(tree, *words, **variables):
    """Python in ``tree``, with this repository behind it."""
    variables |= {"PYTHONPATH": f"{tree}:{ROOT}:{ROOT / 'tests'}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", *words]
    return subprocess.run(command, cwd=tree, env=os.environ | variables, capture_output=True, text=True, timeout=600)


@pytest.mark.parametrize("patch", sorted(FOLDER.glob("*.patch")), ids=lambda p: p.stem)
def test_headers_and_one_implementation_of_the_method(patch):
    head, _, body = patch.read_text().partition("diff --git")
    assert all(word in head for word in ("Made for:  NVIDIA/Megatron-LM ", "Apply:", "Revert:", "License:"))
    assert patch.name in head and patch in (*LOADERS.values(), UPSTREAM)
    if patch != UPSTREAM:
        assert "layernorm" not in body.lower() and body.count("+++ b/") == 3


@pytest.fixture(scope="module")
def patched(tmp_path_factory):
    """A copy of the installed megatron-core 0.16.1 with its patch."""
    import megatron.core

    if megatron.core.__version__ != "0.16.1":
        pytest.skip(f"the patch is for 0.16.1, installed is {megatron.core.__version__}")
    tree = tmp_path_factory.mktemp("patched")
    source = Path(inspect.getfile(megatron.core)).parent
    shutil.copytree(source, tree / "megatron" / "core", ignore=shutil.ignore_patterns("__pycache__"))
    done = git_apply(tree, LOADERS["core_v0.16.1"], "--include=megatron/core/*")
    assert done.returncode == 0, done.stderr
    return tree


@pytest.mark.slow
@pytest.mark.parametrize("mode", [pytest.param("alone", marks=pytest.mark.exhaustive), "with the hook"])
def test_the_patch_loads_the_plugin_once(patched, mode):
    losses = [float(tiny.loss_of(tiny.build(cfg), tiny.batch()).detach()) for cfg in (tiny.under(), tiny.config())]
    done = python(patched, "-c", PROGRAM, mode)
    assert done.returncode == 0, done.stderr[-2000:]
    file, wraps, *found = json.loads(done.stdout.partition("FOUND ")[2])
    assert file.startswith(str(patched)) and wraps == 1
    assert found == pytest.approx(losses, rel=1e-6) and losses[0] != pytest.approx(losses[1], rel=1e-4)
    assert done.stdout.count("LayerNorm Scaling on: 8 norms") == 1


def checkout():
    """The tree that MEGATRON_LM_SRC names, and its version."""
    tree = megatron_launch.checkout()
    scope = runpy.run_path(str(tree / "megatron/core/package_info.py"))
    return tree, f"{scope['MAJOR']}.{scope['MINOR']}.{scope['PATCH']}"


def test_a_patch_fits_the_checkout():
    tree, version = checkout()
    names = {"0.16.1": "core_v0.16.1", "0.19.0": "core_v0.19.0", "0.19.1": "core_v0.19.0", "0.20.0": "main"}
    if version not in names:
        pytest.skip(f"there is no patch for {version}")
    done = git_apply(tree, LOADERS[names[version]], "--check")
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_the_patch_for_upstream_passes_its_own_tests(tmp_path):
    """On a copy of main; without the patch's code, the tests that it brings fail."""
    tree, version = checkout()
    if version != "0.20.0":
        pytest.skip(f"the patch is for main (0.20.0), the checkout is {version}")
    if importlib.util.find_spec("triton") is None:
        pytest.skip("Megatron main imports triton, which is not installed")
    last = {}
    for part in ("*", "tests/*"):
        copy = tmp_path / str(len(last))
        shutil.copytree(tree / "megatron", copy / "megatron", ignore=shutil.ignore_patterns("__pycache__"))
        done = git_apply(copy, UPSTREAM, f"--include={part}")
        assert done.returncode == 0, done.stderr
        words = ["-p", "no:cacheprovider", "-p", "support.megatron_unit", "--noconftest", "-c", os.devnull]
        words += [f"--rootdir={copy}", "tests/unit_tests"]
        done = python(copy, "-m", "pytest", "-q", *words, OLMO_LNS_DISABLE="1", TORCHDYNAMO_DISABLE="1")
        last[part] = done.stdout.strip().splitlines()[-1]
    assert last["*"].startswith("10 passed, 6 skipped"), last  # those of Transformer Engine
    assert last["tests/*"].startswith("10 failed, 6 skipped"), last
