"""Figures from results: labels and units on every axis, 1-based layers, colour-blind safe."""

from __future__ import annotations

import io
import math
from pathlib import Path
from typing import Any, Callable, Sequence

import numpy as np

from olmo_lns.diagnostics.results import Measurement
from olmo_lns.schemes import parse
from olmo_lns.study.arms import ARMS, Arm
from olmo_lns.text import write_whole

#: Maximum number of Jacobian heat maps side by side.
SHOWN_BLOCKS = 6
#: Ratio of the largest to the smallest value above which an axis is logarithmic.
WIDE = 20


def new_figure(width: float, height: float) -> Any:
    """Return an empty figure in the common style, outside of pyplot, which needs no close."""
    import matplotlib
    from matplotlib.figure import Figure

    # A fixed salt and no date make SVG files reproducible. With shorter handles, dashes look alike.
    matplotlib.rcParams.update({"svg.hashsalt": "olmo-lns", "legend.handlelength": 3.5})
    matplotlib.rcParams.update({"font.size": 9, "axes.titlesize": 9, "axes.grid": True, "grid.alpha": 0.3})
    matplotlib.rcParams.update({"lines.markersize": 4, "legend.frameon": False})
    return Figure(figsize=(width, height), layout="constrained")


def save(figure: Any, path: Path) -> Path:
    """Write PNG or SVG, by the suffix of ``path``, by rename."""
    content, kind = io.BytesIO(), path.suffix[1:]
    figure.savefig(
        content, format=kind, bbox_inches="tight", dpi=200, metadata={"Date": None} if kind == "svg" else None
    )
    return write_whole(path, content.getvalue())


def draw(results: Sequence[Measurement]) -> Any:
    """Draw one diagnostic of one or several models."""
    return FIGURES[results[0].what](results)


def arm_of(result: Measurement) -> Arm | None:
    """Return a model's arm in the study's table: by its label, else by its scheme and initialization."""
    scheme, drawn = parse(result.settings.get("scheme", "preln")), result.settings.get("initialization", "plain")
    for arm in ARMS.values():
        if result.label in (arm.name, arm.label):
            return arm
    return next((a for a in ARMS.values() if (a.scheme, a.initialization, a.init_fn) == (scheme, drawn, "")), None)


def styles(results: Sequence[Measurement]) -> list[dict[str, Any]]:
    """Return the styles of models: the colour of the arm (Pre-LN's without an arm), dash and marker of the model."""
    arms = [arm_of(result) or ARMS["preln"] for result in results]
    lines = list(ARMS.values())
    found = []
    for number, arm in enumerate(arms):
        shape = lines[(lines.index(arm) + arms[:number].count(arm)) % len(lines)]
        # Models that all have the same arm also differ in colour.
        colour = shape if len(set(a.name for a in arms)) == 1 else arm
        found.append({"color": colour.colour, "linestyle": shape.line, "marker": shape.marker})
    return found


def block_axis(axis: Any, blocks: int) -> None:
    """Set ticks at block 1 and at multiples of a round number."""
    step = next(step for step in (1, 2, 4, 5, 8, 10, 20, 50, blocks) if blocks <= 8 * step or step == blocks)
    axis.set_xlabel("block l")
    axis.set_xticks(sorted({1, *range(step, blocks + 1, step)}))
    axis.set_xlim(0.5, blocks + 0.5)


def _lines(axis: Any, results: Sequence[Measurement], column: str, label: str) -> None:
    lines = [[math.nan if v is None else v for v in result.blocks.get(column, [math.nan])] for result in results]
    for style, result, y in zip(styles(results), results, lines, strict=True):
        axis.plot(range(1, len(y) + 1), y, label=result.label, **style)
    block_axis(axis, max(map(len, lines)))
    axis.set_ylabel(label)
    known = [value for line in lines for value in line if not math.isnan(value)]
    wide = min(known) > 0 and max(known) > WIDE * min(known)
    axis.set_yscale("log") if wide else axis.set_ylim(bottom=0)


def _legend(figure: Any, axis: Any) -> Any:
    """Add a legend below the figure, of the figure's width; the figure grows by the legend's height."""
    handles, labels = axis.get_legend_handles_labels()
    whole = figure.figure
    columns = max(1, min(4, len(labels), int(15 * whole.get_figwidth() / (8 + max(map(len, labels))))))
    whole.set_figheight(whole.get_figheight() + 0.17 * (math.ceil(len(labels) / columns) - 1))
    figure.legend(handles, labels, loc="outside lower center", ncols=columns)
    return figure


def _variance(results: Sequence[Measurement]) -> Any:
    figure = new_figure(8, 3)
    axes = figure.subplots(1, 2)
    _lines(axes[0], results, "variance", "output variance\n(mean over tokens)")
    _lines(axes[1], results, "max", "largest |activation|")
    return _legend(figure, axes[0])


