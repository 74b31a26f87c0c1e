"""The demo end to end on tiny models: its files, its numbers, and stopping and going on anywhere."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from support.launch import environment

from olmo_lns import cli
from olmo_lns.demo import cli as demo_cli
from olmo_lns.demo import config as demo_config
from olmo_lns.demo import report
from olmo_lns.demo.runs import Result
from olmo_lns.record import Record
from olmo_lns.schemes import LNS, PRE_LN
from olmo_lns.study import text as demo_data

ARMS = ("preln", "preln_scaled_init", "lns")
TINY = ["--steps", "6", "--layers", "4", "--d-model", "32", "--sequence", "64", "--threads", "1"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("demo")
    assert cli.main(["demo", *TINY, "--out", str(out)]) == 0
    return out


def share_data(source: Path, out: Path) -> None:
    """Spare a test the two seconds of building the data."""
    out.mkdir(exist_ok=True)
    (out / "data").symlink_to(source / "data")


def losses(out: Path, arm: str) -> list[tuple[int, float]]:
    with (out / arm / "seed0" / "losses.csv").open() as file:
        return [(int(row["step"]), float(row["loss"])) for row in csv.DictReader(file)]


def test_report_has_every_number(finished: Path):
    report = json.loads((finished / "report.json").read_text())
    assert report["complete"] is True
    assert [result["arm"] for result in report["results"]] == list(ARMS)
    for result in report["results"]:
        assert len(result["variance"]) == len(result["variance_at_init"]) == 4
        assert result["growth"] == pytest.approx(result["variance"][3] / result["variance"][0])
        (last,) = [loss for step, loss in losses(finished, result["arm"]) if step == 6]
        assert result["train_loss"] == pytest.approx(last)  # the last tenth of six steps is one
        assert 3 < result["heldout_loss"] < 7
    assert report["settings"]["tokens_per_arm"] == 6 * 4 * 64
    assert str(finished) not in json.dumps(report)


def test_csv_files_hold_every_step_and_block(finished: Path):
    with (finished / "losses.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["arm"], int(row["step"])) for row in rows] == [(arm, n) for arm in ARMS for n in range(1, 7)]
    with (finished / "variances.csv").open() as file:
        rows = list(csv.DictReader(file))
    expected = [(arm, step, block) for arm in ARMS for step in (0, 6) for block in range(1, 5)]
    assert [(row["arm"], int(row["step"]), int(row["block"])) for row in rows] == expected


def test_figure_is_a_picture_of_some_size(finished: Path):
    from matplotlib.image import imread

    height, width, _ = imread(finished / "demo.png").shape
    assert width == 1500 and height > 600


def test_checkpoints_load_and_their_variance_is_the_reported_one(finished: Path):
    from olmo.model import OLMo

    for arm, norm in (
        ("preln", None),
        ("preln_scaled_init", Record(PRE_LN, "", "scaled")),
        ("lns", Record(LNS, "rms", "plain")),
    ):
        folder = finished / arm / "seed0" / "step6-unsharded"
        assert Record.read(folder) == norm
        model = OLMo.from_checkpoint(str(folder))
        tokens = np.fromfile(finished / "data" / "heldout.npy", np.uint16).astype(np.int64)
        count = len(tokens) // 64
        rows = [tokens[n * 64 : (n + 1) * 64] for n in range(0, count, count // 32)][:32]
        outputs: list[torch.Tensor] = []
        model.transformer.blocks[2].register_forward_hook(lambda _, __, output, kept=outputs: kept.append(output[0]))
        with torch.no_grad():
            model(torch.from_numpy(np.stack(rows)))
        result = Result(**json.loads((finished / arm / "seed0" / "result.json").read_text()))
        assert outputs[0].double().var(dim=-1, correction=0).mean().item() == pytest.approx(
            result.variance[2], rel=1e-4
        )


def test_what_ran_is_a_study(finished: Path, capsys: pytest.CaptureFixture[str]):
    assert cli.main(["study", "plan", str(finished / "study.yaml")]) == 0
    printed = capsys.readouterr().out
    assert "3 runs (Pre-LN, Pre-LN + scaled init, Pre-LN + LNS)" in printed and not (finished / ".study.yaml").exists()


def test_second_call_trains_nothing(finished: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("olmo_lns.demo.runs.execute", lambda *_: pytest.fail("a finished arm was trained again"))
    before = (finished / "report.json").read_bytes()
    assert cli.main(["demo", *TINY, "--out", str(finished)]) == 0
    assert (finished / "report.json").read_bytes() == before


def test_another_configuration_in_the_same_folder_is_refused(finished: Path, capsys: pytest.CaptureFixture[str]):
    assert cli.main(["demo", *TINY, "--steps", "7", "--out", str(finished)]) == 1
    err = capsys.readouterr().err
    assert "preln/seed0 holds another run: max_duration is 6 there and 7 here" in err
    assert "--overwrite" in err and err.count("\n") == 1
    assert losses(finished, "preln")[-1][0] == 6


def test_overwrite_replaces_other_runs_and_keeps_its_own(finished: Path, tmp_path: Path):
    share_data(finished, tmp_path)
    command = ["demo", *TINY, "--arms", "preln", "--out", str(tmp_path)]
    assert cli.main([*command, "--steps", "2"]) == 0
    written = []
    for _ in range(2):
        assert cli.main([*command, "--overwrite"]) == 0
        assert losses(tmp_path, "preln") == losses(finished, "preln")
        written.append((tmp_path / "preln" / "seed0" / "result.json").stat().st_mtime_ns)
    assert written[0] == written[1]


def test_interrupt_reports_what_is_done_and_the_command_goes_on(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    share_data(finished, tmp_path)
    command = ["demo", *TINY, "--arms", "preln,lns", "--out", str(tmp_path)]
    step = demo_cli._Display.step

    def interrupting(display: object, index: int, number: int, loss: float) -> None:
        step(display, index, number, loss)  # type: ignore[arg-type]
        if (index, number) == (1, 3):
            os.kill(os.getpid(), signal.SIGINT)

    with monkeypatch.context() as patched:
        patched.setattr(demo_cli._Display, "step", interrupting)
        patched.setenv("PATH", str(Path(sys.executable).parent), prepend=os.pathsep)  # as in an activated environment
        assert cli.main(command) == 130
    printed = capsys.readouterr()
    assert "ending after this step with a checkpoint; once more ends at once" in printed.out
    out = " ".join(printed.out.split())
    (saved,) = (tmp_path / "lns" / "seed0").glob("step*-unsharded")
    step_saved = saved.name.removeprefix("step").removesuffix("-unsharded")
    assert "preln seed 0: finished" in out and f"lns seed 0: saved at step {step_saved} of 6" in out
    assert "run the same command again: olmo-lns demo --steps 6" in out
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["complete"] is False and [result["arm"] for result in report["results"]] == ["preln"]

    assert cli.main(command) == 0
    for arm in ("preln", "lns"):
        assert losses(tmp_path, arm) == losses(finished, arm)
    assert json.loads((tmp_path / "report.json").read_text())["complete"] is True


@pytest.mark.exhaustive
@pytest.mark.slow
def test_kill_loses_at_most_the_steps_since_the_checkpoint(tmp_path: Path):
    arguments = ["demo", *TINY, "--steps", "60", "--arms", "lns", "--out"]
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    command = [str(Path(sys.executable).with_name("olmo-lns")), *arguments, str(killed)]
    process = subprocess.Popen(command, env=environment(), stdout=subprocess.DEVNULL)
    written = killed / "lns" / "seed0" / "losses.csv"
    deadline = time.monotonic() + 600  # a busy machine
    while not (written.is_file() and len(written.read_text().splitlines()) > 12):  # a checkpoint every 10 steps
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    process.kill()
    process.wait()
    assert not (killed / "lns" / "seed0" / "result.json").exists()
    assert cli.main([*arguments, str(killed)]) == 0
    share_data(killed, whole)
    assert cli.main([*arguments, str(whole)]) == 0
    assert losses(killed, "lns") == losses(whole, "lns")
    first, second = (json.loads((out / "report.json").read_text())["results"][0] for out in (killed, whole))
    for name in ("train_loss", "heldout_loss", "variance", "variance_at_init"):
        assert first[name] == second[name], name


def test_arms_differ_in_norm_and_initialization_alone(finished: Path, tmp_path: Path):
    data = demo_data.build(finished / "data")
    study = demo_config.make_study(tmp_path / "study.yaml", ARMS, [0], 6, demo_config.Shape.default())
    flat = {run.arm: demo_config.train_config(run, data, Path("x")).asdict() for run in study.runs}
    for arm, changed in (("preln_scaled_init", {"init_fn"}), ("lns", {"layer_norm_type"})):
        differing = {key for key in flat["preln"] if flat["preln"][key] != flat[arm][key]}
        assert differing == {"run_name", "model"}
        model, other = flat["preln"]["model"], flat[arm]["model"]
        assert {key for key in model if model[key] != other[key]} == changed


def test_rate_and_initialization_that_were_asked_for_are_trained_with(finished: Path, tmp_path: Path):
    args = demo_cli.parser().parse_args(["--learning-rate", "3e-3", "--init-std", "0.0566", "--layers", "6"])
    (run,) = demo_config.make_study(tmp_path / "study.yaml", ["lns"], [0], 6, demo_cli._shape(args)).runs
    config = demo_config.train_config(run, demo_data.build(finished / "data"), Path("x"))
    assert (config.optimizer.learning_rate, config.model.init_std, config.model.n_layers) == (3e-3, 0.0566, 6)
    settings = json.loads((finished / "report.json").read_text())["settings"]
    assert (settings["learning_rate"], settings["init_std"]) == (1e-3, 0.02)


def test_default_model_is_deep_and_of_four_million_parameters(finished: Path, tmp_path: Path):
    from olmo.model import OLMo

    data = demo_data.build(finished / "data")
    (run,) = demo_config.make_study(tmp_path / "study.yaml", ["lns"], [0], 300, demo_config.Shape.default()).runs
    config = demo_config.train_config(run, data, Path("x")).model
    config.init_device = "meta"
    model = OLMo(config, init_params=False)
    assert len(model.transformer.blocks) == 24 and config.d_model == 128 and config.max_sequence_length == 256
    assert 3.9e6 < model.num_params() < 4.1e6
    assert [block.attn_norm.lns_scale for block in model.transformer.blocks[:4]] == pytest.approx(
        [1, 2**-0.5, 3**-0.5, 0.5]
    )


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--arms", "preln,lsn"], "unknown arm 'lsn' (did you mean 'lns'?)"),
        (["--arms", ","], "no arm given"),
        (["--layers", "1"], "--layers 1: expected at least 2"),
        (["--d-model", "20"], "--d-model 20: expected a multiple of 8"),
    ],
)
def test_bad_values_are_one_line(arguments: list[str], expected: str, capsys: pytest.CaptureFixture[str]):
    assert cli.main(["demo", *arguments]) == 1
    err = capsys.readouterr().err
    assert expected in err and err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--steps", "0"], "argument --steps: expected a whole number >= 1, found '0'"),
        (["--steps", "-3"], "--steps"),
        (["--learning-rate", "0"], "argument --learning-rate: expected a number above 0, found '0'"),
        (["--init-std", "nan"], "argument --init-std: expected a number above 0, found 'nan'"),
        (["--seeds", "1,1"], "argument --seeds: 1 is listed twice in '1,1'"),
        (["--seeds", "one"], "argument --seeds: expected whole numbers >= 0 separated by commas, got 'one'"),
    ],
)
def test_bad_numbers_are_usage_errors(arguments: list[str], expected: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as error:
        cli.main(["demo", *arguments])
    assert error.value.code == 2
    assert expected in capsys.readouterr().err


def test_several_seeds_are_averaged_with_their_range(finished: Path):
    from rich.console import Console

    from olmo_lns.demo.report import table

    (result,) = [r for r in json.loads((finished / "report.json").read_text())["results"] if r["arm"] == "lns"]
    result.pop("growth")
    results = [Result(**result | {"seed": seed, "heldout_loss": 2.0 + seed}) for seed in range(3)]
    console = Console(width=200)
    with console.capture() as printed:
        console.print(table(results))
    assert "3.000 (2.000–4.000)" in printed.get()
    assert results[0].growth == results[0].variance[-1] / results[0].variance[0]


def test_commands_to_paste_name_the_script_when_it_is_not_on_the_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    script = tmp_path / ".venv" / "bin" / "olmo-lns"
    script.parent.mkdir(parents=True)
    script.touch(mode=0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "executable", str(script.with_name("python")))
    monkeypatch.setenv("PATH", "/nowhere")
    assert report.program_name() == ".venv/bin/olmo-lns"
    monkeypatch.setenv("PATH", str(script.parent))
    assert report.program_name() == "olmo-lns"


def test_without_a_terminal_a_line_comes_although_no_step_ends(monkeypatch, tmp_path):
    import io
    import time
    from types import SimpleNamespace

    from rich.console import Console

    monkeypatch.setattr(demo_cli._Display, "EVERY", 0.05)
    console = Console(file=io.StringIO())
    display = demo_cli._Display(console, [SimpleNamespace(arm="lns", steps=300)])
    with display.shown():
        display.step(0, 7, 2.5)
        time.sleep(0.5)
    lines = console.file.getvalue().splitlines()
    assert len(lines) >= 2 and lines[0].endswith("lns (1/1): step 7/300 loss 2.500")


@pytest.mark.parametrize(("cores", "load", "threads"), [(8, 0.2, 4), (8, 6.0, 2), (2, 5.0, 1), (2, 0.0, 2)])
def test_threads_leave_busy_cores_alone(monkeypatch, cores, load, threads):
    monkeypatch.setattr(demo_cli.os, "sched_getaffinity", lambda _: set(range(cores)), raising=False)
    monkeypatch.setattr(demo_cli.os, "getloadavg", lambda: (load, load, load))
    assert demo_cli._free_cores() == threads


def test_the_step_that_is_reported_is_the_newest_checkpoints(tmp_path):
    from olmo_lns.demo.runs import Run

    run = Run("lns", 0, None, tmp_path)
    assert run.saved_step == 0
    for name in ("step5-unsharded", "step12-unsharded", "step20-tmp"):
        (tmp_path / name).mkdir()
    assert run.saved_step == 12
