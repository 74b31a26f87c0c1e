"""What the demo prints and writes at its end: table, JSON, CSV, and what the numbers mean."""

from __future__ import annotations

import csv
import json
import platform
import shutil
import sys
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Sequence

from rich import box
from rich.table import Table

from olmo_lns import __version__
from olmo_lns.demo.config import Shape
from olmo_lns.demo.runs import Result, Run
from olmo_lns.study.arms import ARMS, settings_of
from olmo_lns.study.engines import OLMO

if TYPE_CHECKING:
    from olmo_lns.study.text import Text

__all__ = ["next_commands", "notes", "table", "title", "write"]


def _reported_blocks(layers: int) -> list[int]:
    """1-based: the first, L/4, L/2 and L."""
    return sorted({1, max(1, layers // 4), max(1, layers // 2), layers})


def _by_arm(results: Sequence[Result]) -> dict[str, list[Result]]:
    arms: dict[str, list[Result]] = {}
    for result in results:
        arms.setdefault(result.arm, []).append(result)
    return arms


def _spread(values: Sequence[float], digits: int) -> str:
    """The mean, and over several seeds the range."""
    mean = f"{sum(values) / len(values):.{digits}f}"
    return mean if len(values) == 1 else f"{mean} ({min(values):.{digits}f}–{max(values):.{digits}f})"


def _variances(values: Sequence[float]) -> str:
    """As :func:`_spread`, for numbers of any size."""

    def short(value: float) -> str:
        return f"{value:.3g}" if value >= 0.01 else f"{value:.1e}"

    mean = short(sum(values) / len(values))
    return mean if len(values) == 1 else f"{mean} ({short(min(values))}–{short(max(values))})"


def table(results: Sequence[Result]) -> Table:
    """Arm, losses, output variance of four blocks, growth V."""
    layers = len(results[0].variance)
    out = Table(box=box.SIMPLE, padding=(0, 1, 0, 0))
    out.add_column("arm", no_wrap=True)
    for name in ("train", "held-out", *(f"var b{block}" for block in _reported_blocks(layers)), "V"):
        out.add_column(name, justify="right")
    for arm, group in _by_arm(results).items():
        variances = [_variances([r.variance[b - 1] for r in group]) for b in _reported_blocks(layers)]
        losses = [_spread([r.train_loss for r in group], 3), _spread([r.heldout_loss for r in group], 3)]
        out.add_row(arm, *losses, *variances, _spread([r.growth for r in group], 1))
    return out


def title(results: Sequence[Result], shape: Shape) -> str:
    """One line that says what was trained, for the figure."""
    first = results[0]
    tokens = first.steps * shape.batch * shape.sequence
    seeds = len({result.seed for result in results})
    return (
        f"OLMo, {shape.layers} blocks, {first.parameters / 1e6:.1f}M parameters, {first.steps} steps = "
        f"{tokens / 1e6:.2f}M bytes of Python's library, {seeds} seed{'s' * (seeds > 1)}"
    )


def notes(results: Sequence[Result], shape: Shape) -> list[str]:
    """What the paper claims, what this run shows, and what it does not: sentences for a reader."""
    arms = _by_arm(results)
    tokens = results[0].steps * shape.batch * shape.sequence
    mean = {arm: sum(r.heldout_loss for r in group) / len(group) for arm, group in arms.items()}
    growth = {arm: sum(r.growth for r in group) / len(group) for arm, group in arms.items()}
    lowest = min(mean, key=lambda arm: mean[arm])
    lines = [
        "train, held-out: loss in nats per byte (train: mean of the last tenth of the steps). var b1 ...: variance of "
        "that block's output over its features, mean over held-out tokens. V: growth from block L/4 to block L.",
        "The paper (arXiv 2502.05795) claims, at 20B tokens and 60M to 7B parameters: LNS ends below Pre-LN at every "
        "size, and at 1B also below OLMo's scaled initialization.",
        f"This run has {results[0].parameters / 1e6:.1f}M parameters and {tokens / 1e6:.2f}M tokens an arm, about "
        f"1/{round(20e9 / tokens, -3):,.0f} of that budget. What it shows: how the output variance grows with depth, "
        f"V = {', '.join(f'{value:.1f} ({arm})' for arm, value in growth.items())}.",
    ]
    if len(arms) > 1:
        lines.append(
            f"What it does not show: which arm is better. Lowest held-out loss here: {lowest} ({mean[lowest]:.3f}). "
            "The order at this length depends on initialization, learning rate and depth, and neither supports nor "
            "contradicts the claim at 20B tokens."
        )
    lines += [f"{arm} is reported beside the others: {ARMS[arm].about}." for arm in arms if not ARMS[arm].isolates]
    return lines


def next_commands(runs: Sequence[Run], data: Text) -> list[str]:
    """Commands to try on what the demo left."""
    run = next((run for run in runs if run.arm == "lns"), runs[0])
    checkpoint, heldout, out = _relative(run.checkpoint), _relative(data.heldout), _relative(data.heldout.parent.parent)
    analyze = f"--model {checkpoint} --data {heldout} --tokens 16384"
    program = program_name()
    # Pre-LN has nothing to fold.
    folded = [] if ARMS[run.arm].scheme.is_pre_ln else [f"{out}/{run.arm}-folded"]
    return [
        f"{program} analyze variance {analyze} -o {out}/variance.json",
        f"{program} analyze angular {analyze} -o {out}/angular.json --plot {out}/angular.png",
        *[f"{program} export {checkpoint} {to}    # the factor inside the weights, for stock OLMo" for to in folded],
    ]


def program_name() -> str:
    """How to call this command again: after ``make demo`` it is in the environment, not on the PATH."""
    script = Path(sys.executable).with_name("olmo-lns")
    return "olmo-lns" if shutil.which("olmo-lns") or not script.is_file() else str(_relative(script))


def _relative(path: Path) -> Path:
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def write(runs: Sequence[Run], out: Path, shape: Shape, data: Text, *, complete: bool) -> dict[str, Path]:
    """Write ``report.json``, ``losses.csv``, ``variances.csv`` and ``demo.png`` for the finished ``runs``."""
    from olmo_lns.demo.plot import draw

    results = [result for run in runs if (result := run.result()) is not None]
    paths = {"report": out / "report.json", "losses": out / "losses.csv", "variances": out / "variances.csv"}
    report = {
        "complete": complete,
        "settings": {
            **asdict(shape),
            "steps": results[0].steps,
            "tokens_per_arm": results[0].steps * shape.batch * shape.sequence,
        },
        "arms": {arm: _arm(arm) for arm in _by_arm(results)},
        "data": {"digest": data.digest, "train_tokens": data.train_tokens, "heldout_tokens": data.heldout_tokens},
        "software": _software(),
        "results": [{**asdict(result), "growth": result.growth} for result in results],
        "notes": notes(results, shape),
    }
    paths["report"].write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    _csv(paths["losses"], ("arm", "seed", "step", "loss"), [(r.arm, r.seed, *row) for r in runs for row in r.losses()])
    variances = [
        (r.arm, r.seed, step, block, value)
        for r in results
        for step, values in ((0, r.variance_at_init), (r.steps, r.variance))
        for block, value in enumerate(values, start=1)
    ]
    _csv(paths["variances"], ("arm", "seed", "step", "block", "variance"), variances)
    finished = [run for run in runs if run.result() is not None]
    return paths | {"figure": draw(finished, out / "demo.png", title(results, shape))}


def _csv(path: Path, names: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file, lineterminator="\n").writerows([names, *rows])


def _arm(name: str) -> dict[str, Any]:
    arm = ARMS[name]
    return {
        "label": arm.label,
        "scheme": str(arm.scheme),
        "initialization": arm.initialization,
        **settings_of(arm, OLMO),
        "about": arm.about,
    }


def _software() -> dict[str, Any]:
    import torch

    return {
        "olmo_lns": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "ai2_olmo": version("ai2-olmo"),
        "device": "cuda" if torch.cuda.is_available() else "cpu",
        "threads": torch.get_num_threads(),
        "machine": f"{platform.system()} {platform.machine()}",
    }
