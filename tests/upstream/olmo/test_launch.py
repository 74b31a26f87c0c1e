"""Launches after the wheel was installed with pip: a user's own script, and OLMo's ``scripts/train.py``.

OLMo's script comes from the checkout in ``OLMO_SRC``. On CPU it must be of the main branch, since v0.6.0 needs CUDA.
It trains, resumes, and refuses a checkpoint of another scheme.
"""

import json
import math
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support import launch

pytestmark = pytest.mark.slow
pytest.importorskip("olmo", reason="needs pip install 'olmo-lns[olmo]'")

STEPS, SAVED = 30, (0, 10, 20, 30)
ON = "--model.layer_norm_type=lns"
#: Prints the types that a script sees; trains nothing.
PROBE = """
import sys
from olmo.config import LayerNormType
print("types:", " ".join(str(m) for m in LayerNormType), sys.argv)
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel of this repository, built once."""
    return launch.build_wheel(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """A fresh environment with the wheel in it."""
    folder = tmp_path_factory.mktemp("installed")
    python = launch.fresh_venv(folder / "venv")
    launch.pip_install(python, wheel)
    return SimpleNamespace(folder=folder, python=python)


def train_own(installed, name, *arguments, disable=None):
    """Train with the user's script; return its output, the folder of the run and the result of rank 0."""
    config = launch.write_config(installed.folder / name)
    command = [launch.PROGRAMS / "launch.py", config, *arguments]
    env = launch.environment(OLMO_LNS_DISABLE=disable)
    result = launch.torchrun(installed.python, 2, *command, cwd=installed.folder, env=env).ok()
    folder = installed.folder / name / "run"
    return result, folder, json.loads((folder / "result.json").read_text())


@pytest.fixture(scope="module")
def on(installed):
    """A run with LNS, switched on by one flag."""
    return train_own(installed, "on", "--model.layer_norm_type=lns_rms")


def test_one_flag_scales_every_norm_of_the_blocks(on, installed):
    result, folder, saw = on
    assert saw["plugin"].startswith(str(launch.site_packages(installed.python))), "not the wheel's plugin"
    expected = {
        f"transformer.blocks.{i}.{norm}": 1 / math.sqrt(i + 1) for i in range(4) for norm in ("attn_norm", "ff_norm")
    }
    assert saw["scales"] == pytest.approx(expected, rel=1e-12)
    assert "layer_norm_type: lns_rms" in (folder / "config.yaml").read_text()
    # Once for the launch, not once for each rank: OLMo's console logs rank 0 only.
    assert result.text.count("LayerNorm Scaling on: 8 norms (lns_rms)") == 1


def test_without_a_scheme_the_plugin_leaves_a_training_as_it_is_to_the_last_bit(installed, on):
    """The plugin is installed, and no scheme is selected; the run beside it has the plugin disabled."""
    kind = "--model.layer_norm_type=rms"
    stock, alone, without = train_own(installed, "stock", kind, disable="1")
    registered, beside, saw = train_own(installed, "off", kind)
    assert without["plugin"] is None and saw["plugin"] is not None and saw["scales"] == {}
    assert registered.losses() == stock.losses() and len(stock.losses()) == 4
    assert stock.losses() != on[0].losses(), "LNS on and off gave the same losses"
    before, after = (tensors(torch.load(folder / "state.pt")) for folder in (alone, beside))
    different = [key for key, value in before.items() if not torch.equal(value, after[key])]
    assert len(before) > 120 and before.keys() == after.keys() and not different, different


def tensors(state, prefix=""):
    """Return every number and tensor of a nested state, by its path."""
    if isinstance(state, dict | list):
        items = state.items() if isinstance(state, dict) else enumerate(state)
        return {key: value for name, part in items for key, value in tensors(part, f"{prefix}/{name}").items()}
    return {prefix: torch.as_tensor(state)} if isinstance(state, int | float | torch.Tensor) else {}


@pytest.mark.parametrize(("flags", "hook"), [([], True), (["-I"], True), (["-S"], False)])
def test_the_hook_works_where_site_runs_and_the_launcher_module_everywhere(installed, flags, hook):
    """``-S`` starts an interpreter without ``site``, and therefore without the hook."""
    (path := installed.folder / "probe.py").write_text(PROBE)
    folders = [str(launch.site_packages(installed.python)), *(p for p in sys.path if p.endswith("site-packages"))]
    env = launch.environment(PYTHONPATH=os.pathsep.join(folders))
    command = [installed.python, *flags]
    code = "from olmo_lns.hook import autoload_active; print(autoload_active())"
    assert launch.run([*command, "-c", code], cwd=installed.folder, env=env).ok().last_line() == str(hook)
    line = launch.run([*command, "-m", "olmo_lns", path, "--a=b"], cwd=installed.folder, env=env).ok().last_line()
    assert " lns lns_rms lns_default lns_low_precision postln " in line and line.endswith(f"['{path}', '--a=b']")


@pytest.fixture(scope="module")
def checkout(wheel, tmp_path_factory):
    """A fresh environment with the wheel, where ``olmo`` is the checkout of ``OLMO_SRC``."""
    if not (value := os.environ.get(launch.OLMO_SRC)):
        pytest.skip(f"{launch.OLMO_SRC} is not set: needs an OLMo checkout")
    source, folder = Path(value).resolve(), tmp_path_factory.mktemp("checkout")
    python = launch.fresh_venv(folder / "venv", packages=[str(source)])
    launch.pip_install(python, wheel)
    return SimpleNamespace(folder=folder, python=python, script=source / "scripts" / "train.py")


@pytest.fixture(scope="module")
def olmo(checkout):
    """A checkout whose script runs on CPU."""
    if "SingleAccelerator" not in checkout.script.read_text():
        pytest.skip(f"{checkout.script} needs CUDA; on CPU only the main branch's runs")
    return checkout


def config(olmo, name, **changes):
    """Write a config for OLMo's script: RMSNorm, a local tokenizer, every checkpoint kept."""
    (folder := olmo.folder / name).mkdir()
    values = {
        **{"max_duration": STEPS, "stop_at": STEPS, "save_interval_unsharded": 10, "model.layer_norm_type": "rms"},
        **{"tokenizer.identifier": str(launch.write_tokenizer(folder)), "wandb": None},
        **{"save_num_unsharded_checkpoints_to_keep": -1},
    }
    return launch.write_config(folder, **{**values, **changes})


def variables(**more):
    """The variables that torchrun or Slurm sets for a run of one process. Port 0 stands for any free port."""
    ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "FS_LOCAL_RANK": "0"}
    return launch.environment(MASTER_ADDR="127.0.0.1", MASTER_PORT="0", **ranks, **more)


