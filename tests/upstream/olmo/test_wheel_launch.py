"""A user's launch after ``pip install olmo-lns``: installed from a wheel, started by torchrun."""

from __future__ import annotations

import json
import math
import sysconfig
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support import launch

pytest.importorskip("olmo", reason="needs pip install 'olmo-lns[olmo]'")

pytestmark = pytest.mark.slow

#: What a script can see of the plugin, without training anything.
PROBE = """
import sys
from olmo.config import LayerNormType
import olmo, olmo_lns
print("types:", " ".join(str(m) for m in LayerNormType))
print("from:", olmo.__file__, olmo_lns.__file__)
print("arguments:", sys.argv)
"""


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """A fresh environment with the wheel in it."""
    folder = tmp_path_factory.mktemp("installed")
    python = launch.fresh_venv(folder / "venv")
    launch.pip_install(python, wheel)
    return SimpleNamespace(folder=folder, wheel=wheel, python=python)


def train(installed: Any, name: str, *arguments: str, disable: str | None = None) -> Any:
    """What is printed, the folder of the run, and what its two ranks saw."""
    config = launch.write_config(installed.folder / name)
    command = [launch.PROGRAMS / "launch.py", config, *arguments]
    env = launch.environment(OLMO_LNS_DISABLE=disable)
    result = launch.torchrun(installed.python, 2, *command, cwd=installed.folder, env=env).ok()
    folder = installed.folder / name / "run"
    return result, folder, json.loads((folder / "result.json").read_text())


@pytest.fixture(scope="module")
def on(installed: Any) -> Any:
    """LNS on, by one word on the command line."""
    return train(installed, "on", "--model.layer_norm_type=lns_rms")


def test_lns_on(on, installed):
    result, folder, saw = on
    assert saw["plugin"].startswith(str(launch.site_packages(installed.python))), "not the wheel's plugin"
    expected = {
        f"transformer.blocks.{i}.{norm}": 1 / math.sqrt(i + 1) for i in range(4) for norm in ("attn_norm", "ff_norm")
    }
    assert saw["scales"] == pytest.approx(expected, rel=1e-12)
    assert "layer_norm_type: lns_rms" in (folder / "config.yaml").read_text()
    # Once for the launch, not once for each rank: OLMo's console logs rank 0 only.
    assert result.text.count("LayerNorm Scaling on: 8 norms (lns_rms)") == 1


def test_off_is_olmo_alone(installed, on):
    """The plugin is there and not selected: OLMo without it, to the last bit, over a whole short training."""
    kind = "--model.layer_norm_type=rms"
    stock, alone, without = train(installed, "stock", kind, disable="1")
    registered, beside, saw = train(installed, "off", kind)
    assert without["plugin"] is None and saw["plugin"] is not None and saw["scales"] == {}
    assert registered.losses() == stock.losses() and len(stock.losses()) == 4
    assert stock.losses() != on[0].losses(), "LNS on and off gave one result"
    before, after = (tensors(torch.load(folder / "state.pt")) for folder in (alone, beside))
    different = [key for key, value in before.items() if not torch.equal(value, after[key])]
    assert len(before) > 120 and before.keys() == after.keys() and not different, different


def tensors(state: Any, prefix: str = "") -> dict[str, torch.Tensor]:
    """Every number and tensor of a nested state, by its place."""
    if isinstance(state, dict | list):
        items = state.items() if isinstance(state, dict) else enumerate(state)
        return {key: value for name, part in items for key, value in tensors(part, f"{prefix}/{name}").items()}
    return {prefix: torch.as_tensor(state)} if isinstance(state, int | float | torch.Tensor) else {}


def script(folder: Path) -> Path:
    path = folder / "probe.py"
    path.write_text(PROBE)
    return path


def has_types(result: launch.Result) -> bool:
    line = next((line for line in result.ok().text.splitlines() if line.startswith("types:")), "")
    return " lns lns_rms lns_default lns_low_precision postln " in line


@pytest.mark.parametrize(("flags", "hook"), [([], True), (["-I"], True), (["-S"], False)])
def test_hook_and_launcher_module(installed, flags, hook):
    """``-S`` is an interpreter without ``site``, hence without hook; the launcher module works everywhere."""
    env = launch.environment(PYTHONPATH=f"{launch.site_packages(installed.python)}:{sysconfig.get_paths()['purelib']}")
    command, path = [installed.python, *flags], script(installed.folder)
    code = "from olmo_lns.integrations.autoload import autoload_active; print(autoload_active())"
    assert launch.run([*command, "-c", code], cwd=installed.folder, env=env).ok().last_line() == str(hook)
    result = launch.run([*command, "-m", "olmo_lns", path, "--a=b"], cwd=installed.folder, env=env)
    assert has_types(result) and f"arguments: ['{path}', '--a=b']" in result.text
