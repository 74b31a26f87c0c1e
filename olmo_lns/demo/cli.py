"""Command line of the demo: data, then one run after the other, then the report."""

from __future__ import annotations

import argparse
import importlib.util
import math
import os
import shlex
import sys
import threading
import time
import warnings
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Iterator, Sequence

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from olmo_lns import extras
from olmo_lns.arguments import above_zero, at_least
from olmo_lns.demo.config import Shape, base, default_arms, make_study, parse_arms, train_config
from olmo_lns.environment import processes, refuse_disabled
from olmo_lns.errors import LNSConfigError
from olmo_lns.study.arms import ARMS, check_environment
from olmo_lns.study.corpora import BUILT
from olmo_lns.study.engines import OLMO
from olmo_lns.study.processes import cores
from olmo_lns.study.text import Text

if TYPE_CHECKING:
    from olmo_lns.demo.runs import Run

__all__ = ["main", "parser"]

#: The description of what was asked for, until it is known that the folder takes it.
_ASKED = ".study.yaml"
#: Matrices of 128 columns do not keep more cores busy, and a container may own fewer than it shows.
MOST_THREADS = 4


def _seeds(text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts or not all(part.isdecimal() for part in parts):
        raise argparse.ArgumentTypeError(f"expected whole numbers >= 0 separated by commas, got {text!r}")
    seeds = [int(part) for part in parts]
    if twice := sorted({seed for seed in seeds if seeds.count(seed) > 1}):
        raise argparse.ArgumentTypeError(f"{twice[0]} is listed twice in {text!r}")
    return seeds


def parser() -> argparse.ArgumentParser:
    shape, steps = Shape.default(), base()["max_duration"]
    known = [name for name, arm in ARMS.items() if OLMO.arm(arm) is not None]
    out = argparse.ArgumentParser(
        prog="olmo-lns demo",
        description="Train a deep small OLMo model as Pre-LN, Pre-LN with scaled initialization and LNS; compare.",
        epilog="Interrupt with Ctrl-C and run the same command again: finished arms are kept, the other continues.",
    )
    out.add_argument("--steps", type=at_least(1), default=steps, help="optimizer steps an arm (%(default)s)")
    out.add_argument("--arms", default=",".join(default_arms()), help=f"of {', '.join(known)} (default: %(default)s)")
    out.add_argument("--seeds", type=_seeds, default=[0], help="comma-separated; every arm under each (0)")
    out.add_argument("--out", type=Path, default=Path("demo"), help="folder for everything (%(default)s)")
    out.add_argument("--layers", type=at_least(1), default=shape.layers, help="blocks, at least 2 (%(default)s)")
    out.add_argument("--d-model", type=at_least(1), default=shape.d_model, help="width, a multiple of 8 (%(default)s)")
    out.add_argument("--sequence", type=at_least(1), default=shape.sequence, help="tokens a sequence (%(default)s)")
    out.add_argument("--batch", type=at_least(1), default=shape.batch, help="sequences a step (%(default)s)")
    out.add_argument("--learning-rate", type=above_zero, default=shape.learning_rate, help="peak (%(default)s)")
    out.add_argument("--init-std", type=above_zero, default=shape.init_std, help="of every matrix (%(default)s)")
    out.add_argument("--threads", type=at_least(1), default=None, help="CPU threads (the idle ones, at most 4)")
    out.add_argument("--overwrite", action="store_true", help="replace runs of another configuration in --out")
    return out


def _shape(args: argparse.Namespace) -> Shape:
    if args.layers < 2:
        raise LNSConfigError(f"--layers {args.layers}: expected at least 2, the arms differ in how blocks compare")
    shape = Shape.default()
    if args.d_model % (2 * shape.heads):
        raise LNSConfigError(f"--d-model {args.d_model}: expected a multiple of {2 * shape.heads}")
    given = ("layers", "d_model", "sequence", "batch", "learning_rate", "init_std")
    return replace(shape, **{name: getattr(args, name) for name in given})


def _require_packages() -> None:
    for name, extra in (("olmo", "olmo"), ("matplotlib", "analysis")):
        if importlib.util.find_spec(name) is None:
            raise LNSConfigError(f"the demo needs {name} (extra {extra}): {extras.advice('olmo,analysis')}")


def _set_threads(threads: int | None) -> None:
    import torch

    if threads is not None:
        torch.set_num_threads(threads)
    elif "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(_free_cores())


def _free_cores() -> int:
    """At most ``MOST_THREADS``: threads that share a core with other work wait for one another at every operation."""
    busy = round(os.getloadavg()[0]) if hasattr(os, "getloadavg") else 0
    return max(1, min(cores() - busy, MOST_THREADS))


def _plan(args: argparse.Namespace, arms: list[str], shape: Shape, data: Text, device: str) -> list[Run]:
    from olmo_lns.demo.runs import Run

    runs = []
    for run in make_study(args.out / _ASKED, arms, args.seeds, args.steps, shape).runs:
        folder = args.out.absolute() / run.arm / f"seed{run.seed}"
        config = train_config(run, data, folder)
        config.model.init_device = device
        runs.append(Run(run.arm, run.seed, config, folder))
    return runs


class _Display:
    """Progress over all runs; where there is no terminal, a line every ten seconds, by a thread: steps may be slow."""

    EVERY = 10.0

    def __init__(self, console: Console, runs: Sequence[Run]) -> None:
        self.console, self.runs = console, runs
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[where]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
        )
        self.progress = Progress(*columns, console=console, speed_estimate_period=120, disable=not console.is_terminal)
        self.line = f"{runs[0].arm} (1/{len(runs)}): loading OLMo and building the model"
        self.ended = threading.Event()
        self.task: TaskID = self.progress.add_task("demo", total=sum(run.steps for run in runs), where="")

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Show it while the body goes."""
        thread = threading.Thread(target=self._print_lines, daemon=True)
        if not self.console.is_terminal:
            thread.start()
        try:
            with self.progress:
                yield
        finally:
            self.ended.set()
            if thread.is_alive():
                thread.join()

    def _print_lines(self) -> None:
        started = time.monotonic()
        while not self.ended.wait(self.EVERY):
            self.console.print(f"[{time.monotonic() - started:.0f} s] {self.line}", markup=False, highlight=False)

    def step(self, index: int, step: int, loss: float) -> None:
        run = self.runs[index]
        done = sum(earlier.steps for earlier in self.runs[:index]) + step
        shown = "" if math.isnan(loss) else f"loss {loss:.3f}"
        name = f"{run.arm} ({index + 1}/{len(self.runs)})"
        self.progress.update(self.task, completed=done, description=name, where=f"step {step}/{run.steps} {shown}")
        after = ", now evaluating and saving" if step == run.steps else ""
        self.line = f"{name}: step {step}/{run.steps} {shown}".rstrip() + after


def _execute_all(runs: Sequence[Run], console: Console, device: object) -> None:
    from functools import partial

    from olmo_lns.demo.runs import execute

    display = _Display(console, runs)
    with display.shown():
        for index, run in enumerate(runs):
            if run.result() is None:
                execute(run, device, partial(display.step, index))  # type: ignore[arg-type]
            else:
                display.step(index, run.steps, math.nan)


def main(argv: Sequence[str]) -> int:
    """Run ``olmo-lns demo``. Exit code 130 after Ctrl-C."""
    args = parser().parse_args(argv)
    refuse_disabled()
    check_environment()
    if (world := processes()) > 1:  # each would write the same files
        raise LNSConfigError(f"the demo runs in one process: found WORLD_SIZE={world}; start it without torchrun")
    arms, shape = parse_arms(args.arms), _shape(args)
    _require_packages()
    console = Console()
    # OLMo enters CUDA's autocast on every machine, and calls OmegaConf by an old name.
    for message in (".*CUDA is not available.*", ".*register_new_resolver.*"):
        warnings.filterwarnings("ignore", message=message, category=UserWarning)
    from olmo_lns.integrations.olmo import register

    register()
    from olmo_lns.demo.runs import Interrupted
    from olmo_lns.processes import process_group

    _set_threads(args.threads)
    console.print("Reading Python's library and manual ...")
    data: Text = BUILT["demo"].build(args.out / "data")
    console.print(f"{data.train_tokens:,} bytes to train on, {data.heldout_tokens:,} held out.")
    with process_group() as device:
        runs = _plan(args, arms, shape, data, device.type)
        for run in runs:
            run.claim(overwrite=args.overwrite)
        (args.out / _ASKED).replace(args.out / "study.yaml")  # now that the folder is this study's
        try:
            _execute_all(runs, console, device)
        except (Interrupted, KeyboardInterrupt):
            _report(runs, args.out, shape, data, console, complete=False)
            from olmo_lns.demo import report

            command = shlex.join([report.program_name(), "demo", *argv])
            console.print(
                f"\nStopped; what was done is kept. To go on, run the same command again: {command}", soft_wrap=True
            )
            return 130
    _report(runs, args.out, shape, data, console, complete=True)
    return 0


def _report(runs: Sequence[Run], out: Path, shape: Shape, data: Text, console: Console, *, complete: bool) -> None:
    from olmo_lns.demo import report

    results = [result for run in runs if (result := run.result()) is not None]
    console.print("\n".join(f"{run.arm} seed {run.seed}: {_state(run)}" for run in runs))
    if not results:
        return
    paths = report.write(runs, out, shape, data, complete=complete)
    console.print(report.table(results))
    for line in report.notes(results, shape):
        console.print(line, soft_wrap=not console.is_terminal)
    console.print("\n" + "\n".join(f"{name:<10} {path}" for name, path in paths.items()))
    finished = [run for run in runs if run.result() is not None]
    console.print("\nNext:\n" + "\n".join(f"  {line}" for line in report.next_commands(finished, data)), soft_wrap=True)


def _state(run: Run) -> str:
    if (result := run.result()) is not None:
        return f"finished in {result.seconds:.0f} s"
    if not run.losses():
        return "not started"
    return f"saved at step {run.saved_step} of {run.steps}" if run.saved_step else "no checkpoint yet: starts anew"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