def train(olmo, path, *arguments, **more):
    return launch.run([olmo.python, olmo.script, path, *arguments], cwd=olmo.folder, env=variables(**more))


def saved(folder, step):
    return folder / "run" / f"step{step}-unsharded"


def assert_same_end(folder, reference):
    found, expected = (torch.load(saved(of, STEPS) / "model.pt", weights_only=True) for of in (folder, reference))
    assert found.keys() == expected.keys()
    different = [name for name in expected if not torch.equal(found[name], expected[name])]
    assert not different, f"other weights after {STEPS} steps: {different}"


@pytest.fixture(scope="module")
def uninterrupted(olmo):
    """A run of 30 steps under torchrun, with LNS by one flag."""
    path = config(olmo, "uninterrupted")
    result = launch.torchrun(olmo.python, 1, olmo.script, path, ON, cwd=olmo.folder).ok()
    return SimpleNamespace(result=result, losses=result.losses(), folder=path.parent)


def test_every_checkpoint_names_its_type_and_resumes_only_under_it(olmo, uninterrupted):
    """tests/integrations/olmo/test_state.py checks every difference and its message."""
    assert len(uninterrupted.losses) == STEPS and uninterrupted.losses[-1] < uninterrupted.losses[0] - 0.3
    assert uninterrupted.result.text.count("LayerNorm Scaling on: 8 norms (lns_rms)") == 1
    folders = [saved(uninterrupted.folder, step) for step in SAVED]
    assert sorted(folders) == sorted((uninterrupted.folder / "run").glob("step*"))
    assert all("layer_norm_type: lns_rms" in (path / "config.yaml").read_text() for path in folders)

    path = config(olmo, "resumed", load_path=str(saved(uninterrupted.folder, 20)))
    refused = train(olmo, path)
    assert refused.code != 0 and not refused.losses() and not list((path.parent / "run").glob("step*"))
    assert ON in refused.text and "CheckpointMismatchError" in refused.text
    assert train(olmo, path, ON).ok().losses() == uninterrupted.losses[20:]
    assert_same_end(path.parent, uninterrupted.folder)
