"""Launches of the installed package: a user's own script, and OLMo's ``scripts/train.py``.

``scripts/release_check.sh`` installs the wheel into bare environments. OLMo's script comes from the checkout in ``OLMO_SRC``. On CPU it must be of the main branch, since v0.6.0 needs CUDA.
"""

import json
import math
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support import forked, launch
from support.exports import byte_tokenizer

pytestmark = pytest.mark.slow
pytest.importorskip("olmo", reason="needs pip install 'olmo-lns[olmo]'")

STEPS = 30
ON = "--model.layer_norm_type=lns"


SCRIPT = Path(os.environ.get(launch.OLMO_SRC, ""), "scripts", "train.py").resolve()


def environment(**changes):
    """With OLMo's checkout before the installed one, where there is one."""
    return launch.environment(PYTHONPATH=os.environ.get(launch.OLMO_SRC), **changes)


def train_own(folder, *kinds, disable=None):
    """Train one run of each kind with the user's script, in one launch; return its output, and what each run wrote."""
    configs = {kind: launch.write_config(folder / f"{kind}{disable or ''}") for kind in kinds}
    words = [word for kind, config in configs.items() for word in (config, f"--model.layer_norm_type={kind}")]
    words, env = [launch.PROGRAMS / "launch.py", *words], environment(OLMO_LNS_DISABLE=disable)
    if disable and not os.environ.get(launch.OLMO_SRC):  # as torchrun does, without another start of each interpreter
        done = forked.torchrun(2, *words, imports="olmo.train", cwd=folder, **env)
        result = launch.Result(done.returncode, done.stdout + done.stderr)
    else:
        result = launch.torchrun(2, *words, cwd=folder, env=env)
    wrote = [config.parent / "run" for config in configs.values()]
    return result.ok(), [
        SimpleNamespace(folder=each, **json.loads((each / "result.json").read_text())) for each in wrote
    ]


def test_one_flag_scales_every_norm_of_the_blocks_and_without_it_a_training_is_as_it_is_to_the_last_bit(tmp_path):
    """The third run has the plugin disabled; the second has it, and no scheme is selected."""
    result, (on, off) = train_own(tmp_path, "lns_rms", "rms")
    disabled, (stock,) = train_own(tmp_path, "rms", disable="1")
    norms = [(i, norm) for i in range(4) for norm in ("attn_norm", "ff_norm")]
    expected = {f"transformer.blocks.{i}.{norm}": 1 / math.sqrt(i + 1) for i, norm in norms}
    assert on.scales == pytest.approx(expected, rel=1e-12)
    assert "layer_norm_type: lns_rms" in (on.folder / "config.yaml").read_text()
    # Once for the launch, not once for each rank: OLMo's console logs rank 0 only.
    assert result.text.count("LayerNorm Scaling on: 8 norms (lns_rms)") == 1
    assert stock.plugin is None and on.plugin is not None and off.plugin is not None and off.scales == {}
    losses = result.losses()
    assert losses[4:] == disabled.losses() != losses[:4] and len(losses) == 8
    before, after = (torch.load(run.folder / "state.pt") for run in (stock, off))
    different = [key for key, value in before.items() if not torch.equal(value, after[key])]
    assert len(before) > 100 and before.keys() == after.keys() and not different, different


def test_the_launcher_module_loads_the_plugin_where_the_hook_cannot_run(tmp_path):
    """``-S`` starts an interpreter without ``site``, and therefore without the hook."""
    probes = {
        "finder": "import sys; print(any(hasattr(each, 'olmo_lns_finder') for each in sys.meta_path))",
        "registered": "import olmo.config; print(*olmo.config.LayerNormType)",
    }
    for name, text in probes.items():
        (tmp_path / f"{name}.py").write_text(text)
    folders = [str(launch.REPOSITORY), *(p for p in sys.path if p.endswith("site-packages"))]
    env = launch.environment(PYTHONPATH=os.pathsep.join(folders))
    bare = launch.run([sys.executable, "-S", tmp_path / "finder.py"], cwd=tmp_path, env=env)
    assert bare.ok().last_line() == "False"
    done = launch.run([sys.executable, "-S", "-m", "olmo_lns", tmp_path / "registered.py"], cwd=tmp_path, env=env)
    assert " lns lns_rms " in done.ok().last_line()


def train(root, name, *arguments, **changes):
    """Run OLMo's script, with RMSNorm, a local tokenizer and every checkpoint kept; return its output and folder."""
    (folder := root / name).mkdir()
    values = {
        **{"max_duration": STEPS, "stop_at": STEPS, "save_interval_unsharded": 10, "model.layer_norm_type": "rms"},
        **{"tokenizer.identifier": str(byte_tokenizer(folder / "tokenizer.json", 256)), "wandb": None},
        **{"save_num_unsharded_checkpoints_to_keep": -1, **changes},
    }
    command = [SCRIPT, launch.write_config(folder, **values), *arguments]
    return launch.torchrun(1, *command, cwd=root, env=environment()), folder / "run"


def test_olmos_script_trains_under_one_flag_and_resumes_only_under_it(tmp_path):
    """tests/integrations/olmo/test_checkpoint.py checks every difference and its message."""
    if not SCRIPT.is_file() or "SingleAccelerator" not in SCRIPT.read_text():
        pytest.skip(f"{launch.OLMO_SRC} names no checkout of OLMo's main branch; only its script runs on CPU")
    result, folder = train(tmp_path, "uninterrupted", ON)
    losses = result.ok().losses()
    assert len(losses) == STEPS and losses[-1] < losses[0] - 0.3
    assert result.text.count("LayerNorm Scaling on: 8 norms (lns_rms)") == 1
    folders = [folder / f"step{step}-unsharded" for step in range(0, STEPS + 1, 10)]
    assert sorted(folders) == sorted(folder.glob("step*"))
    assert all("layer_norm_type: lns_rms" in (path / "config.yaml").read_text() for path in folders)

    refused, nothing = train(tmp_path, "refused", load_path=str(folders[2]))
    assert refused.code != 0 and not refused.losses() and not list(nothing.glob("step*"))
    assert ON in refused.text and "CheckpointMismatchError" in refused.text
    result, again = train(tmp_path, "resumed", ON, load_path=str(folders[2]))
    assert result.ok().losses() == losses[20:]
    one, other = (torch.load(of / folders[-1].name / "model.pt", weights_only=True) for of in (folder, again))
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
