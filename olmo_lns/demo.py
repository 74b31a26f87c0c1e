"""``olmo-lns demo``: train the runs of a small study, measure the variance of their blocks, write a table and a figure.

``configs/study/demo.yaml`` describes the runs. ``demo-long.yaml`` describes a longer study.
"""

from __future__ import annotations

import re
import shlex
import signal
import sys
import time
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Sequence

from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from olmo_lns import environment
from olmo_lns.arguments import Parser, as_path
from olmo_lns.arms import ARMS, check_environment
from olmo_lns.atomic import write_atomically
from olmo_lns.errors import LNSConfigError, LNSError
from olmo_lns.processes import one_process
from olmo_lns.study.collect import difference_from_saved
from olmo_lns.study.data.corpora import build
from olmo_lns.study.describe import Run, Study
from olmo_lns.study.launch import start, variables_of_launch
from olmo_lns.study.locking import exclusive_lock
from olmo_lns.study.logs import Curve, find_logs, read_curve

TOKENS = 32_768  #: number of held-out tokens for a variance


@dataclass
class Trained:
    """A finished run, with the output variance of each block before and after training, block 1 first."""

    run: Run
    curve: Curve
    variance_before: list[float]
    variance_after: list[float]


def check_description(study: Study) -> None:
    """Check that the runs have what the demo shows.

    :raises LNSConfigError: if the runs read other data, or have no held-out loss or no checkpoint before training.
    """
    if study.data != "demo":
        raise LNSConfigError(
            f"{study.path} has data: {study.data}. The demo trains on the sources of Python, data: demo. Change the "
            "key, or use `olmo-lns study launch`."
        )
    for run in study.runs:
        labels = [evaluator["label"] for evaluator in run.settings["evaluators"] or ()]
        if "heldout" not in labels or run.settings["no_pre_train_checkpoint"]:
            raise LNSConfigError(
                f"{study.path} has runs without a held-out loss, or without a checkpoint from before training. The "
                "demo needs both. Add an evaluator heldout and no_pre_train_checkpoint: false, as in "
                "configs/study/demo-base.yaml."
            )


def curve_so_far(run: Run, out: Path) -> Curve:
    """Read the curve of a run. It is empty before the first loss, and for a run that diverged."""
    with suppress(LNSConfigError):
        return read_curve(out / run.name) or Curve()
    return Curve()


def is_finished(run: Run, out: Path) -> bool:
    """Return True if a run has its last checkpoint and its held-out loss."""
    steps = run.workload.steps
    return steps in curve_so_far(run, out).heldout and (out / run.name / f"step{steps}-unsharded").exists()


def train(study: Study, out: Path, lock: int) -> None:
    """Train all unfinished runs at the same time.

    :param lock: lock of the folder, for :func:`olmo_lns.study.launch.start`.
    :raises LNSError: if a run failed (the other runs finish first), or the folder has a run with other settings.
    """
    for run in study.runs:
        if problem := difference_from_saved(run, out / run.name):
            raise LNSConfigError(f"{problem} Pass another --out.")
    unfinished = [run for run in study.runs if not is_finished(run, out)]
    processes = [start(study, run, out, lock)[1] for run in unfinished]
    columns = (BarColumn(30), TextColumn("{task.description}"), TimeElapsedColumn(), TimeRemainingColumn())
    try:
        with Progress(*columns, disable=not sys.stdout.isatty()) as bar:
            task = bar.add_task("starting", total=sum(run.workload.steps for run in unfinished))
            while any(process.poll() is None for process in processes):
                time.sleep(0.5)
                steps = {run.name: curve_so_far(run, out).last for run in unfinished}
                progress = ", ".join(f"{name} {step}" for name, step in steps.items())
                bar.update(task, completed=sum(steps.values()), description=progress)
    finally:
        for process in processes:  # after Ctrl-C all save a checkpoint at the same time
            process.terminate()
        for process in processes:
            process.wait()
    for run in unfinished:
        if not is_finished(run, out):
            reason = (last_log(run, out).strip() or "its log is empty").splitlines()[-1]
            folder = out / run.name
            log = find_logs(folder)[-1]
            raise LNSError(
                f"Run {run.name} failed: {reason}. Its log is {log}. Repeat the command to resume the run, or remove "
                f"{folder} to start it again."
            )


def last_log(run: Run, out: Path) -> str:
    """Return the log of a run's last attempt."""
    return find_logs(out / run.name)[-1].read_text(encoding="utf-8", errors="replace")


def variance(run: Run, step: int, out: Path) -> list[float]:
    """Measure the output variances of a run after ``step`` with ``olmo-lns analyze variance``."""
    from olmo_lns.diagnostics.cli import main as analyze
    from olmo_lns.diagnostics.results import Measurement

    folder = out / run.name
    path = folder / f"variance-step{step}.json"
    argv = ["variance", "--model", str(folder / f"step{step}-unsharded"), "--label", ARMS[run.arm].label]
    argv += ["--data", str(out / "data" / "heldout.npy"), "--tokens", str(TOKENS), "-o", str(path)]
    with (out / "demo.log").open("a", encoding="utf-8") as log, redirect_stdout(log):
        analyze(argv)
    return Measurement.read(path).main


