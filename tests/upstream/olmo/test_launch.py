"""Launches after the wheel was installed with pip: a user's own script, and OLMo's ``scripts/train.py``.

OLMo's script comes from the checkout in ``OLMO_SRC``. On CPU it must be of the main branch, since v0.6.0 needs CUDA.
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
from support.exports import byte_tokenizer

pytestmark = pytest.mark.slow
pytest.importorskip("olmo", reason="needs pip install 'olmo-lns[olmo]'")

STEPS = 30
ON = "--model.layer_norm_type=lns"


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A fresh environment with the wheel of this repository in it; ``olmo`` is the checkout where there is one."""
    folder, source = tmp_path_factory.mktemp("installed"), os.environ.get(launch.OLMO_SRC)
    python = launch.fresh_venv(folder / "venv", packages=[str(Path(source).resolve())] if source else [])
    launch.pip_install(python, launch.build_wheel(folder))
    return SimpleNamespace(folder=folder, python=python, script=Path(source or "", "scripts", "train.py").resolve())


def train_own(installed, *kinds, disable=None):
    """Train one run of each kind with the user's script, in one launch; return its output, and what each run wrote."""
    configs = {kind: launch.write_config(installed.folder / f"{kind}{disable or ''}") for kind in kinds}
    words = [word for kind, config in configs.items() for word in (config, f"--model.layer_norm_type={kind}")]
    env = launch.environment(OLMO_LNS_DISABLE=disable)
    result = launch.torchrun(installed.python, 2, launch.PROGRAMS / "launch.py", *words, cwd=installed.folder, env=env)
    wrote = [config.parent / "run" for config in configs.values()]
    return result.ok(), [
        SimpleNamespace(folder=each, **json.loads((each / "result.json").read_text())) for each in wrote
    ]


def test_one_flag_scales_every_norm_of_the_blocks_and_without_it_a_training_is_as_it_is_to_the_last_bit(installed):
    """The third run has the plugin disabled; the second has it, and no scheme is selected."""
    result, (on, off) = train_own(installed, "lns_rms", "rms")
    disabled, (stock,) = train_own(installed, "rms", disable="1")
    assert on.plugin.startswith(str(launch.site_packages(installed.python))), "not the wheel's plugin"
    norms = [(i, norm) for i in range(4) for norm in ("attn_norm", "ff_norm")]
    expected = {f"transformer.blocks.{i}.{norm}": 1 / math.sqrt(i + 1) for i, norm in norms}
    assert on.scales == pytest.approx(expected, rel=1e-12)
    assert "layer_norm_type: lns_rms" in (on.folder / "config.yaml").read_text()
    # Once for the launch, not once for each rank: OLMo's console logs rank 0 only.
    assert result.text.count("LayerNorm Scaling on: 8 norms (lns_rms)") == 1
    assert stock.plugin is None and off.plugin is not None and off.scales == {}
    losses = result.losses()
    assert losses[4:] == disabled.losses() != losses[:4] and len(losses) == 8
    before, after = (torch.load(run.folder / "state.pt") for run in (stock, off))
    different = [key for key, value in before.items() if not torch.equal(value, after[key])]
    assert len(before) > 100 and before.keys() == after.keys() and not different, different


def test_the_launcher_module_loads_the_plugin_where_the_hook_cannot_run(installed):
    """``-S`` starts an interpreter without ``site``, and therefore without the hook."""
    (path := installed.folder / "probe.py").write_text("import olmo.config, sys; print(*olmo.config.LayerNormType)")
    folders = [str(launch.site_packages(installed.python)), *(p for p in sys.path if p.endswith("site-packages"))]
    env = launch.environment(PYTHONPATH=os.pathsep.join(folders))
    for flags, registered in ([], False), (["-m", "olmo_lns"], True):
        done = launch.run([installed.python, "-S", *flags, path], cwd=installed.folder, env=env).ok()
        assert (" lns lns_rms " in done.last_line()) is registered


def train(installed, name, *arguments, **changes):
    """Run OLMo's script, with RMSNorm, a local tokenizer and every checkpoint kept; return its output and folder."""
    (folder := installed.folder / name).mkdir()
    values = {
        **{"max_duration": STEPS, "stop_at": STEPS, "save_interval_unsharded": 10, "model.layer_norm_type": "rms"},
        **{"tokenizer.identifier": str(byte_tokenizer(folder / "tokenizer.json", 256)), "wandb": None},
        **{"save_num_unsharded_checkpoints_to_keep": -1, **changes},
    }
    command = [installed.script, launch.write_config(folder, **values), *arguments]
    return launch.torchrun(installed.python, 1, *command, cwd=installed.folder), folder / "run"


def test_olmos_script_trains_under_one_flag_and_resumes_only_under_it(installed):
    """tests/integrations/olmo/test_state.py checks every difference and its message."""
    if not installed.script.is_file() or "SingleAccelerator" not in installed.script.read_text():
        pytest.skip(f"{launch.OLMO_SRC} names no checkout of OLMo's main branch; only its script runs on CPU")
    result, folder = train(installed, "uninterrupted", ON)
    losses = result.ok().losses()
    assert len(losses) == STEPS and losses[-1] < losses[0] - 0.3
    assert result.text.count("LayerNorm Scaling on: 8 norms (lns_rms)") == 1
    folders = [folder / f"step{step}-unsharded" for step in range(0, STEPS + 1, 10)]
    assert sorted(folders) == sorted(folder.glob("step*"))
    assert all("layer_norm_type: lns_rms" in (path / "config.yaml").read_text() for path in folders)

    refused, nothing = train(installed, "refused", load_path=str(folders[2]))
    assert refused.code != 0 and not refused.losses() and not list(nothing.glob("step*"))
    assert ON in refused.text and "CheckpointMismatchError" in refused.text
    result, again = train(installed, "resumed", ON, load_path=str(folders[2]))
    assert result.ok().losses() == losses[20:]
    one, other = (torch.load(of / folders[-1].name / "model.pt", weights_only=True) for of in (folder, again))
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