def _angular(results: Sequence[Measurement]) -> Any:
    grids = [np.array(list(result.blocks.values()), dtype=float) for result in results]
    # One scale for all models, up to their largest distance, since most distances are far below 1.
    low, high = min(map(np.nanmin, grids)), max(map(np.nanmax, grids))
    figure = new_figure(3 * (len(results) + 1) + 0.6, 3)
    *maps, last = figure.subplots(1, len(results) + 1, squeeze=False)[0]
    for axis, result, grid in zip(maps, results, grids, strict=True):
        extent = (0.5, len(grid) + 0.5, 0.5, len(grid) + 0.5)
        image = axis.imshow(grid, origin="lower", extent=extent, vmin=low, vmax=high, cmap="cividis")
        axis.set_title(f"{result.label}")
        axis.grid(False)
        block_axis(axis, len(grid))
        axis.set_yticks(axis.get_xticks())
        axis.set(xlabel="state l (input of block l)", ylabel="n (blocks between)")
    figure.colorbar(image, ax=maps, label="d(l, l+n)  [fraction of π]")
    _lines(last, results, "d1", "d(l, l+1)  [fraction of π]")
    return _legend(figure, last)


def _layer_drop(results: Sequence[Measurement]) -> Any:
    """Draw block 1 on its own axis: its removal costs so much that the other blocks would look alike."""
    shown = {"increase": ("increase_stderr", "loss increase [nats/token]")}
    for result in results:
        for task, scores in result.details.get("tasks", {}).items():
            shown[f"{task}:drop"] = (f"{task}:stderr", f"drop of {scores['metric']} on {task}")
    figure = new_figure(5 * len(shown), 3)
    axes = figure.subplots(1, 2 * len(shown), squeeze=False, width_ratios=[1, 5] * len(shown))[0]
    blocks = max(len(result.main) for result in results)
    for (column, (error, label)), first, others in zip(shown.items(), axes[::2], axes[1::2], strict=True):
        for style, result in zip(styles(results), results, strict=True):
            if column in result.blocks:
                _errorbar(first, result, column, error, slice(0, 1), style)
                _errorbar(others, result, column, error, slice(1, None), style)
        for axis in (first, others):
            axis.axhline(0, color="black", linewidth=0.6)
        block_axis(others, blocks)
        first.set(xlim=(0.5, 1.5), xticks=[1], ylabel=label)
        others.set(xlabel="removed block l", xlim=(1.5, blocks + 0.5))
    return _legend(figure, axes[1])


def _errorbar(axis: Any, result: Measurement, column: str, error: str, part: slice, style: dict[str, Any]) -> None:
    y, errors = result.blocks[column], result.blocks[error]
    known = None if None in errors else errors[part]
    axis.errorbar(range(1, len(y) + 1)[part], y[part], yerr=known, capsize=2, label=result.label, **style)


def _jacobian(results: Sequence[Measurement]) -> Any:
    from matplotlib.colors import SymLogNorm

    # Off-diagonal entries are a hundred times smaller than the diagonal's 1 and would be invisible on a linear scale.
    scale = SymLogNorm(linthresh=0.01, vmin=-1, vmax=1, base=10)
    shown = []
    for result in results:
        count = len(result.main)
        shown.append(sorted({round(i) for i in np.linspace(0, count - 1, min(count, SHOWN_BLOCKS))}))
    columns = max(2, *map(len, shown))
    figure = new_figure(1.7 * columns + 0.8, 1.9 * len(results) + 2.8)
    top, bottom = figure.subfigures(2, 1, height_ratios=[1.9 * len(results), 2.8])
    axes = top.subplots(len(results), columns, squeeze=False)
    for row, result, blocks in zip(axes, results, shown, strict=True):
        for axis in row[len(blocks) :]:
            axis.set_axis_off()
        for axis, block in zip(row, blocks, strict=False):
            image = axis.imshow(result.details["heat_maps"][block], norm=scale, cmap="PuOr", interpolation="nearest")
            axis.set(title=f"block {block + 1}", xticks=[], yticks=[])
            axis.grid(False)
        row[0].set_ylabel(f"{result.label}\n({result.details['method']})")
    top.colorbar(image, ax=list(axes.flat), label="entry of J (symmetric log)", shrink=0.8)
    distance, dominance = bottom.subplots(1, 2)
    _lines(distance, results, "identity_distance", "distance to identity\n|J - I| / |I|")
    _lines(dominance, results, "diagonal_dominance", "diagonal dominance\n(1 = diagonal)")
    dominance.set(yscale="linear", ylim=(0, 1))
    _legend(bottom, distance)
    return figure


def _gradnorm(results: Sequence[Measurement]) -> Any:
    kinds = [kind for kind in ("total", "norm", "attention", "mlp", "other") if any(kind in r.blocks for r in results)]
    figure = new_figure(2.7 * len(kinds), 2.7)
    axes = figure.subplots(1, len(kinds), squeeze=False)[0]
    for axis, kind in zip(axes, kinds, strict=True):
        _lines(axis, results, kind, "" if kind != "total" else "gradient norm\n[nats/token per unit]")
        axis.set_title("whole block" if kind == "total" else kind)
    return _legend(figure, axes[0])


#: Name of a diagnostic -> the function that draws its figure.
FIGURES: dict[str, Callable[[Sequence[Measurement]], Any]] = {
    "variance": _variance,
    "angular": _angular,
    "layer-drop": _layer_drop,
    "jacobian": _jacobian,
    "gradnorm": _gradnorm,
}
