"""The demo's figure: loss by step and output variance by block, every arm on the same axes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Sequence

from olmo_lns.study.arms import arm_named

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from olmo_lns.demo.runs import Run

__all__ = ["draw", "smooth"]


def smooth(values: Sequence[float], window: int) -> list[float]:
    """Mean over the last ``window`` values, fewer at the start."""
    return [sum(part) / len(part) for i in range(len(values)) if (part := values[max(0, i + 1 - window) : i + 1])]


def draw(runs: Sequence[Run], path: Path, title: str) -> Path:
    """Draw the finished ``runs`` into ``path`` (PNG, about 1500 × 690 pixels)."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    figure = Figure(figsize=(10, 4.6), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    labelled: set[str] = set()
    for run in runs:
        label = None if run.arm in labelled else arm_named(run.arm).label
        labelled.add(run.arm)
        _loss(left, run, label)
        _variance(right, run, label)
    left.set(xlabel="Step", ylabel="Training loss (nats per byte)", title="Loss by step (faint: every step)")
    right.set(xlabel="Block", ylabel="Output variance", yscale="log", title="Layerwise output variance after training")
    # The first steps fall from ln(257) alike for all; the difference is below.
    late = [loss for run in runs for step, loss in run.losses() if step > run.steps // 20]
    left.set_ylim(top=max(late) + 0.1)
    right.margins(x=0.02)
    for axes in (left, right):
        axes.grid(alpha=0.25, which="both")
        axes.spines[["top", "right"]].set_visible(False)
    handles, labels = right.get_legend_handles_labels()
    handles.append(Line2D([], [], linestyle=":", color="grey", linewidth=1))
    figure.legend(handles, [*labels, "variance at initialization"], loc="outside lower center", ncols=5, frameon=False)
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=150)
    return path


def _loss(axes: Axes, run: Run, label: str | None) -> None:
    arm = arm_named(run.arm)
    steps, losses = zip(*run.losses(), strict=True)
    axes.plot(steps, losses, color=arm.colour, alpha=0.2, linewidth=0.7)
    smoothed = smooth(losses, max(1, len(steps) // 30))
    axes.plot(steps, smoothed, arm.line, color=arm.colour, label=label, linewidth=1.8)


def _variance(axes: Axes, run: Run, label: str | None) -> None:
    arm = arm_named(run.arm)
    result = run.result()
    if result is None:
        return
    blocks = range(1, len(result.variance) + 1)
    axes.plot(blocks, result.variance, arm.line, color=arm.colour, marker=arm.marker, markersize=4, label=label)
    axes.plot(blocks, result.variance_at_init, ":", color=arm.colour, alpha=0.5, linewidth=1)
    axes.set_xticks(sorted({1, *(n for n in blocks if n % max(1, len(blocks) // 6) == 0)}))
