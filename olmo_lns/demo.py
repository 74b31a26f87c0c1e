"""``olmo-lns demo``: three small runs of ``olmo-lns train``, the variance of their blocks, one figure.

``configs/study/demo.yaml`` (``--long``: ``demo-long.yaml``) describes the runs.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import signal
import sys
import time
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Sequence, cast

import yaml
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from olmo_lns import settings
from olmo_lns.arguments import at_least
from olmo_lns.errors import LNSConfigError, LNSError, did_you_mean
from olmo_lns.processes import one_process
from olmo_lns.study import files
from olmo_lns.study.arms import ARMS, Arm, check_environment
from olmo_lns.study.collect import Curve, attempts, curve_of
from olmo_lns.study.data.corpora import build
from olmo_lns.study.describe import Run, Study
from olmo_lns.study.launch import environment, start
from olmo_lns.text import write_whole

TOKENS = 32_768  #: held-out tokens over which a variance is averaged


def parser() -> argparse.ArgumentParser:
    out = argparse.ArgumentParser(
        prog="olmo-lns demo",
        description="Train a small OLMo of 24 blocks as Pre-LN, Pre-LN with scaled initialization and LNS; measure the "
        "variance of every block's output.",
        epilog="After Ctrl-C the same command resumes the runs. For other rates and seeds, edit a copy of the "
        "study.yaml in the output folder and pass it to `olmo-lns study`.",
    )
    out.add_argument("--long", action="store_true", help="16 tokens per parameter, each arm at its best learning rate")
    out.add_argument("--steps", type=at_least(1), help="optimizer steps of each run (default: the description's)")
    out.add_argument("--layers", type=at_least(2), help="number of blocks (default: the description's)")
    out.add_argument("--arms", help="arms of the description, comma-separated: preln,lns")
    out.add_argument("--out", type=Path, default=Path("demo"), help="output folder (default %(default)s)")
    return out


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


def describe(args: argparse.Namespace) -> dict[str, Any]:
    """Return the pack's description with the options applied.

    :raises LNSConfigError: the description lacks an arm, or the folder holds a demo with other settings.
    """
    path = files.pack_folder() / "study" / ("demo-long.yaml" if args.long else "demo.yaml")
    study = files.read(path)
    arms = [arm.strip() for arm in args.arms.split(",")] if args.arms is not None else study["arms"]
    if unknown := [arm for arm in arms if arm not in study["arms"]]:
        hint = did_you_mean(unknown[0], study["arms"])
        raise LNSConfigError(f"--arms {args.arms}: {unknown[0]!r}{hint}: expected some of {', '.join(study['arms'])}")
    changes: dict[str, Any] = {"model.n_layers": args.layers} if args.layers else {}
    if args.steps:
        changes |= {"max_duration": args.steps, "scheduler.t_warmup": max(1, min(20, args.steps // 10))}
    only = {size: [arm for arm in some if arm in arms] for size, some in study["only"].items()}
    study["only"] = {size: some for size, some in only.items() if some}
    study |= {"config": str(path.with_name(study["config"])), "arms": [arm for arm in study["arms"] if arm in arms]}
    study["sizes"] = {size: study["sizes"][size] | changes for size in study["only"]}
    if (there := args.out / "study.yaml").is_file() and files.read(there) != study:
        raise LNSConfigError(f"{there} describes a demo with other settings: use another --out")
    return study


def losses(run: Run, out: Path) -> Curve | None:
    """Read the curve of a run; None before its first loss, and for a run that diverged."""
    with suppress(LNSConfigError):
        return curve_of(out / run.name)
    return None


def finished(run: Run, out: Path) -> bool:
    """Return true if a run has its last checkpoint and its held-out loss."""
    curve, steps = losses(run, out), run.shape.steps
    return curve is not None and steps in curve.heldout and (out / run.name / f"step{steps}-unsharded").exists()


def train(study: Study, out: Path, console: Console, lock: int) -> None:
    """Train the unfinished runs, all at once; print the start-up line of each.

    :param lock: of the folder, as :func:`olmo_lns.study.launch.start` takes it.
    :raises LNSError: a run failed. The other runs finish first.
    """
    todo = [run for run in study.runs if not finished(run, out)]
    going = [(run, start(study, run, out, lock)[1]) for run in todo]
    announced = set[str]()
    columns = (BarColumn(30), TextColumn("{task.description}"), TimeElapsedColumn(), TimeRemainingColumn())
    try:
        with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
            task = bar.add_task("starting", total=sum(run.shape.steps for run, _ in going))
            while any(process.poll() is None for _, process in going):
                time.sleep(0.5)
                done = {run.arm: curve.last for run, _ in going if (curve := losses(run, out))}
                where = ", ".join(f"{arm} {step}" for arm, step in done.items())
                bar.update(task, completed=sum(done.values()), description=where)
                for run in (run for run, _ in going if done.get(run.arm) and run.arm not in announced):
                    announced.add(run.arm)
                    rate = f"learning rate {run.shape.learning_rate:g}, seed {run.seed}"
                    say(console, f"{ARMS[run.arm].label}, {rate}: the run has started")
                    if proof := re.search(r"LayerNorm Scaling on: .*", last_log(run, out)):
                        say(console, f"  {proof[0].rstrip()}")
    finally:
        for _, process in going:  # after Ctrl-C each saves a checkpoint
            process.terminate()
            process.wait()
    for run, _ in going:
        if not finished(run, out):
            last, folder = (last_log(run, out).strip() or "its log is empty").splitlines()[-1], out / run.name
            raise LNSError(f"run {run.name} failed: {last}; see {attempts(folder)[-1]}, remove {folder} to start again")


def last_log(run: Run, out: Path) -> str:
    return attempts(out / run.name)[-1].read_text(encoding="utf-8", errors="replace")


def measure(run: Run, step: int, out: Path) -> list[float]:
    """Measure the output variances of a run after a step, by ``olmo-lns analyze variance``."""
    from olmo_lns.diagnostics.cli import main as analyze
    from olmo_lns.diagnostics.results import Measurement

    folder = out / run.name
    written = folder / f"variance-step{step}.json"
    words = ["variance", "--model", str(folder / f"step{step}-unsharded"), "--label", ARMS[run.arm].label, "--quiet"]
    words += ["--data", str(out / "data" / "heldout.npy"), "--tokens", str(TOKENS), "-o", str(written)]
    with (out / "demo.log").open("a", encoding="utf-8") as log, redirect_stdout(log):
        analyze(words)
    return Measurement.read(written).main


def report(runs: Sequence[Trained], study: Study) -> list[str]:
    """Return the lines of the table, with what the runs show and what they do not."""
    layers, shape = len(runs[0].after), runs[0].run.shape
    quarter = max(1, layers // 4)
    blocks = sorted({1, quarter, max(1, layers // 2), layers})
    form = "{:<24}{:>8}{:>8}{:>10}" + "{:>10}" * len(blocks) + "{:>6}"
    lines = [form.format("arm", "rate", "train", "held-out", *(f"block {block}" for block in blocks), "V")]
    for each in runs:
        loss, heldout = each.curve.final(study.final_fraction)[0], each.curve.heldout[shape.steps]
        numbers = [f"{each.run.shape.learning_rate:g}", f"{loss:.3f}", f"{heldout:.3f}"]
        numbers += [f"{each.after[block - 1]:.3g}" for block in blocks]
        lines.append(form.format(each.run.arm, *numbers, f"{each.growth:.2g}"))
    growth = ", ".join(f"{each.growth:.2g} ({each.arm.label})" for each in runs)
    return [
        *lines,
        "",
        "train, held-out: loss in nats per byte (train: mean of the last tenth of the steps). block n: variance of its "
        f"output over its features, mean over {TOKENS:,} held-out tokens. V: block {layers} over block {quarter}.",
        f"Shown: after {shape.tokens:,} tokens V is {growth}.",
        f"Not shown: which arm is better. {shape.parameters:,} parameters and {shape.tokens:,} tokens are far from "
        "real training; the order of the losses changes with rate, depth, length and seed.",
    ]


def draw(runs: Sequence[Trained], path: Path) -> None:
    """Draw loss by step, and output variance by block."""
    import pandas

    from olmo_lns.diagnostics.plots import block_axis, new_figure, save

    shape = runs[0].run.shape
    figure, smoothing = new_figure(4.4, 7.0), max(1, shape.steps // 12)  # legible on a phone
    upper, lower = figure.subplots(2, 1)
    late: list[float] = []
    for each in runs:
        losses = pandas.Series(each.curve.losses).rolling(smoothing).mean().dropna()
        late += losses.iloc[len(losses) // 10 :].tolist()
        style: dict[str, Any] = {"color": each.arm.colour, "linestyle": each.arm.line}
        upper.plot(losses.index, losses, **style)
        blocks, label = range(1, len(each.after) + 1), f"{each.arm.label} ({each.run.shape.learning_rate:g})"
        lower.plot(blocks, each.after, marker=each.arm.marker, label=label, **style)
        lower.plot(blocks, each.before, color=each.arm.colour, linestyle=":", linewidth=1)
    upper.set(xlabel="step", title=f"training loss (nats per byte, mean of {smoothing} steps)")
    upper.set_ylim(min(late) - 0.1, max(late) + 0.1)
    block_axis(lower, len(runs[0].after))
    lower.set(title="output variance (dotted: before training)", yscale="log")
    figure.legend(loc="outside lower center", ncols=1)
    size = f"{shape.parameters / 1e6:.2f}M parameters, {shape.tokens / 1e6:.2f}M bytes of text"
    figure.suptitle(f"OLMo, {shape.layers} blocks, {size};\nin brackets the learning rate", fontsize=9)
    save(figure, path)


def say(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def main(argv: Sequence[str]) -> int:
    """Run ``olmo-lns demo``. Exit code 130 after Ctrl-C."""
    args = parser().parse_args(argv)
    settings.refuse_disabled()
    check_environment()
    one_process("the demo")
    import matplotlib  # noqa: F401  report a missing package before the work
    import olmo  # noqa: F401

    out, console, described = args.out, Console(file=sys.stdout), describe(args)
    out.mkdir(parents=True, exist_ok=True)
    write_whole(out / "study.yaml", yaml.safe_dump(described, sort_keys=False))
    study = Study.load(out / "study.yaml")
    say(
        console, f"{len(study.runs)} runs of {study.runs[0].shape.steps} steps in {out}; reading text, loading OLMo ..."
    )
    os.environ.update(environment(study, out))
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # end as on Ctrl-C
    try:
        with files.only_one(out / ".lock", f"{out}: another demo is running there") as lock:
            build(out / "data")
            train(study, out, console, lock)
            found = [
                Trained(
                    run, cast(Curve, curve_of(out / run.name)), measure(run, 0, out), measure(run, run.shape.steps, out)
                )
                for run in study.runs
            ]
    except KeyboardInterrupt:
        say(console, f"Stopped. To resume: olmo-lns {shlex.join(['demo', *argv])}")
        return 130
    lines = report(found, study)
    write_whole(out / "report.txt", "\n".join(lines) + "\n")
    for line in ("", *lines, ""):
        console.print(line, markup=False, highlight=False, soft_wrap=not console.is_terminal)
    draw(found, out / "demo.png")
    say(console, f"figure  {out / 'demo.png'}")
    say(console, "next    add --model.layer_norm_type=lns to your OLMo launch: docs/olmo.md")
    return 0
