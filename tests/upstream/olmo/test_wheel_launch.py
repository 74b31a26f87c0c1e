"""A user's launch after ``pip install olmo-lns``: installed from a wheel, started by torchrun."""

from __future__ import annotations

import functools
import json
import math
import sysconfig
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Callable

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


def train(installed: Any, name: str, ranks: int, *arguments: str, env: Any = None, **changes: Any) -> Any:
    config = launch.write_config(installed.folder / name, **changes)
    result = launch.torchrun(
        installed.python, ranks, launch.PROGRAMS / "launch.py", config, *arguments, cwd=installed.folder, env=env
    )
    return result, installed.folder / name / "run"


def seen(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "result.json").read_text())


@pytest.fixture(scope="module")
def on(installed: Any) -> Callable[[int], Any]:
    """LNS on, by one word on the command line, with as many ranks."""

    @functools.cache
    def launched(ranks: int) -> Any:
        changes = {"model.layer_norm_type": "rms"}
        result, folder = train(installed, f"on{ranks}", ranks, "--model.layer_norm_type=lns", **changes)
        return result.ok(), folder, seen(folder)

    return launched


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.exhaustive)])
def test_lns_on(on, installed, ranks):
    result, folder, saw = on(ranks)
    assert saw["plugin"].startswith(str(launch.site_packages(installed.python))), "not the wheel's plugin"
    expected = {
        f"transformer.blocks.{i}.{norm}": 1 / math.sqrt(i + 1) for i in range(4) for norm in ("attn_norm", "ff_norm")
    }
    assert saw["scales"] == pytest.approx(expected, rel=1e-12)
    assert saw["type"] == "lns_rms"
    assert "layer_norm_type: lns_rms" in (folder / "config.yaml").read_text()
    # Once for the launch, not once for each rank: OLMo's console logs rank 0 only.
    assert result.text.count("LayerNorm Scaling on: 8 norms (lns_rms)") == 1


@pytest.mark.exhaustive
def test_two_ranks_have_the_loss_of_one(on):
    one, two = (on(ranks)[2]["losses"] for ranks in (1, 2))
    assert len(one) == 4 and one[0] != one[1]
    # Only the order of the sums over the batch differs.
    assert two == pytest.approx(one, rel=2e-6)


def test_off_is_olmo_alone(installed, on):
    """The plugin is there and not selected: OLMo without it, to the last bit, over a whole short training."""
    (_, stock), (_, registered) = (
        train(installed, name, 1, env=launch.environment(OLMO_LNS_DISABLE=disable), **{"model.layer_norm_type": "rms"})
        for name, disable in (("stock", "1"), ("off", None))
    )
    assert seen(stock)["plugin"] is None and seen(registered)["plugin"] is not None
    assert seen(registered)["losses"] == seen(stock)["losses"]
    assert seen(registered)["scales"] == {}
    assert seen(registered)["losses"] != on(1)[2]["losses"], "LNS on and off gave one result"
    before, after = (torch.load(folder / "state.pt", weights_only=True) for folder in (stock, registered))
    for part in ("logits", "gradients", "parameters", "optimizer"):
        assert list(before[part]) == list(after[part]), part
        different = [name for name in before[part] if not torch.equal(before[part][name], after[part][name])]
        assert not different, (part, different)


#: A spawned DataLoader worker that gets a config with an lns type.
WORKERS = """
import pickle
from torch.utils.data import DataLoader, Dataset

class Configs(Dataset):
    def __init__(self, config):
        self.config = config
    def __len__(self):
        return 1
    def __getitem__(self, index):
        kind = self.config.layer_norm_type
        return f"{kind!s} {kind is type(kind)['lns_rms']} {kind is type(kind)(str(kind))}"

if __name__ == "__main__":
    from olmo.config import LayerNormType, ModelConfig
    assert pickle.loads(pickle.dumps(LayerNormType.lns_rms)) is LayerNormType.lns_rms
    config = ModelConfig(layer_norm_type=LayerNormType.lns_rms)
    print("worker:", *DataLoader(Configs(config), batch_size=None, num_workers=1, multiprocessing_context="spawn"))
"""


