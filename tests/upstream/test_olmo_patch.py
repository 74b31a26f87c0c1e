"""The patches in patches/olmo apply to real trees, load the plugin once, with and without the hook, and revert."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PATCHES = {path.stem.removeprefix("load-plugins-"): path for path in (Path(__file__).parents[2] / "patches" / "olmo").glob("*.patch")}  # fmt: skip
PROBE = (
    "import olmo, olmo.model; from olmo.config import LayerNormType; "
    "f = olmo.model.OLMo.__init__; depth = 0\n"
    "while hasattr(f, '__wrapped__'): f, depth = f.__wrapped__, depth + 1\n"
    "print([str(m) for m in LayerNormType].count('lns'), depth, olmo.__file__)"
)
#: Without the hook's finder, only the patch can load the plugin.
NO_HOOK = "import sys; sys.meta_path[:] = [f for f in sys.meta_path if not hasattr(f, 'olmo_lns_start_up')]; "


def probe(tree, before=""):
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (str(tree), os.environ.get("PYTHONPATH"))))}
    done = subprocess.run([sys.executable, "-c", before + PROBE], capture_output=True, text=True, env=env)
    return done.stdout.strip() or done.stderr.strip().splitlines()[-1]


def apply(patch, tree, *flags):
    subprocess.run(["git", "apply", *flags, str(patch)], cwd=tree, check=True, capture_output=True)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["installed", "checkout"])
def test_the_patch_loads_the_plugin_once_with_and_without_the_hook_and_reverts(tmp_path, kind):
    """The tree is a copy of the installed ai2-olmo or of the checkout in ``OLMO_SRC``."""
    if kind == "checkout" and not os.environ.get("OLMO_SRC"):
        pytest.skip("OLMO_SRC does not point at an OLMo checkout")
    import olmo

    source = Path(os.environ["OLMO_SRC"] if kind == "checkout" else Path(olmo.__file__).parents[1])
    for name in ("olmo", "olmo_data"):
        shutil.copytree(source / name, tmp_path / name, ignore=shutil.ignore_patterns("hf_datasets", "oe_eval_tasks"))
    strategies = (source / "olmo" / "config.py").read_text().split("class DistributedStrategy")[1][:400]
    patch = PATCHES["main" if "single" in strategies else "v0.6.0"]
    apply(patch, tmp_path)
    for before in (NO_HOOK, ""):
        assert probe(tmp_path, before) == f"1 1 {tmp_path}/olmo/__init__.py"
    apply(patch, tmp_path, "-R")
    assert (tmp_path / "olmo/__init__.py").read_bytes() == (source / "olmo/__init__.py").read_bytes()
