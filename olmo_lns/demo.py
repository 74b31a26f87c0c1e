"""``olmo-lns demo``: the runs of a small study at once, the variance of their blocks, a table and one figure.

``configs/study/demo.yaml`` describes the runs; ``demo-long.yaml`` is a longer study.
"""

from __future__ import annotations

import os
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

from olmo_lns import settings
from olmo_lns.arguments import Parser
from olmo_lns.errors import LNSConfigError, LNSError
from olmo_lns.processes import one_process
from olmo_lns.study import files
from olmo_lns.study.arms import ARMS, Arm, check_environment
from olmo_lns.study.collect import Curve, attempts, curve_of, other_run
from olmo_lns.study.data.corpora import build
from olmo_lns.study.describe import Run, Study
from olmo_lns.study.launch import environment, start
from olmo_lns.text import write_whole

TOKENS = 32_768  #: held-out tokens over which a variance is averaged


@dataclass
class Trained:
    """A finished run. :param before, after: output variance of each block before and after training, block 1 first."""

    run: Run
    curve: Curve
    before: list[float]
    after: list[float]

    @property
    def arm(self) -> Arm:
        return ARMS[self.run.arm]

    @property
    def growth(self) -> float:
        """V: the variance of the last block divided by the variance of block L/4."""
        return self.after[-1] / self.after[max(1, len(self.after) // 4) - 1]


def curve_so_far(run: Run, out: Path) -> Curve:
    """Read the curve of a run; an empty one before its first loss, and for a run that diverged."""
    with suppress(LNSConfigError):
        return curve_of(out / run.name) or Curve()
    return Curve()


def finished(run: Run, out: Path) -> bool:
    """Return true if a run has its last checkpoint and its held-out loss."""
    steps = run.shape.steps
    return steps in curve_so_far(run, out).heldout and (out / run.name / f"step{steps}-unsharded").exists()


def train(study: Study, out: Path, lock: int) -> None:
    """Train the unfinished runs, all at once.

    :param lock: file descriptor of the folder's lock, for :func:`olmo_lns.study.launch.start`.
    :raises LNSError: a run failed (the other runs finish first), or the folder has a run with other settings.
    """
    if problem := next(filter(None, (other_run(run, out / run.name) for run in study.runs)), None):
        raise LNSConfigError(f"{problem}; use another --out")
    unfinished = [run for run in study.runs if not finished(run, out)]
    processes = [start(study, run, out, lock)[1] for run in unfinished]
    columns = (BarColumn(30), TextColumn("{task.description}"), TimeElapsedColumn(), TimeRemainingColumn())
    try:
        with Progress(*columns, disable=not sys.stdout.isatty()) as bar:
            task = bar.add_task("starting", total=sum(run.shape.steps for run in unfinished))
            while any(process.poll() is None for process in processes):
                time.sleep(0.5)
                steps = {run.name: curve_so_far(run, out).last for run in unfinished}
                description = ", ".join(f"{name} {step}" for name, step in steps.items())
                bar.update(task, completed=sum(steps.values()), description=description)
    finally:
        for process in processes:  # after Ctrl-C each saves a checkpoint
            process.terminate()
            process.wait()
    for run in (run for run in unfinished if not finished(run, out)):
        folder = out / run.name
        last_line = (last_log(run, out).strip() or "its log is empty").splitlines()[-1]
        raise LNSError(
            f"run {run.name} failed: {last_line}; see {attempts(folder)[-1]}, remove {folder} to start again"
        )


def last_log(run: Run, out: Path) -> str:
    return attempts(out / run.name)[-1].read_text(encoding="utf-8", errors="replace")


def variance(run: Run, step: int, out: Path) -> list[float]:
    """Measure the output variances of a run after a step with ``olmo-lns analyze variance``."""
    from olmo_lns.diagnostics.cli import main as analyze
    from olmo_lns.diagnostics.results import Measurement

    folder = out / run.name
    result_path = folder / f"variance-step{step}.json"
    argv = ["variance", "--model", str(folder / f"step{step}-unsharded"), "--label", ARMS[run.arm].label]
    argv += ["--data", str(out / "data" / "heldout.npy"), "--tokens", str(TOKENS), "-o", str(result_path)]
    with (out / "demo.log").open("a", encoding="utf-8") as log, redirect_stdout(log):
        analyze(argv)
    return Measurement.read(result_path).main


def report(runs: Sequence[Trained], study: Study, out: Path) -> list[str]:
    """Return the start-up lines of LNS and the table, with what the runs show and what they do not."""
    layers, shape = len(runs[0].after), runs[0].run.shape
    quarter = max(1, layers // 4)
    blocks = sorted({1, quarter, max(1, layers // 2), layers})
    row_format = "{:<24}{:>8}{:>8}{:>10}" + "{:>10}" * len(blocks) + "{:>6}"
    matches = [re.search(r"LayerNorm Scaling on: .*", last_log(trained.run, out)) for trained in runs]
    lines = [match[0].rstrip() for match in matches if match] + [""]
    lines.append(row_format.format("arm", "rate", "train", "held-out", *(f"block {block}" for block in blocks), "V"))
    for trained in runs:
        loss, heldout = trained.curve.final(study.final_fraction)[0], trained.curve.heldout[shape.steps]
        numbers = [f"{trained.run.shape.learning_rate:g}", f"{loss:.3f}", f"{heldout:.3f}"]
        numbers += [f"{trained.after[block - 1]:.3g}" for block in blocks]
        lines.append(row_format.format(trained.run.arm, *numbers, f"{trained.growth:.2g}"))
    return [
        *lines,
        "",
        "train, held-out: loss in nats per byte (train: mean of the last tenth of the steps). block n: variance of its",
        f"output, mean over {TOKENS:,} held-out tokens. V: block {layers} over block {quarter}.",
        f"Not shown: which arm is better. {shape.parameters:,} parameters and {shape.tokens:,} tokens are far from",
        "real training; the order of the losses changes with rate, depth, length and seed.",
    ]


def draw(runs: Sequence[Trained], path: Path) -> None:
    """Draw loss by step, and output variance by block."""
    import pandas

    from olmo_lns.diagnostics.plots import block_axis, new_figure, save

    shape = runs[0].run.shape
    figure, smoothing = new_figure(4.4, 7.0), max(1, shape.steps // 12)  # legible on a phone
    upper, lower = figure.subplots(2, 1)
    for trained in runs:
        losses = pandas.Series(trained.curve.losses).rolling(smoothing).mean().iloc[shape.steps // 5 :]
        blocks, label = range(1, len(trained.after) + 1), f"{trained.arm.label} ({trained.run.shape.learning_rate:g})"
        style: dict[str, Any] = {"color": trained.arm.colour, "linestyle": trained.arm.line}
        upper.plot(losses.index, losses, **style)
        lower.plot(blocks, trained.after, marker=trained.arm.marker, label=label, **style)
        lower.plot(blocks, trained.before, color=trained.arm.colour, linestyle=":", linewidth=1)
    upper.set(xlabel="step", title=f"training loss (nats per byte, mean of {smoothing} steps)")
    block_axis(lower, len(runs[0].after))
    lower.set(title="output variance (dotted: before training)", yscale="log")
    figure.legend(loc="outside lower center", ncols=1)
    size = f"{shape.parameters / 1e6:.2f}M parameters, {shape.tokens / 1e6:.2f}M bytes of text"
    figure.suptitle(f"OLMo, {shape.layers} blocks, {size};\nin brackets the learning rate", fontsize=9)
    save(figure, path)


def main(argv: Sequence[str]) -> int:
    """Run ``olmo-lns demo``. Exit code 130 after Ctrl-C."""
    parser = Parser(
        prog="olmo-lns demo",
        description="Train a small OLMo of 24 blocks as Pre-LN, Pre-LN with scaled initialization and LNS; measure the "
        "variance of every block's output. After Ctrl-C the same command resumes the runs.",
    )
    help_text = "description of the runs: demo (the default), demo-long (16 tokens per parameter), or a file"
    parser.add_argument("study", nargs="?", default="demo", help=help_text)
    parser.add_argument("--out", type=Path, default=Path("demo"), help="output folder (default %(default)s)")
    args = parser.parse_args(argv)
    settings.refuse_disabled()
    check_environment()
    one_process("the demo")
    import matplotlib  # noqa: F401  report a missing package before the work
    import olmo  # noqa: F401

    out, study = args.out, Study.load(args.study)
    if study.data != "demo":
        raise LNSConfigError(f"{study.path}: expected a description with data: demo, found {study.data}")
    print(f"{len(study.runs)} runs of {study.runs[0].shape.steps} steps in {out}; loading OLMo ...", flush=True)
    out.mkdir(parents=True, exist_ok=True)
    os.environ.update(environment(study, out))
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # end as on Ctrl-C
    try:
        with files.exclusive_lock(out / ".lock", f"{out}: another demo is running there") as lock:
            build(out / "data")
            train(study, out, lock)
            trained_runs = [
                Trained(run, curve_so_far(run, out), variance(run, 0, out), variance(run, run.shape.steps, out))
                for run in study.runs
            ]
    except KeyboardInterrupt:
        print(f"Stopped. To resume: olmo-lns {shlex.join(['demo', *argv])}")
        return 130
    lines = report(trained_runs, study, out)
    write_whole(out / "report.txt", "\n".join(lines) + "\n")
    draw(trained_runs, out / "demo.png")
    print("", *lines, "", f"figure  {out / 'demo.png'}", sep="\n")
    print("next    add --model.layer_norm_type=lns to your OLMo launch: docs/olmo.md")
    return 0