@pytest.mark.exhaustive
def test_spawned_workers_have_the_types(installed):
    (installed.folder / "workers.py").write_text(WORKERS)
    result = launch.run([installed.python, "workers.py"], cwd=installed.folder).ok()
    assert "worker: lns_rms True True" in result.text


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


@pytest.mark.exhaustive
def test_target_folder(installed, tmp_path):
    """``pip install --target``: no hook there; doctor says so, and the launcher module works."""
    python = launch.fresh_venv(tmp_path / "venv")
    launch.pip_install(python, "--target", tmp_path / "target", installed.wheel)
    env = launch.environment(PYTHONPATH=str(tmp_path / "target"))
    path = script(tmp_path)
    assert not has_types(launch.run([python, path], cwd=tmp_path, env=env))
    assert has_types(launch.run([python, "-m", "olmo_lns", path], cwd=tmp_path, env=env))
    doctor = launch.run([python, "-m", "olmo_lns", "doctor"], cwd=tmp_path, env=env)
    line = next(line for line in doctor.text.splitlines() if "autoload" in line)
    assert " off " in line and "python -m olmo_lns <script>" in line, doctor.text


@pytest.mark.exhaustive
def test_editable_installs_of_both(tmp_path):
    """``pip install -e`` of this package and of OLMo, whose finder then competes with ours."""
    for name in ("hatchling", "editables"):
        pytest.importorskip(name, reason=f"{name} builds an editable wheel: pip install 'olmo-lns[dev]'")
    # OLMo's build backend; with a package_dir its editable install is a finder, not a path.
    setuptools = pytest.importorskip("setuptools")
    if int(setuptools.__version__.split(".")[0]) < 71:  # before, bdist_wheel was the wheel package's
        pytest.importorskip("wheel", reason=f"setuptools {setuptools.__version__} builds wheels with the package wheel")
    tree = tmp_path / "olmo-tree"
    launch.copy_of_olmo(tree / "python")
    (tree / "pyproject.toml").write_text(
        "[build-system]\nrequires=['setuptools']\nbuild-backend='setuptools.build_meta'\n"
        "[project]\nname='ai2-olmo'\nversion='0.6.0'\n"
        "[tool.setuptools]\npackages=['olmo', 'olmo_data']\n"
        "[tool.setuptools.package-dir]\nolmo='python/olmo'\nolmo_data='python/olmo_data'\n"
    )
    # Such a finder comes after the path: OLMo must not be found there first.
    python = launch.fresh_venv(tmp_path / "venv", hidden=["olmo", "ai2_olmo"])
    launch.pip_install(python, "-e", tree)
    launch.pip_install(python, "-e", launch.REPOSITORY)
    assert list(launch.site_packages(python).glob("__editable___ai2_olmo*_finder.py")), "not a finder install"
    result = launch.run([python, script(tmp_path)], cwd=tmp_path)
    assert has_types(result)
    assert f"from: {tree}/python/olmo/__init__.py {launch.REPOSITORY}/olmo_lns/__init__.py" in result.text


@pytest.mark.exhaustive
def test_torchrun_of_the_launcher_module(installed):
    """``torchrun -m olmo_lns script`` in an environment that opted out of the hook's file."""
    hook = launch.site_packages(installed.python) / "olmo_lns_autoload.pth"
    hidden = hook.rename(hook.with_suffix(".off"))
    try:
        config = launch.write_config(installed.folder / "module", **{"model.layer_norm_type": "default"})
        arguments = ["-m", "olmo_lns", launch.PROGRAMS / "launch.py", config, "--model.layer_norm_type=lns"]
        launch.torchrun(installed.python, 1, *arguments, cwd=installed.folder).ok()
    finally:
        hidden.rename(hook)
    assert seen(installed.folder / "module" / "run")["type"] == "lns_default"
