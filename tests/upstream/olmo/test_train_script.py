"""OLMo's unmodified ``scripts/train.py`` on CPU: train, resume, die and start again, load what does not fit.

Needs a checkout of OLMo's main branch in ``OLMO_SRC``: the script of the tag v0.6.0 needs CUDA.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support import launch

from olmo_lns.record import Record
from olmo_lns.schemes import parse

pytestmark = pytest.mark.slow

STEPS, SAVED = 30, (0, 10, 20, 30)
LNS = Record(parse("lns"), "rms", "plain")


@pytest.fixture(scope="module")
def olmo(checkout: Any) -> Any:
    """A checkout whose script runs on CPU."""
    if "SingleAccelerator" not in checkout.script.read_text():
        pytest.skip(f"{checkout.script} needs CUDA; on CPU only the main branch's runs")
    return checkout


def config(olmo: Any, name: str, **changes: Any) -> Path:
    values = {"max_duration": STEPS, "stop_at": STEPS, "save_interval_unsharded": 10, **changes}
    return launch.write_script_config(olmo.folder / name, **values)


def variables(**more: str) -> dict[str, str]:
    """What torchrun or Slurm gives the only process of a run; at port 0 it listens wherever the system says."""
    ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "FS_LOCAL_RANK": "0"}
    return launch.environment(MASTER_ADDR="127.0.0.1", MASTER_PORT="0", **ranks, **more)


def train(olmo: Any, path: Path, *arguments: str, **more: str) -> launch.Result:
    return launch.run([olmo.python, olmo.script, path, *arguments], cwd=olmo.folder, env=variables(**more))


def weights(folder: Path, step: int = STEPS) -> dict[str, torch.Tensor]:
    return torch.load(folder / "run" / f"step{step}-unsharded" / "model.pt", weights_only=True)


def assert_same_end(folder: Path, reference: Path) -> None:
    found, expected = weights(folder), weights(reference)
    assert found.keys() == expected.keys()
    different = [name for name in expected if not torch.equal(found[name], expected[name])]
    assert not different, f"other weights after {STEPS} steps: {different}"


@pytest.fixture(scope="module")
def uninterrupted(olmo: Any) -> Any:
    """30 steps under torchrun, LNS by one word on the command line."""
    path = config(olmo, "uninterrupted")
    arguments = [olmo.script, path, "--model.layer_norm_type=lns"]
    result = launch.torchrun(olmo.python, 1, *arguments, cwd=olmo.folder).ok()
    return SimpleNamespace(result=result, losses=result.losses(), folder=path.parent)


def test_trains_with_lns(uninterrupted):
    assert len(uninterrupted.losses) == STEPS
    assert uninterrupted.losses[-1] < uninterrupted.losses[0] - 0.3
    assert uninterrupted.result.text.count("LayerNorm Scaling on: 8 norms (lns_rms)") == 1


def test_every_checkpoint_has_its_record(uninterrupted):
    folders = sorted((uninterrupted.folder / "run").glob("step*"))
    assert sorted(path.name for path in folders) == sorted(f"step{step}-unsharded" for step in SAVED)
    assert [Record.read(path) for path in folders] == [LNS] * len(SAVED)
    assert all("layer_norm_type: lns_rms" in (path / "config.yaml").read_text() for path in folders)


def test_resumed_run_has_the_same_losses(olmo, uninterrupted):
    path = config(olmo, "resumed", load_path=str(uninterrupted.folder / "run" / "step20-unsharded"))
    losses = train(olmo, path, "--model.layer_norm_type=lns").ok().losses()
    assert losses == uninterrupted.losses[20:]
    assert_same_end(path.parent, uninterrupted.folder)


def killed_at(olmo: Any, path: Path, marker: str, *arguments: str) -> str:
    """Start, ``kill -9`` when ``marker`` is printed; what was printed until then."""
    command = [str(part) for part in (olmo.python, olmo.script, path, *arguments)]
    process = subprocess.Popen(
        command, cwd=olmo.folder, env=variables(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert process.stdout is not None
    seen = []
    for line in process.stdout:
        seen.append(line)
        if marker in line:
            process.kill()
            break
    process.stdout.close()
    assert process.wait(timeout=60) == -9, "".join(seen)[-4000:]
    return "".join(seen)


def checkpoints(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "run").glob("step*"))


def test_killed_three_times_and_nothing_lost(olmo, uninterrupted):
    """Killed while training, before a checkpoint is complete, and before its final rename."""
    path = config(olmo, "killed")
    folder, start = path.parent, ["--model.layer_norm_type=lns", "--try_load_latest_save=true"]

    killed_at(olmo, path, "[step=11/", *start)
    assert checkpoints(folder) == ["step0-unsharded", "step10-unsharded"]

    second = train(olmo, path, *start, DIE_WHEN="open:step20-unsharded-tmp/config.yaml")
    assert second.code == -9, second.text[-4000:]
    assert "step10-unsharded" in loaded_from(second)
    half = folder / "run" / "step20-unsharded-tmp"
    assert (half / "model.pt").is_file() and not (half / "lns.json").exists()

    third = train(olmo, path, *start, DIE_WHEN="os.rename:step30-unsharded-tmp")
    assert third.code == -9, third.text[-4000:]
    assert "step10-unsharded" in loaded_from(third), "half a checkpoint was loaded"
    assert (folder / "run" / "step30-unsharded-tmp" / "lns.json").is_file()
    assert "step30-unsharded" not in checkpoints(folder)

    last = train(olmo, path, *start).ok()
    assert "step20-unsharded" in loaded_from(last)
    assert last.losses() == uninterrupted.losses[20:]
    assert_same_end(folder, uninterrupted.folder)
    assert Record.read(folder / "run" / "step30-unsharded") == LNS


def loaded_from(result: launch.Result) -> str:
    return next(line for line in result.text.splitlines() if "Loading checkpoint from" in line)


#: Name of a difference -> layer-norm type of the run, its environment, and what the message says of both.
MISMATCHES: dict[str, tuple[str, str, dict[str, str], tuple[str, str]]] = {
    "preln-to-lns": ("rms", "lns", {}, ("Pre-LN", "lns:exponent=0.5 over rms")),
    "lns-to-preln": ("lns", "rms", {}, ("lns:exponent=0.5 over rms", "Pre-LN")),
    "exponent": ("lns", "lns", {"OLMO_LNS_SCHEME": "lns:exponent=0.25"}, ("exponent=0.5", "exponent=0.25")),
}


@pytest.fixture(scope="module")
def loads(olmo: Any, uninterrupted: Any) -> dict[str, Any]:
    """Every mismatch, refused and then allowed, from checkpoints of the same script."""
    stock = config(olmo, "stock", stop_at=10)
    saved = {kind: str(path.parent / "run" / "step10-unsharded") for kind, path in (("rms", stock),)}
    saved["lns"] = str(uninterrupted.folder / "run" / "step10-unsharded")
    launches: dict[str, Any] = {"stock": ([str(stock)], {})}
    for name, (trained, running, settings, _) in MISMATCHES.items():
        for allowed in ({}, {"OLMO_LNS_ALLOW_MISMATCH": name}):
            key = f"{name} {'allowed' if allowed else 'refused'}"
            path = config(olmo, key.replace(" ", "-"), load_path=saved[trained], stop_at=11)
            launches[key] = ([str(path), f"--model.layer_norm_type={running}"], {**settings, **allowed})
    (olmo.folder / "launches.json").write_text(json.dumps(launches))
    command = [olmo.python, launch.PROGRAMS / "loads.py", olmo.script, olmo.folder / "launches.json"]
    result = launch.run([*command, olmo.folder / "loads.json"], cwd=olmo.folder, env=variables()).ok()
    return {"text": result.text, **json.loads((olmo.folder / "loads.json").read_text())}


@pytest.mark.parametrize("name", MISMATCHES)
def test_a_checkpoint_that_does_not_fit_is_refused(loads, olmo, name):
    assert loads["stock"] is None
    kind, message = loads[f"{name} refused"]
    assert kind == "CheckpointMismatchError"
    assert message.splitlines()[1:] == [f"--model.layer_norm_type={MISMATCHES[name][0]}"]
    saved, running = MISMATCHES[name][3]
    before, _, after = message.partition("but this run has")
    assert saved in before and running in after, message
    assert f"set OLMO_LNS_ALLOW_MISMATCH={name} to go on knowingly" in message
    # Refused before a step was made or a file overwritten.
    assert not list((olmo.folder / f"{name}-refused" / "run").glob("step*"))


@pytest.mark.parametrize("name", MISMATCHES)
def test_it_is_loaded_when_allowed(loads, olmo, name):
    assert loads[f"{name} allowed"] is None, loads["text"][-4000:]
    assert f"although it differs ({name})" in loads["text"]
    folder = olmo.folder / f"{name}-allowed" / "run" / "step11-unsharded"
    assert (folder / "model.pt").is_file()
    _, running, settings, _ = MISMATCHES[name]
    record = Record.read(folder)
    assert (record is None) == (running == "rms")
    if record is not None:
        assert record.scheme == parse(settings.get("OLMO_LNS_SCHEME", "lns"))
        assert record.scaled_init == settings.get("OLMO_LNS_INITIALIZATION", "plain")