def summarize(results: Sequence[Trained], study: Study, out: Path) -> list[str]:
    """Return the lines of report.txt: the plugin's log lines, the table, and notes on its meaning."""
    layers, workload = len(results[0].variance_after), results[0].run.workload
    quarter = max(1, layers // 4)
    blocks = sorted({1, quarter, max(1, layers // 2), layers})
    row = "{:<24}{:>8}{:>8}{:>10}" + "{:>10}" * len(blocks) + "{:>6}"
    first_matches = [re.search(r"LayerNorm Scaling on: .*", last_log(result.run, out)) for result in results]
    lines = [match[0].rstrip() for match in first_matches if match] + [""]
    lines.append(row.format("arm", "rate", "train", "held-out", *(f"block {block}" for block in blocks), "V"))
    for result in results:
        loss, heldout = result.curve.final(study.final_fraction)[0], result.curve.heldout[workload.steps]
        numbers = [f"{result.run.workload.learning_rate:g}", f"{loss:.3f}", f"{heldout:.3f}"]
        variances = result.variance_after
        numbers += [f"{variances[block - 1]:.3g}" for block in blocks]
        label = result.run.arm if len(study.arms) == len(study.runs) else result.run.name
        lines.append(row.format(label, *numbers, f"{variances[-1] / variances[quarter - 1]:.2g}"))
    return [
        *lines,
        "",
        f"train, held-out: loss in nats per byte (train: mean of the last {study.final_fraction:.0%} of the steps).",
        f"block n: variance of its output ({TOKENS:,} held-out tokens). V: block {layers} over block {quarter}.",
        f"Not shown: which arm is better. {workload.parameters:,} parameters and {workload.tokens:,} tokens are far",
        "from real training; the order of the losses changes with rate, depth, length and seed.",
    ]


def draw(results: Sequence[Trained], path: Path) -> None:
    """Draw the loss over the steps, and the output variance over the blocks."""
    import pandas

    from olmo_lns.diagnostics.plots import block_axis, new_figure, save

    workload = results[0].run.workload
    smoothing = max(1, workload.steps // 12)
    figure = new_figure(4.4, 7.0)  # legible on a phone
    upper, lower = figure.subplots(2, 1)
    for result in results:
        arm = ARMS[result.run.arm]
        label = f"{arm.label} ({result.run.workload.learning_rate:g})"
        losses = pandas.Series(result.curve.losses).rolling(smoothing).mean().iloc[workload.steps // 5 :]
        blocks = range(1, len(result.variance_after) + 1)
        style: dict[str, Any] = {"color": arm.color, "linestyle": arm.line}
        upper.plot(losses.index, losses, **style)
        lower.plot(blocks, result.variance_after, marker=arm.marker, label=label, **style)
        lower.plot(blocks, result.variance_before, color=arm.color, linestyle=":", linewidth=1)
    upper.set(xlabel="step", title=f"training loss (nats per byte, mean of {smoothing} steps)")
    block_axis(lower, len(results[0].variance_after))
    lower.set(title="output variance (dotted: before training)", yscale="log")
    figure.legend(loc="outside lower center", ncols=1)
    size = f"{workload.parameters / 1e6:.2f}M parameters, {workload.tokens / 1e6:.2f}M bytes of text"
    figure.suptitle(f"OLMo, {workload.layers} blocks, {size};\nin brackets the learning rate", fontsize=9)
    save(figure, path)


def main(argv: Sequence[str]) -> int:
    """Run ``olmo-lns demo``. Exit code 130 after Ctrl-C."""
    parser = Parser(
        prog="olmo-lns demo",
        description="Train a small OLMo of 24 blocks as Pre-LN, Pre-LN with scaled initialization and LNS; measure the "
        "variance of every block's output. After Ctrl-C the same command resumes the runs.",
    )
    study_help = "description of the runs: demo (the default), demo-long (16 tokens per parameter), or a file"
    parser.add_argument("study", nargs="?", default="demo", help=study_help)
    parser.add_argument("--out", type=as_path, default=Path("demo"), help="output folder (default %(default)s)")
    args = parser.parse_args(argv)
    environment.refuse_disabled()
    check_environment()
    one_process("the demo")
    import matplotlib  # noqa: F401  raise for a missing package before training
    import olmo  # noqa: F401

    out, study = args.out, Study.load(args.study)
    check_description(study)
    print(f"{len(study.runs)} runs of {study.runs[0].workload.steps} steps in {out}; loading OLMo ...", flush=True)
    out.mkdir(parents=True, exist_ok=True)
    study = study.with_variables(variables_of_launch(study, out))
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # end in the same way as on Ctrl-C
    try:
        problem = f"Another demo is running in {out}. Wait until it ends, or pass another --out."
        with exclusive_lock(out / ".lock", problem) as lock:
            build(out / "data")
            train(study, out, lock)
            results = [
                Trained(run, curve_so_far(run, out), variance(run, 0, out), variance(run, run.workload.steps, out))
                for run in study.runs
            ]
    except KeyboardInterrupt:
        print(f"Stopped. To resume: olmo-lns {shlex.join(['demo', *argv])}")
        return 130
    lines = summarize(results, study, out)
    write_atomically(out / "report.txt", "\n".join(lines) + "\n")
    draw(results, out / "demo.png")
    print("", *lines, "", f"figure  {out / 'demo.png'}", sep="\n")
    print("next    add --model.layer_norm_type=lns to your OLMo launch: docs/olmo.md")
    return 0
