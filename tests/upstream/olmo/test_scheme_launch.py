"""Every other scheme in OLMo's unmodified ``scripts/train.py``: one word on the command line, killed and resumed.

Needs a checkout of OLMo's main branch in ``OLMO_SRC``, as test_train_script.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import launch

from olmo_lns.record import Record
from olmo_lns.schemes import names, parse

pytestmark = pytest.mark.slow

STEPS = 6
NAMES = tuple(name for name in names() if name not in ("preln", "lns"))


@pytest.fixture(scope="module")
def olmo(checkout: Any) -> Any:
    if "SingleAccelerator" not in checkout.script.read_text():
        pytest.skip(f"{checkout.script} needs CUDA; on CPU only the main branch's runs")
    return checkout


def train(olmo: Any, path: Any, *arguments: str, **more: str) -> launch.Result:
    ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "FS_LOCAL_RANK": "0"}
    env = launch.environment(MASTER_ADDR="127.0.0.1", MASTER_PORT="0", **ranks, **more)
    return launch.run([olmo.python, olmo.script, path, *arguments], cwd=olmo.folder, env=env)


def config(olmo: Any, name: str, **changes: Any) -> Any:
    values = {"max_duration": STEPS, "stop_at": STEPS, "save_interval_unsharded": 2, **changes}
    return launch.write_script_config(olmo.folder / name, **values)


@pytest.mark.parametrize("name", NAMES)
def test_trains_dies_and_goes_on(olmo, name):
    path = config(olmo, name)
    start = [f"--model.layer_norm_type={name}", "--try_load_latest_save=true"]
    first = train(olmo, path, *start, DIE_WHEN="os.rename:step4-unsharded-tmp")
    assert first.code == -9, first.text[-4000:]
    title = parse(name).definition.title
    assert first.text.count(f"{title} on: {parse(name).sites(4)} norms ({name}_rms)") == 1
    second = train(olmo, path, *start).ok()
    assert "step2-unsharded" in next(line for line in second.text.splitlines() if "Loading checkpoint from" in line)
    # Steps 3 and 4 were made twice.
    assert len(first.losses()) == 4 and len(second.losses()) == 4 and first.losses()[2:] == second.losses()[:2]
    folder = path.parent / "run" / f"step{STEPS}-unsharded"
    assert Record.read(folder) == Record(parse(name), "rms", "plain")
    state = torch.load(folder / "model.pt", weights_only=True)
    assert all(torch.isfinite(value).all() for value in state.values())


@pytest.mark.parametrize(("trained", "running"), [("postln", "rms"), ("postln", "mixln"), ("rms", "deepnorm")])
def test_weights_with_stock_names_are_refused_by_another_scheme(olmo, trained, running):
    """Their names and shapes fit: without the record they would load in silence."""
    saved = config(olmo, f"{trained}-for-{running}", stop_at=2)
    train(olmo, saved, f"--model.layer_norm_type={trained}").ok()
    load = str(saved.parent / "run" / "step2-unsharded")
    path = config(olmo, f"{running}-from-{trained}", load_path=load, stop_at=3)
    result = train(olmo, path, f"--model.layer_norm_type={running}")
    assert result.code != 0 and "CheckpointMismatchError" in result.text
    assert not list((path.parent / "run").glob("step*"))
