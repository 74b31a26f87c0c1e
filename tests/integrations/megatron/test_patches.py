"""The patches apply. Those that load the plugin do what the hook does, and change nothing where it runs too."""

import inspect
import json
import runpy
import shutil
from pathlib import Path

import pytest
from support import forked, launch, megatron_launch
from support import megatron_tiny as tiny

FOLDER = launch.REPOSITORY / "patches" / "megatron"
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
sys.path.insert(0, sys.argv[2])
if sys.argv[1] == "alone":
    sys.meta_path[:] = [f for f in sys.meta_path if not hasattr(f, "olmo_lns_finder")]
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


def git_apply(tree, name, word):
    command = ["git", "apply", word, FOLDER / f"{name}.patch"]
    launch.run(command, cwd=tree, env=launch.environment(GIT_CEILING_DIRECTORIES=str(tree.parent))).ok()


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["alone", "with the hook"])
def test_the_patch_loads_the_plugin_once(mode, tmp_path):
    """In a copy of the installed megatron-core 0.16.1."""
    import megatron.core

    if megatron.core.__version__ != "0.16.1":
        pytest.skip(f"the patch is for 0.16.1, installed is {megatron.core.__version__}")
    source = Path(inspect.getfile(megatron.core)).parent
    shutil.copytree(source, tmp_path / "megatron" / "core", ignore=shutil.ignore_patterns("__pycache__"))
    git_apply(tmp_path, *PATCHES["0.16.1"], "--include=megatron/core/*")
    losses = [float(tiny.loss_of(tiny.build(cfg), tiny.batch()).detach()) for cfg in (tiny.under(), tiny.config())]
    done = forked.run(PROGRAM, mode, tmp_path, path=launch.REPOSITORY / "tests")
    assert done.returncode == 0, done.stderr[-2000:]
    file, wraps, *found = json.loads(done.stdout.partition("FOUND ")[2])
    assert file.startswith(str(tmp_path)) and wraps == 1
    assert found == pytest.approx(losses, rel=1e-6) and losses[0] != pytest.approx(losses[1], rel=1e-4)
    assert done.stdout.count("LayerNorm Scaling on: 8 norms") == 1


def test_the_patches_fit_the_checkout():
    tree = megatron_launch.checkout()
    scope = runpy.run_path(str(tree / "megatron/core/package_info.py"))
    version = f"{scope['MAJOR']}.{scope['MINOR']}.{scope['PATCH']}"
    if version not in PATCHES:
        pytest.skip(f"there is no patch for {version}")
    for name in PATCHES[version]:
        git_apply(tree, name, "--check")
