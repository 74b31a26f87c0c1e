"""OLMo's unmodified ``scripts/train.py``: train, resume, die and start again, load what does not fit, every scheme.

Needs a checkout in ``OLMO_SRC``; of OLMo's main branch on CPU, since the script of the tag v0.6.0 needs CUDA.
"""

from __future__ import annotations

import json
import math
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support import launch

from olmo_lns.record import Record
from olmo_lns.schemes import names, parse

pytestmark = pytest.mark.slow

STEPS, SAVED = 30, (0, 10, 20, 30)
LNS = Record(parse("lns"), "rms", "plain")
OTHERS = tuple(name for name in names() if name not in ("preln", "lns"))


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


def saved(folder: Path, step: int) -> Path:
    return folder / "run" / f"step{step}-unsharded"


def assert_same_end(folder: Path, reference: Path, step: int = STEPS) -> None:
    found, expected = (torch.load(saved(of, step) / "model.pt", weights_only=True) for of in (folder, reference))
    assert found.keys() == expected.keys()
    different = [name for name in expected if not torch.equal(found[name], expected[name])]
    assert not different, f"other weights after {step} steps: {different}"


@pytest.fixture(scope="module")
def uninterrupted(olmo: Any) -> Any:
    """30 steps under torchrun, LNS by one word on the command line."""
    path = config(olmo, "uninterrupted")
    arguments = [olmo.script, path, "--model.layer_norm_type=lns"]
    result = launch.torchrun(olmo.python, 1, *arguments, cwd=olmo.folder).ok()
    return SimpleNamespace(result=result, losses=result.losses(), folder=path.parent)


def test_trains_with_lns_and_every_checkpoint_has_its_record(uninterrupted):
    assert len(uninterrupted.losses) == STEPS
    assert uninterrupted.losses[-1] < uninterrupted.losses[0] - 0.3
    assert uninterrupted.result.text.count("LayerNorm Scaling on: 8 norms (lns_rms)") == 1
    folders = sorted((uninterrupted.folder / "run").glob("step*"))
    assert sorted(path.name for path in folders) == sorted(f"step{step}-unsharded" for step in SAVED)
    assert [Record.read(path) for path in folders] == [LNS] * len(SAVED)
    assert all("layer_norm_type: lns_rms" in (path / "config.yaml").read_text() for path in folders)


def test_resumed_run_has_the_same_losses(olmo, uninterrupted):
    path = config(olmo, "resumed", load_path=str(saved(uninterrupted.folder, 20)))
    losses = train(olmo, path, "--model.layer_norm_type=lns").ok().losses()
    assert losses == uninterrupted.losses[20:]
    assert_same_end(path.parent, uninterrupted.folder)


def killed_at(olmo: Any, path: Path, marker: str, *arguments: str) -> None:
    """Start, and ``kill -9`` when ``marker`` is printed."""
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


def checkpoints(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "run").glob("step*"))


def loaded_from(result: launch.Result) -> str:
    return next(line for line in result.text.splitlines() if "Loading checkpoint from" in line)


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
    assert Record.read(saved(folder, 30)) == LNS


#: Name of a difference -> layer-norm type of the run, its environment, and what the message says of both. The weights
#: of Post-LN, Mix-LN and DeepNorm have stock names: without the record they would load in silence.
MISMATCHES: dict[str, tuple[str, str, dict[str, str], tuple[str, str]]] = {
    "preln-to-lns": ("rms", "lns", {}, ("Pre-LN", "lns:exponent=0.5 over rms")),
    "lns-to-preln": ("lns", "rms", {}, ("lns:exponent=0.5 over rms", "Pre-LN")),
    "exponent": ("lns", "lns", {"OLMO_LNS_SCHEME": "lns:exponent=0.25"}, ("exponent=0.5", "exponent=0.25")),
    "postln-to-preln": ("postln", "rms", {}, ("postln over rms", "Pre-LN")),
    "postln-to-mixln": ("postln", "mixln", {}, ("postln over rms", "mixln")),
    "preln-to-deepnorm": ("rms", "deepnorm", {}, ("Pre-LN", "deepnorm over rms")),
}


