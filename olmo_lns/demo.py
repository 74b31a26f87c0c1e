"""``olmo-lns demo``: a study of three small runs, the variance of their blocks, one figure.

The runs are those of ``configs/study/demo.yaml`` (``--long``: ``demo-long.yaml``), started, resumed and collected as
every study's; the variances are measured by ``olmo-lns analyze variance`` on the checkpoints before and after training.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import sys
import threading
import time
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Iterator, Sequence

import yaml
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from olmo_lns.arguments import at_least
from olmo_lns.environment import refuse_disabled
from olmo_lns.errors import LNSConfigError
from olmo_lns.extras import require
from olmo_lns.processes import one_process
from olmo_lns.study import files
from olmo_lns.study.arms import ARMS, check_environment
from olmo_lns.study.collect.folder import attempts, merge, read
from olmo_lns.study.collect.gather import Result, write_results
from olmo_lns.study.launch.start import environment, run_here
from olmo_lns.study.plan.spec import Run, Study

TOKENS = 32_768  #: held-out tokens of which a variance is the mean
START, MEASURE = 8, 4  #: a run's start and the measurement of a checkpoint, in steps of the bar
LOOK, LINE = 0.5, 10.0  #: seconds between the looks at the logs, and between the lines where there is no terminal
_STEP, _EVAL = re.compile(r"\[step=(\d+)/"), re.compile(r"\[eval_step=(\d+)/")


def parser() -> argparse.ArgumentParser:
    out = argparse.ArgumentParser(
        prog="olmo-lns demo",
        description="Train a small OLMo of 24 blocks as Pre-LN, Pre-LN with scaled initialization and LNS; measure the "
        "variance of every block's output.",
        epilog="After Ctrl-C the same command goes on where it stopped. For other rates and seeds change a copy of the "
        "study.yaml in the output folder and give it to `olmo-lns study`.",
    )
    out.add_argument("--long", action="store_true", help="16 tokens a parameter, each arm at its best rate there")
    out.add_argument("--steps", type=at_least(1), help="optimizer steps of each run, instead of the description's")
    out.add_argument("--layers", type=at_least(2), help="blocks, instead of the description's")
    out.add_argument("--arms", help="some of the description's arms, with commas between: preln,lns")
    out.add_argument("--out", type=Path, default=Path("demo"), help="folder for everything (default %(default)s)")
    return out


def describe(args: argparse.Namespace) -> Study:
    """The study of the pack with what was asked for; its description lies in the folder as ``.study.yaml``.

    :raises LNSConfigError: an arm that the description does not have.
    """
    path = files.pack_folder() / "study" / ("demo-long.yaml" if args.long else "demo.yaml")
    raw: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    if args.arms is not None:
        asked = list(dict.fromkeys(filter(None, map(str.strip, args.arms.split(",")))))
        if not asked or not set(asked) <= set(raw["arms"]):
            raise LNSConfigError(f"--arms {args.arms}: expected some of {', '.join(raw['arms'])}")
        raw["arms"] = asked
    changes: dict[str, Any] = {"model.n_layers": args.layers} if args.layers else {}
    if args.steps:
        changes |= {"max_duration": args.steps, "scheduler.t_warmup": max(1, min(20, args.steps // 10))}
    only = {size: [arm for arm in raw["arms"] if arm in arms] for size, arms in raw["only"].items()}
    raw["only"] = {size: arms for size, arms in only.items() if arms}
    raw["sizes"] = {size: raw["sizes"][size] | changes for size in raw["only"]}
    raw["config"] = str(path.with_name(raw["config"]))
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / ".study.yaml").write_text(yaml.safe_dump(raw, sort_keys=False), encoding="utf-8")
    return Study.load(args.out / ".study.yaml")


def _steps(run: Run) -> int:
    return int(run.overrides["max_duration"])


class _Display:
    """One bar over start, training, evaluation and measurements, by the logs; without a terminal a line now and then.

    When a run starts, its arm is named, with the line by which its scheme proves that it is on.
    """

    def __init__(self, console: Console, study: Study, out: Path) -> None:
        self.console, self.study, self.out, self.measured = console, study, out, 0
        config = yaml.safe_load(study.runs[0].config.read_text(encoding="utf-8"))
        self.evaluations = int(config["evaluators"][0]["subset_num_batches"])
        self.total = sum(START + _steps(run) + self.evaluations + 2 * MEASURE for run in study.runs)
        self.announced: set[str] = set()
        self.ended = threading.Event()
        columns = (SpinnerColumn(), BarColumn(30), TextColumn("{task.description}"), TimeElapsedColumn())
        self.bar = Progress(*columns, TimeRemainingColumn(), console=console, disable=not console.is_terminal)
        self.task = self.bar.add_task("", total=self.total)

    @contextmanager
    def shown(self) -> Iterator[None]:
        thread = threading.Thread(target=self._watch, daemon=True)
        with self.bar:
            thread.start()
            try:
                yield
            finally:
                self.ended.set()
                thread.join()

    def _watch(self) -> None:
        started = said = time.monotonic()
        while not self.ended.wait(LOOK):
            done, where = self.look()
            self.bar.update(self.task, completed=done, description=where)
            if not self.console.is_terminal and time.monotonic() - said >= LINE:
                said = time.monotonic()
                self.say(f"[{said - started:.0f} s, {done / self.total:.0%}] {where}")

    def look(self) -> tuple[int, str]:
        """Steps and batches done, and where the runs are."""
        done, parts = self.measured * MEASURE, []
        for run in self.study.runs:
            text = "".join(path.read_text(encoding="utf-8", errors="replace") for path in attempts(self.out / run.name))
            step, batch = (max((int(n) for n in kind.findall(text)), default=0) for kind in (_STEP, _EVAL))
            done += step + batch + min(START, text.count("INFO"))
            proof = re.search(rf"{re.escape(ARMS[run.arm].scheme.definition.title)} on: .*\n", text)
            if (step or proof) and run.name not in self.announced:
                self.announced.add(run.name)
                how = f"learning rate {run.overrides['optimizer.learning_rate']:g}, seed {run.seed}"
                self.say(f"{ARMS[run.arm].label}, {how}: the run has started")
                if proof:
                    self.say(f"  {proof[0].rstrip()}")
            if batch < self.evaluations:
                at = f"evaluating {batch}/{self.evaluations}" if batch else f"{step}/{_steps(run)}"
                parts.append(f"{run.arm} {at if step else 'starting'}")
        return done, ", ".join(parts) or "measuring the variances"

    def say(self, text: str) -> None:
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)


@dataclass(frozen=True)
class Row:
    """One run: its result, and the output variance of each block before and after training, block 1 first.

    :param growth: V, the variance of the last block over that of block L/4.
    """

    run: Run
    result: Result
    before: list[float]
    after: list[float]
    growth: float


def _rows(study: Study, out: Path, display: _Display) -> list[Row]:
    """Collected as every study's; the variances by ``olmo-lns analyze variance``."""
    from olmo_lns.diagnostics.cli import main as analyze
    from olmo_lns.diagnostics.results import Report
    from olmo_lns.study.collect.gather import collect

    results = collect(study, out)
    write_results(results, out / "results.csv")
    rows = []
    for run, result in zip(study.runs, results, strict=True):
        variances = []
        for step in (0, _steps(run)):
            model, written = (out / run.name / f"step{step}-unsharded", out / run.name / f"variance-step{step}.json")
            words = ["variance", "--model", str(model), "--label", ARMS[run.arm].label, "--quiet", "-o", str(written)]
            analyze([*words, "--data", str(out / "data" / "heldout.npy"), "--tokens", str(TOKENS)])
            variances.append(Report.read(written).result.variance)
            display.measured += 1
        before, after = variances
        rows.append(Row(run, result, before, after, after[-1] / after[max(1, len(after) // 4) - 1]))
    return rows


def report(rows: Sequence[Row]) -> list[str]:
    """The table, what the run shows, and what it does not."""
    first, layers = rows[0].result, len(rows[0].after)
    quarter = max(1, layers // 4)
    blocks = sorted({1, quarter, max(1, layers // 2), layers})
    form = "{:<24}{:>8}{:>8}{:>10}" + "{:>10}" * len(blocks) + "{:>6}"
    lines = [form.format("arm", "rate", "train", "held-out", *(f"block {block}" for block in blocks), "V")]
    for row in rows:
        numbers = [f"{row.result.learning_rate:g}", f"{row.result.loss:.3f}", f"{row.result.heldout:.3f}"]
        numbers += [f"{row.after[block - 1]:.3g}" for block in blocks]
        lines.append(form.format(row.run.arm, *numbers, f"{row.growth:.2g}"))
    growth = ", ".join(f"{row.growth:.2g} ({ARMS[row.run.arm].label})" for row in rows)
    return [
        *lines,
        "",
        "train, held-out: loss in nats per byte (train: mean of the last tenth of the steps). block n: variance of its "
        f"output over its features, mean over {TOKENS:,} held-out tokens. V: block {layers} over block {quarter}.",
        f"Shown: after {first.tokens:,} tokens V is {growth}.",
        f"Not shown: which arm is better. {first.parameters:,} parameters and {first.tokens:,} tokens are far from any "
        "training that matters; the order of the losses changes with rate, depth, length and seed.",
    ]


def _draw(rows: Sequence[Row], path: Path) -> None:
    """Loss by step, and output variance by block."""
    import pandas

    from olmo_lns.diagnostics.plots import block_axis, new_figure, save

    figure, smoothing = new_figure(10, 4), max(1, _steps(rows[0].run) // 12)
    left, right = figure.subplots(1, 2)
    late: list[float] = []
    for row in rows:
        arm = ARMS[row.run.arm]
        losses = pandas.Series(merge(read(log) for log in attempts(path.parent / row.run.name)).losses)
        losses = losses.rolling(smoothing).mean().dropna()
        late += losses.iloc[len(losses) // 10 :].tolist()
        style: dict[str, Any] = {"color": arm.colour, "linestyle": arm.line}
        left.plot(losses.index, losses, **style)
        blocks, label = range(1, len(row.after) + 1), f"{arm.label} ({row.result.learning_rate:g})"
        right.plot(blocks, row.after, marker=arm.marker, label=label, **style)
        right.plot(blocks, row.before, color=arm.colour, linestyle=":", linewidth=1)
    left.set(xlabel="step", ylabel=f"training loss (nats per byte, mean of {smoothing} steps)")
    left.set_ylim(min(late) - 0.1, max(late) + 0.1)
    block_axis(right, len(rows[0].after))
    right.set(ylabel="output variance (dotted: before training)", yscale="log")
    figure.legend(loc="outside lower center", ncols=4)
    size = f"{rows[0].result.parameters / 1e6:.2f}M parameters, {rows[0].result.tokens / 1e6:.2f}M bytes of text"
    figure.suptitle(f"OLMo, {len(rows[0].after)} blocks, {size}; in brackets the learning rate", fontsize=10)
    save(figure, path)


def main(argv: Sequence[str]) -> int:
    """Run ``olmo-lns demo``. Exit code 1 where a run failed, 130 after Ctrl-C."""
    args = parser().parse_args(argv)
    refuse_disabled()
    check_environment()
    one_process("the demo")
    require("olmo", "matplotlib")
    out, console = args.out, Console(file=sys.stdout)
    study = describe(args)
    os.environ.update(environment(study, out))  # what its config reads
    display = _Display(console, study, out)
    display.say(f"{len(study.runs)} runs of {_steps(study.runs[0])} steps in {out}; reading text, loading OLMo ...")
    try:
        with (out / "demo.log").open("a", encoding="utf-8") as log, display.shown(), redirect_stdout(log):
            if failed := run_here(study, study.runs, out):
                return min(1, failed)
            study.path.replace(out / "study.yaml")  # now that the folder has taken it
            rows = _rows(study, out, display)
    except KeyboardInterrupt:
        display.say(f"Stopped: {display.look()[1]}. To go on: olmo-lns {shlex.join(['demo', *argv])}")
        return 130
    for line in ("", *report(rows), ""):
        console.print(line, markup=False, highlight=False, soft_wrap=not console.is_terminal)
    _draw(rows, out / "demo.png")  # the seconds of matplotlib, after what can be read meanwhile
    display.say(f"figure  {out / 'demo.png'}")
    return 0
