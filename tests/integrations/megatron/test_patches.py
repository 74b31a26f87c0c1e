"""The patches only load the plugin: they apply, alone they do what the hook does, beside it nothing more."""

from __future__ import annotations

import inspect
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support import megatron_tiny as tiny

from olmo_lns.integrations.megatron import apply

ROOT = Path(__file__).parents[3]
PATCHES = sorted((ROOT / "patches" / "megatron").glob("*.patch"))

#: Builds a model with and one without LNS, in a Megatron that the patch alone ("alone") or also the hook extended.
PROGRAM = """
import json, sys
if sys.argv[1] == "alone":
    sys.meta_path[:] = [f for f in sys.meta_path if not hasattr(f, "olmo_lns_start_up")]
import megatron.core.transformer.transformer_layer as layer
from support.megatron_cpu import single_process
from support import megatron_tiny as tiny
from olmo_lns.integrations.megatron import apply
wraps, function = 0, layer.TransformerLayer.__init__
while hasattr(function, "__wrapped__"):
    wraps, function = wraps + 1, function.__wrapped__
with single_process():
    cfg = tiny.config()
    apply(cfg)
    loss, grads = tiny.gradients(tiny.build(cfg), tiny.batch())
    off = tiny.gradients(tiny.build(tiny.config()), tiny.batch())[0]
print("FOUND " + json.dumps({
    "file": layer.__file__, "wraps": wraps, "loss": loss, "off": off,
    "norms": {name: float(g.double().norm()) for name, g in grads.items()},
}))
"""
DISABLED = "import megatron.core, sys; print('olmo_lns.integrations.megatron' in sys.modules)"


def git_apply(tree: Path, patch: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["git", "apply", *words, str(patch)],
        cwd=tree,
        env=os.environ | {"GIT_CEILING_DIRECTORIES": str(tree.parent)},
        capture_output=True,
        text=True,
    )


def test_there_is_a_patch_for_each_promised_version() -> None:
    assert [p.stem.removeprefix("load-plugins-") for p in PATCHES] == ["core_v0.16.1", "core_v0.19.0", "main"]


@pytest.mark.parametrize("patch", PATCHES, ids=lambda p: p.stem)
def test_headers(patch: Path) -> None:
    head = patch.read_text().partition("diff --git")[0]
    assert all(word in head for word in ("Made for:  NVIDIA/Megatron-LM ", "Apply:", "Revert:", "License:"))
    assert patch.name in head


@pytest.mark.parametrize("patch", PATCHES, ids=lambda p: p.stem)
def test_nothing_of_the_method_is_in_a_patch(patch: Path) -> None:
    """One implementation, with its guards."""
    body = patch.read_text().partition("diff --git")[2]
    assert "layernorm" not in body.lower() and body.count("+++ b/") == 3


@pytest.fixture(scope="module")
def patched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the installed megatron-core 0.16.1 with its patch."""
    import megatron.core

    if megatron.core.__version__ != "0.16.1":
        pytest.skip(f"the patch is for 0.16.1, installed is {megatron.core.__version__}")
    tree = tmp_path_factory.mktemp("patched")
    source = Path(inspect.getfile(megatron.core)).parent
    shutil.copytree(source, tree / "megatron" / "core", ignore=shutil.ignore_patterns("__pycache__"))
    done = git_apply(tree, PATCHES[0], "--include=megatron/core/*")
    assert done.returncode == 0, done.stderr
    return tree


def run(tree: Path, program: str, *words: str, **environment: str) -> str:
    variables = {"PYTHONPATH": f"{tree}:{ROOT / 'tests'}", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program, *words],
        env=os.environ | variables | environment, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("mode", [pytest.param("alone", marks=pytest.mark.exhaustive), "with the hook"])
def test_the_patch_loads_the_plugin_once(patched: Path, mode: str) -> None:
    cfg = tiny.config()
    apply(cfg)
    loss, grads = tiny.gradients(tiny.build(cfg), tiny.batch())
    out = run(patched, PROGRAM, mode)
    found: dict[str, Any] = json.loads(out.partition("FOUND ")[2])
    assert found["file"].startswith(str(patched)) and found["wraps"] == 1
    assert found["loss"] == pytest.approx(loss, rel=1e-6)
    assert found["off"] == tiny.gradients(tiny.build(tiny.config()), tiny.batch())[0]
    assert found["norms"] == pytest.approx({k: float(g.double().norm()) for k, g in grads.items()}, rel=1e-4)
    assert out.count("LayerNorm Scaling on: 8 norms") == 1


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_patched_megatron_without_the_plugin(patched: Path) -> None:
    assert run(patched, DISABLED, OLMO_LNS_DISABLE="1").strip() == "False"


def test_a_patch_fits_the_checkout() -> None:
    if not (tree := os.environ.get("MEGATRON_LM_SRC")):
        pytest.skip("MEGATRON_LM_SRC names no Megatron-LM checkout")
    scope: dict[str, Any] = {"__file__": "package_info.py"}
    exec((Path(tree) / "megatron/core/package_info.py").read_text(), scope)
    version = f"{scope['MAJOR']}.{scope['MINOR']}.{scope['PATCH']}"
    patch = {"0.16.1": PATCHES[0], "0.19.0": PATCHES[1], "0.19.1": PATCHES[1], "0.20.0": PATCHES[2]}.get(version)
    if patch is None:
        pytest.skip(f"there is no patch for {version}")
    done = git_apply(Path(tree), patch, "--check")
    assert done.returncode == 0, done.stderr
