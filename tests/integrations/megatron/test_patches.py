"""The in-tree patches: they apply, they train like the plugin, and with the plugin LNS is applied once."""

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

#: Builds the model of a patched Megatron, with the plugin registered too, and prints loss and gradients.
PROGRAM = """
import json, sys
from support.megatron_cpu import single_process
from support import megatron_tiny as tiny
import olmo_lns.integrations.megatron as plugin
if sys.argv[1] == "plugin":
    plugin.register()
with single_process():
    import megatron.core.transformer.transformer_layer as layer
    cfg = tiny.config(layernorm_scaling=True)
    model = tiny.build(cfg)
    loss, grads = tiny.gradients(model, tiny.batch())
    refused = []
    for target in (cfg, model):
        try:
            plugin.apply(target)
        except Exception as error:
            refused.append(str(error))
    off = tiny.build(tiny.config())
    print("FOUND " + json.dumps({
        "file": layer.__file__,
        "loss": loss,
        "off": tiny.gradients(off, tiny.batch())[0],
        "norms": {name: float(g.double().norm()) for name, g in grads.items()},
        "refused": refused,
        "std": float(model.decoder.layers[0].mlp.linear_fc2.weight.std()),
    }))
"""


def git_apply(tree: Path, patch: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["git", "apply", *words, str(patch)],
        cwd=tree,
        env=os.environ | {"GIT_CEILING_DIRECTORIES": str(tree.parent)},
        capture_output=True,
        text=True,
    )


def test_there_is_a_patch_for_each_promised_version() -> None:
    assert [p.stem.removeprefix("layernorm-scaling-") for p in PATCHES] == ["core_v0.16.1", "core_v0.19.0", "main"]


@pytest.mark.parametrize("patch", PATCHES, ids=lambda p: p.stem)
def test_headers(patch: Path) -> None:
    head = patch.read_text().partition("diff --git")[0]
    assert all(word in head for word in ("Made for:  NVIDIA/Megatron-LM ", "Apply:", "Revert:", "License:"))
    assert patch.name in head


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


def run(tree: Path, mode: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM, mode],
        env=os.environ | {"PYTHONPATH": f"{tree}:{ROOT / 'tests'}", "OMP_NUM_THREADS": "1", "OLMO_LNS_DISABLE": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("FOUND ")]
    assert lines, done.stderr[-2000:]
    found: dict[str, Any] = json.loads(lines[0].removeprefix("FOUND ")) | {"out": done.stdout}
    assert found["file"].startswith(str(tree))
    return found


def test_the_patch_alone_and_with_the_plugin_give_the_losses_of_the_plugin(patched: Path) -> None:
    cfg = tiny.config()
    apply(cfg)
    loss, grads = tiny.gradients(tiny.build(cfg), tiny.batch())
    off = tiny.gradients(tiny.build(tiny.config()), tiny.batch())[0]
    for mode in ("alone", "plugin"):
        found = run(patched, mode)
        assert found["loss"] == pytest.approx(loss, rel=1e-6)
        assert found["off"] == off
        assert found["norms"] == pytest.approx({k: float(g.double().norm()) for k, g in grads.items()}, rel=1e-4)
        assert found["std"] == pytest.approx(0.02, rel=0.1)
        assert len(found["refused"]) == 2 and all("in its own source" in text for text in found["refused"])
        assert ("leaves it to it" in found["out"]) is (mode == "plugin")


def test_a_patch_fits_the_checkout() -> None:
    if not (tree := os.environ.get("MEGATRON_LM_SRC")):
        pytest.skip("MEGATRON_LM_SRC names no Megatron-LM checkout")
    fitting = [p.stem for p in PATCHES if git_apply(Path(tree), p, "--check").returncode == 0]
    scope: dict[str, Any] = {"__file__": "package_info.py"}
    exec((Path(tree) / "megatron/core/package_info.py").read_text(), scope)
    version = f"{scope['MAJOR']}.{scope['MINOR']}.{scope['PATCH']}"
    if not any(version.startswith(known) for known in ("0.16.1", "0.19", "0.20")):
        pytest.skip(f"there is no patch for {version}")
    assert len(fitting) == 1, f"{version}: {fitting}"
