"""``olmo-lns demo``: three small runs of ``olmo-lns train``, the variance of their blocks, one figure.

``configs/study/demo.yaml`` (``--long``: ``demo-long.yaml``) describes the runs.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import signal
import statistics
import subprocess
import sys
import time
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Sequence

import yaml
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from olmo_lns import settings
from olmo_lns.arguments import at_least
from olmo_lns.errors import LNSConfigError, LNSError
from olmo_lns.processes import one_process
from olmo_lns.study import files
from olmo_lns.study.arms import ARMS, Arm, check_environment
from olmo_lns.study.data.corpora import build
from olmo_lns.text import write_whole

TOKENS = 32_768  #: held-out tokens of which a variance is the mean
INIT_FNS = {"plain": "normal", "scaled": "normal_scaled"}
_LOSS = re.compile(r"\[step=(\d+)/.*\n(?:    .*\n)*?    train/CrossEntropyLoss=(\S+)")
_HELDOUT = re.compile(r"eval/heldout/CrossEntropyLoss=(\S+)")


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


@dataclass
class DemoRun:
    """One run, and what was found of it.

    :param settings: overrides of the config, the steps and the learning rate among them.
    :param before, after: output variance of each block before and after training, block 1 first.
    """

    arm: Arm
    seed: int
    folder: Path
    settings: dict[str, Any]
    before: list[float] = field(default_factory=list)
    after: list[float] = field(default_factory=list)

    @property
    def log(self) -> str:
        path = self.folder / "train.log"
        return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""

    @property
    def steps(self) -> int:
        return int(self.settings["max_duration"])

    @property
    def rate(self) -> float:
        return float(self.settings["optimizer.learning_rate"])

    @property
    def losses(self) -> dict[int, float]:
        """Step -> training loss in nats per byte, as OLMo printed it."""
        return {int(step): float(loss) for step, loss in _LOSS.findall(self.log)}

    @property
    def heldout(self) -> float | None:
        """The held-out loss after the last step; None before it."""
        found = _HELDOUT.findall(self.log) if self.checkpoint(self.steps).exists() else []
        return float(found[-1]) if found else None

    @property
    def growth(self) -> float:
        """V, the variance of the last block over that of block L/4."""
        return self.after[-1] / self.after[max(1, len(self.after) // 4) - 1]

    def checkpoint(self, step: int) -> Path:
        return self.folder / f"step{step}-unsharded"

    def start(self, config: str) -> subprocess.Popen[bytes]:
        """Start it, or go on from its last checkpoint."""
        self.folder.mkdir(parents=True, exist_ok=True)
        kind = "rms" if self.arm.scheme.is_pre_ln else f"{self.arm.scheme.name}_rms"
        settings = {"run_name": self.folder.name, "seed": self.seed, "save_folder": self.folder.resolve()}
        settings |= {"model.layer_norm_type": kind, "model.init_fn": INIT_FNS[self.arm.initialization]}
        settings |= {"save_overwrite": "true", "try_load_latest_save": "true"} | self.settings
        words = [sys.executable, "-m", "olmo_lns", "train", config, *(f"--{k}={v}" for k, v in settings.items())]
        with (self.folder / "train.log").open("ab") as log:
            return subprocess.Popen(words, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)


def describe(args: argparse.Namespace) -> dict[str, Any]:
    """The pack's description with what was asked for.

    :raises LNSConfigError: an arm that the description doesn't have, or a folder of a demo with other settings.
    """
    path = files.pack_folder() / "study" / ("demo-long.yaml" if args.long else "demo.yaml")
    study = files.read(path)
    arms = [arm.strip() for arm in args.arms.split(",")] if args.arms is not None else study["arms"]
    if not set(arms) <= set(study["arms"]):
        raise LNSConfigError(f"--arms {args.arms}: expected some of {', '.join(study['arms'])}")
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


def train(runs: Sequence[DemoRun], config: str, console: Console) -> None:
    """Train what isn't finished, all runs at once; each is announced with the line that proves its scheme.

    :raises LNSError: a run failed. The others go on to their end.
    """
    going = [(run, run.start(config)) for run in runs if run.heldout is None]
    announced = set[str]()
    columns = (BarColumn(30), TextColumn("{task.description}"), TimeElapsedColumn(), TimeRemainingColumn())
    try:
        with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
            task = bar.add_task("starting", total=sum(run.steps for run, _ in going))
            while any(process.poll() is None for _, process in going):
                time.sleep(0.5)
                done = {run.arm.name: max(run.losses, default=0) for run, _ in going}
                where = ", ".join(f"{arm} {step}" for arm, step in done.items())
                bar.update(task, completed=sum(done.values()), description=where)
                for run in (run for run, _ in going if done[run.arm.name] and run.arm.name not in announced):
                    announced.add(run.arm.name)
                    say(console, f"{run.arm.label}, learning rate {run.rate:g}, seed {run.seed}: the run has started")
                    if proof := re.search(r"LayerNorm Scaling on: .*", run.log):
                        say(console, f"  {proof[0].rstrip()}")
    finally:
        for _, process in going:  # after Ctrl-C each saves a checkpoint
            process.terminate()
            process.wait()
    for run, _ in going:
        if run.heldout is None:
            last = (run.log.strip() or "its log is empty").splitlines()[-1]
            raise LNSError(
                f"run {run.folder.name} failed: {last}; see {run.folder}/train.log, remove the folder to start anew"
            )


def measure(runs: Sequence[DemoRun], out: Path) -> None:
    """Measure the variances before and after training by ``olmo-lns analyze variance``."""
    from olmo_lns.diagnostics.cli import main as analyze
    from olmo_lns.diagnostics.results import Measurement

    for run in runs:
        for step in (0, run.steps):
            written = run.folder / f"variance-step{step}.json"
            words = ["variance", "--model", str(run.checkpoint(step)), "--label", run.arm.label, "--quiet"]
            words += ["--data", str(out / "data" / "heldout.npy"), "--tokens", str(TOKENS), "-o", str(written)]
            with (out / "demo.log").open("a", encoding="utf-8") as log, redirect_stdout(log):
                analyze(words)
            run.before, run.after = run.after, Measurement.read(written).main


def report(runs: Sequence[DemoRun], tokens: int, parameters: int) -> list[str]:
    """The table, what the run shows, and what it doesn't."""
    layers = len(runs[0].after)
    quarter = max(1, layers // 4)
    blocks = sorted({1, quarter, max(1, layers // 2), layers})
    form = "{:<24}{:>8}{:>8}{:>10}" + "{:>10}" * len(blocks) + "{:>6}"
    lines = [form.format("arm", "rate", "train", "held-out", *(f"block {block}" for block in blocks), "V")]
    for run in runs:
        tail = [loss for step, loss in run.losses.items() if step > run.steps - max(1, round(0.1 * run.steps))]
        numbers = [f"{run.rate:g}", f"{statistics.fmean(tail):.3f}", f"{run.heldout:.3f}"]
        numbers += [f"{run.after[block - 1]:.3g}" for block in blocks]
        lines.append(form.format(run.arm.name, *numbers, f"{run.growth:.2g}"))
    growth = ", ".join(f"{run.growth:.2g} ({run.arm.label})" for run in runs)
    return [
        *lines,
        "",
        "train, held-out: loss in nats per byte (train: mean of the last tenth of the steps). block n: variance of its "
        f"output over its features, mean over {TOKENS:,} held-out tokens. V: block {layers} over block {quarter}.",
        f"Shown: after {tokens:,} tokens V is {growth}.",
        f"Not shown: which arm is better. {parameters:,} parameters and {tokens:,} tokens are far from any training "
        "that matters; the order of the losses changes with rate, depth, length and seed.",
    ]


def draw(runs: Sequence[DemoRun], size: str, path: Path) -> None:
    """Loss by step, and output variance by block."""
    import pandas

    from olmo_lns.diagnostics.plots import block_axis, new_figure, save

    figure, smoothing = new_figure(10, 4), max(1, runs[0].steps // 12)
    left, right = figure.subplots(1, 2)
    late: list[float] = []
    for run in runs:
        losses = pandas.Series(run.losses).rolling(smoothing).mean().dropna()
        late += losses.iloc[len(losses) // 10 :].tolist()
        style: dict[str, Any] = {"color": run.arm.colour, "linestyle": run.arm.line}
        left.plot(losses.index, losses, **style)
        blocks, label = range(1, len(run.after) + 1), f"{run.arm.label} ({run.rate:g})"
        right.plot(blocks, run.after, marker=run.arm.marker, label=label, **style)
        right.plot(blocks, run.before, color=run.arm.colour, linestyle=":", linewidth=1)
    left.set(xlabel="step", ylabel=f"training loss (nats per byte, mean of {smoothing} steps)")
    left.set_ylim(min(late) - 0.1, max(late) + 0.1)
    block_axis(right, len(runs[0].after))
    right.set(ylabel="output variance (dotted: before training)", yscale="log")
    figure.legend(loc="outside lower center", ncols=4)
    figure.suptitle(f"OLMo, {len(runs[0].after)} blocks, {size}; in brackets the learning rate", fontsize=10)
    save(figure, path)


def say(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def main(argv: Sequence[str]) -> int:
    """Run ``olmo-lns demo``. Exit code 130 after Ctrl-C."""
    args = parser().parse_args(argv)
    settings.refuse_disabled()
    check_environment()
    one_process("the demo")
    import matplotlib  # noqa: F401  what is missing is said before the work
    import olmo  # noqa: F401

    out, console, study = args.out, Console(file=sys.stdout), describe(args)
    base = files.read(Path(study["config"]))
    runs = [
        DemoRun(ARMS[arm], seed, out / f"{size}-{arm}-s{seed}", study["sizes"][size])
        for size, arms in study["only"].items()
        for arm in arms
        for seed in study["seeds"]
    ]
    say(console, f"{len(runs)} runs of {runs[0].steps} steps in {out}; reading text, loading OLMo ...")
    out.mkdir(parents=True, exist_ok=True)
    write_whole(out / "study.yaml", yaml.safe_dump(study, sort_keys=False))
    os.environ.update(OLMO_DATA_DIR=str((out / "data").resolve()), OLMO_SAVE_DIR=str(out.resolve()))
    os.environ.update(OMP_NUM_THREADS="1")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends as after Ctrl-C
    try:
        build(out / "data")
        train(runs, study["config"], console)
        measure(runs, out)
    except KeyboardInterrupt:
        say(console, f"Stopped. To go on: olmo-lns {shlex.join(['demo', *argv])}")
        return 130
    tokens = runs[0].steps * int(base["global_train_batch_size"]) * int(base["model"]["max_sequence_length"])
    parameters = int(re.findall(r"INFO\s+(\d+) parameters \(", runs[0].log)[0])
    lines = report(runs, tokens, parameters)
    write_whole(out / "report.txt", "\n".join(lines) + "\n")
    for line in ("", *lines, ""):
        console.print(line, markup=False, highlight=False, soft_wrap=not console.is_terminal)
    draw(runs, f"{parameters / 1e6:.2f}M parameters, {tokens / 1e6:.2f}M bytes of text", out / "demo.png")
    say(console, f"figure  {out / 'demo.png'}")
    return 0
