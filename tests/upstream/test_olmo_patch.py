"""patches/olmo on real trees: applies, loads the plugin once, and is harmless beside the start-up hook."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PATCHES = sorted((Path(__file__).parents[2] / "patches" / "olmo").glob("*.patch"))
PROBE = (
    "import olmo, olmo.model; from olmo.config import LayerNormType; "
    "f = olmo.model.OLMo.__init__; depth = 0\n"
    "while hasattr(f, '__wrapped__'): f, depth = f.__wrapped__, depth + 1\n"
    "print([str(m) for m in LayerNormType].count('lns'), depth, olmo.__file__)"
)


def probe(tree: Path, *flags: str, **environment: str) -> str:
    env = {**os.environ, "PYTHONPATH": str(tree), **environment}
    done = subprocess.run([sys.executable, *flags, "-c", PROBE], capture_output=True, text=True, env=env)
    return done.stdout.strip() or done.stderr.strip().splitlines()[-1]


def apply(patch: Path, tree: Path, *flags: str) -> None:
    subprocess.run(["git", "apply", *flags, str(patch)], cwd=tree, check=True, capture_output=True)


@pytest.fixture
def patched(tmp_path):
    """The installed ai2-olmo, copied and patched."""
    import olmo

    shutil.copytree(Path(olmo.__file__).parent, tmp_path / "olmo")
    (patch,) = [p for p in PATCHES if "v0.6.0" in p.name]
    apply(patch, tmp_path)
    return tmp_path


def test_both_upstreams_have_a_patch_with_a_header():
    assert [p.name for p in PATCHES] == ["load-plugins-main.patch", "load-plugins-v0.6.0.patch"]
    for patch in PATCHES:
        header = patch.read_text().split("diff --git")[0]
        assert all(word in header for word in ("Made for:", "Apply:", "Revert:"))


@pytest.mark.slow
def test_patch_alone_loads_the_plugin(patched):
    # With the hook's callbacks disabled, only the patch can have loaded it.
    code = "import sys; sys.meta_path[:] = [f for f in sys.meta_path if not hasattr(f, 'olmo_lns_start_up')]; " + PROBE
    env = {**os.environ, "PYTHONPATH": str(patched)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=True)
    assert done.stdout.strip() == f"1 1 {patched}/olmo/__init__.py"


@pytest.mark.slow
def test_patch_and_start_up_hook_together_register_once(patched):
    assert probe(patched) == f"1 1 {patched}/olmo/__init__.py"


def test_patch_reverts(patched):
    (patch,) = [p for p in PATCHES if "v0.6.0" in p.name]
    apply(patch, patched, "-R")
    import olmo

    assert (patched / "olmo/__init__.py").read_bytes() == Path(olmo.__file__).read_bytes()


@pytest.mark.skipif(not os.environ.get("OLMO_SRC"), reason="OLMO_SRC does not point at an OLMo checkout")
def test_patch_applies_to_the_checkout_and_loads_once(tmp_path):
    source = Path(os.environ["OLMO_SRC"])
    for name in ("olmo", "olmo_data"):
        shutil.copytree(source / name, tmp_path / name, ignore=shutil.ignore_patterns("hf_datasets", "oe_eval_tasks"))
    name = (
        "main"
        if "single" in (source / "olmo" / "config.py").read_text().split("class DistributedStrategy")[1][:400]
        else "v0.6.0"
    )
    (patch,) = [p for p in PATCHES if name in p.name]
    apply(patch, tmp_path, "--check")
    apply(patch, tmp_path)
    assert probe(tmp_path) == f"1 1 {tmp_path}/olmo/__init__.py"