@pytest.fixture(scope="module")
def loads(olmo: Any, uninterrupted: Any) -> dict[str, Any]:
    """One process in which the script runs many times: every scheme trained and resumed, every mismatch."""
    stock = config(olmo, "stock", stop_at=10)
    launches: dict[str, Any] = {"stock": ([str(stock)], {})}
    trained = {"rms": saved(stock.parent, 10), "lns": saved(uninterrupted.folder, 10)}
    for name in OTHERS:
        first = config(olmo, name, stop_at=4, save_interval_unsharded=2)
        again = config(olmo, f"{name}-resumed", stop_at=4, load_path=str(saved(first.parent, 2)))
        launches[name], launches[f"{name} resumed"] = (
            ([str(path), f"--model.layer_norm_type={name}"], {}) for path in (first, again)
        )
        trained[name] = saved(first.parent, 4)
    for name, (kind, running, settings, _) in MISMATCHES.items():
        for allowed in ({}, {"OLMO_LNS_ALLOW_MISMATCH": name}):
            key = f"{name} {'allowed' if allowed else 'refused'}"
            path = config(olmo, key.replace(" ", "-"), load_path=str(trained[kind]), stop_at=11)
            launches[key] = ([str(path), f"--model.layer_norm_type={running}"], {**settings, **allowed})
    (olmo.folder / "launches.json").write_text(json.dumps(launches))
    command = [olmo.python, launch.PROGRAMS / "loads.py", olmo.script, olmo.folder / "launches.json"]
    command.append(olmo.folder / "loads.json")
    text = launch.run(command, cwd=olmo.folder, env=variables(), timeout=3600).ok().text
    parts = dict(part.split("\n", 1) for part in text.split("=== ")[1:])
    results = json.loads((olmo.folder / "loads.json").read_text())
    return {name: SimpleNamespace(error=results[name], printed=launch.Result(0, parts[name])) for name in launches}


@pytest.mark.parametrize("name", OTHERS)
def test_every_other_scheme_trains_and_goes_on(loads, olmo, name):
    first, again = loads[name], loads[f"{name} resumed"]
    assert first.error is None and again.error is None, (first, again)
    line = f"{parse(name).definition.title} on: {parse(name).sites(4)} norms ({name}_rms)"
    assert first.printed.text.count(line) == again.printed.text.count(line) == 1
    assert len(first.printed.losses()) == 4 and again.printed.losses() == first.printed.losses()[2:]
    assert all(map(math.isfinite, first.printed.losses()))
    assert Record.read(saved(olmo.folder / name, 4)) == Record(parse(name), "rms", "plain")
    assert_same_end(olmo.folder / f"{name}-resumed", olmo.folder / name, 4)


@pytest.mark.parametrize("name", MISMATCHES)
def test_a_checkpoint_that_does_not_fit_is_refused(loads, olmo, name):
    assert loads["stock"].error is None
    kind, message = loads[f"{name} refused"].error
    assert kind == "CheckpointMismatchError"
    assert message.splitlines()[1:] == [f"--model.layer_norm_type={MISMATCHES[name][0]}"]
    trained, running = MISMATCHES[name][3]
    before, _, after = message.partition("but this run has")
    assert trained in before and running in after, message
    assert f"set OLMO_LNS_ALLOW_MISMATCH={name} to go on knowingly" in message
    # Refused before a step was made or a file overwritten.
    assert not checkpoints(olmo.folder / f"{name}-refused")


@pytest.mark.parametrize("name", MISMATCHES)
def test_it_is_loaded_when_allowed(loads, olmo, name):
    assert loads[f"{name} allowed"].error is None
    assert f"although it differs ({name})" in loads[f"{name} allowed"].printed.text
    folder = saved(olmo.folder / f"{name}-allowed", 11)
    assert (folder / "model.pt").is_file()
    _, running, settings, _ = MISMATCHES[name]
    scheme = settings.get("OLMO_LNS_SCHEME", running)
    assert Record.read(folder) == (None if running == "rms" else Record(parse(scheme), "rms", "plain"))


FSDP = ["--distributed_strategy=fsdp", "--model.init_device=meta", "--fsdp.wrapping_strategy=by_block"]
MIXED = ["--precision=amp_bf16", "--fsdp.precision=mixed"]
#: What OLMo runs on CUDA only: its launcher under ddp and fsdp, CUDA autocast, unsharded saving under fsdp.
ON_CUDA: dict[str, list[str]] = {
    "ddp": ["--distributed_strategy=ddp", "--model.init_device=cuda"],
    "ddp amp_bf16": ["--distributed_strategy=ddp", "--model.init_device=cuda", "--precision=amp_bf16"],
    "fsdp": FSDP,
    "fsdp unwrapped": [*FSDP[:2], "--fsdp.wrapping_strategy=null"],
    "fsdp amp_bf16": [*FSDP, *MIXED],
    "fsdp amp_bf16, compiled": [*FSDP, *MIXED, "--compile.fullgraph=false", "--activation_checkpointing=whole_layer"],
}


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs CUDA: OLMo's script forces `single` on CPU, its autocast is CUDA's"
)
@pytest.mark.parametrize("name", ON_CUDA)
def test_unmodified_launch_on_cuda(checkout: Any, name: str) -> None:
    path = config(checkout, name.replace(" ", "-").replace(",", ""), save_interval_unsharded=STEPS, save_interval=STEPS)
    arguments = [checkout.script, path, "--model.layer_norm_type=lns", *ON_CUDA[name]]
    result = launch.torchrun(checkout.python, 1, *arguments, cwd=checkout.folder).ok()
    losses = result.losses()
    assert len(losses) == STEPS and all(map(math.isfinite, losses)) and losses[-1] < losses[0] - 0.3
    assert result.text.count("LayerNorm Scaling on: 8 norms (lns_rms)") == 1
    assert Record.read(saved(path.parent, STEPS)) == LNS
