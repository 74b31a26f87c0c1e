"""Figures from result files: labels and units on every axis, 1-based layers, safe for colour-blind readers."""

from __future__ import annotations

import csv
import math
from functools import partial
from pathlib import Path
from typing import Any, Callable, Sequence

import numpy as np

from olmo_lns.diagnostics.monitor import COLUMNS
from olmo_lns.diagnostics.results import Report, check_writable
from olmo_lns.errors import LNSError

__all__ = ["FIGURES", "SUFFIXES", "draw", "draw_training", "save"]

#: Formats of figures.
SUFFIXES = (".png", ".svg", ".pdf")

#: Okabe and Ito's palette without its yellow, which print loses; marker and dash differ as well. The first three are
#: those of a study's arms Pre-LN, scaled initialization and LNS.
STYLES = [
    {"color": "#D55E00", "linestyle": "-", "marker": "o"},
    {"color": "#E69F00", "linestyle": "--", "marker": "s"},
    {"color": "#0072B2", "linestyle": "-.", "marker": "^"},
    {"color": "#CC79A7", "linestyle": ":", "marker": "v"},
    {"color": "#009E73", "linestyle": ":", "marker": "D"},
    {"color": "#56B4E9", "linestyle": "--", "marker": "P"},
]
LNS_STYLE = 2
#: Heat maps of a Jacobian that are shown side by side at most.
SHOWN_BLOCKS = 6


def _pyplot() -> Any:
    try:
        import matplotlib
    except ImportError:
        raise LNSError("figures need matplotlib: pip install 'olmo-lns[analysis]'") from None
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    # A fixed salt and no date make the same numbers give the same SVG file.
    plt.rcParams.update({"svg.hashsalt": "olmo-lns", "font.size": 9, "axes.grid": True, "grid.alpha": 0.3})
    plt.rcParams.update({"lines.markersize": 4, "legend.frameon": False, "savefig.dpi": 200})
    # TrueType: publishers refuse PDFs with Type 3 fonts. Longer handles, or dashes look alike in the legend.
    plt.rcParams.update({"pdf.fonttype": 42, "legend.handlelength": 3.5})
    return plt


def save(figure: Any, path: Any) -> Any:
    """Write PNG, SVG or PDF, by the suffix of a path; PNG into an open file."""
    if not isinstance(path, Path):
        figure.savefig(path, format="png", bbox_inches="tight", dpi=150)
        _pyplot().close(figure)
        return path
    check_writable(path, SUFFIXES)
    figure.savefig(path, bbox_inches="tight", metadata={"Date": None} if path.suffix == ".svg" else None)
    _pyplot().close(figure)
    return path


def draw(reports: Sequence[Report], *, log: bool = False) -> Any:
    """One figure of one diagnostic for one or several models.

    :param log: logarithmic vertical axes; for the loss increase, which may be negative, logarithmic beyond 0.001.
    :raises LNSError: no report, or reports of different diagnostics.
    """
    kinds = sorted({report.what for report in reports})
    if len(kinds) != 1:
        raise LNSError(f"a figure shows one diagnostic: found {', '.join(kinds) or 'no result'}")
    return FIGURES[kinds[0]](reports, log)


def _lines(axis: Any, reports: Sequence[Report], values: Callable[[Any], Sequence[float]], label: str) -> None:
    longest = 0
    for style, report in zip(styles(reports), reports, strict=True):
        y = values(report.result)
        longest = max(longest, len(y))
        axis.plot(range(1, len(y) + 1), y, label=report.label, **style)
    _layer_axis(axis, longest)
    axis.set_ylabel(label)


def styles(reports: Sequence[Report]) -> list[dict[str, Any]]:
    """A model with LNS has LNS's style in every figure; the others take theirs in order."""
    rest = [style for number, style in enumerate(STYLES) if number != LNS_STYLE]
    found: list[dict[str, Any]] = []
    for report in reports:
        lns = ((report.settings.get("lns") or {}).get("scheme") == "lns") and STYLES[LNS_STYLE] not in found
        others = [style for style in found if style != STYLES[LNS_STYLE]]
        found.append(STYLES[LNS_STYLE] if lns else rest[len(others) % len(rest)])
    return found


def _legend(figure: Any, axis: Any) -> None:
    """Below the figure, never over the data."""
    handles, labels = axis.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(4, len(labels)))


def _layer_axis(axis: Any, layers: int) -> None:
    step = max(1, round(layers / 8))
    axis.set_xlabel("block l")
    axis.set_xticks(sorted({1, *range(step, layers + 1, step)}))
    axis.set_xlim(0.5, layers + 0.5)


def _variance(reports: Sequence[Report], log: bool) -> Any:
    figure, axes = _pyplot().subplots(1, 2, figsize=(8, 3), layout="constrained")
    _lines(axes[0], reports, lambda r: r.variance, "output variance\n(mean over tokens)")
    _lines(axes[1], reports, lambda r: r.max, "largest |activation|")
    for axis in axes:
        axis.set_yscale("log") if log else axis.set_ylim(bottom=0)
    _legend(figure, axes[0])
    return figure


def _angular(reports: Sequence[Report], log: bool) -> Any:
    plt = _pyplot()
    count = len(reports)
    # One scale for all models, so that colours compare, over what is there: most distances are far below 1.
    values = [value for report in reports for row in report.result.distance for value in row] or [0.0, 1.0]
    low, top = min(values), max(values)
    figure, axes = plt.subplots(1, count + 1, figsize=(3 * (count + 1) + 0.6, 3), layout="constrained", squeeze=False)
    for axis, report in zip(axes[0], reports, strict=False):
        rows = report.result.distance
        grid = np.full((len(rows), len(rows)), np.nan)
        for layer, row in enumerate(rows):
            grid[: len(row), layer] = row
        extent = (0.5, len(rows) + 0.5, 0.5, len(rows) + 0.5)
        image = axis.imshow(grid, origin="lower", extent=extent, vmin=low, vmax=top, cmap="cividis")
        axis.set_title(f"{report.label} ({report.result.variant})", fontsize=9)
        axis.grid(False)
        _layer_axis(axis, len(rows))
        axis.set_xlabel("state l (input of block l)")
        axis.yaxis.set_major_locator(plt.MaxNLocator(integer=True, min_n_ticks=1))
        axis.set_ylabel("n (blocks between)")
    label = f"angular distance d(l, l+n)  [fraction of π]\nfrom {low:.2g} to {top:.2g}, all that is shown"
    figure.colorbar(image, ax=list(axes[0][:count]), label=label)
    _lines(axes[0][-1], reports, lambda r: r.adjacent, "d(l, l+1)  [fraction of π]")
    axes[0][-1].set_yscale("log") if log else axes[0][-1].set_ylim(bottom=0)
    _legend(figure, axes[0][-1])
    return figure


def _layer_drop(reports: Sequence[Report], log: bool) -> Any:
    tasks = list(dict.fromkeys(name for report in reports for name in report.result.tasks))
    width = 4 * (1 + len(tasks))
    figure, axes = _pyplot().subplots(1, 1 + len(tasks), figsize=(width, 3), layout="constrained", squeeze=False)
    increase, *others = axes[0]
    for style, report in zip(styles(reports), reports, strict=True):
        result = report.result
        _errorbar(
            increase, [loss - result.baseline_loss for loss in result.loss], result.loss_stderr, report.label, style
        )
        for axis, task in zip(others, tasks, strict=True):
            if task in result.tasks:
                scores = result.tasks[task]
                _errorbar(axis, scores.drop, scores.without_stderr, report.label, style)
                axis.set_ylabel(f"drop of {scores.metric} on {task}")
    increase.set_ylabel("loss increase [nats/token]")
    if log:
        increase.set_yscale("symlog", linthresh=1e-3)
    for axis in axes[0]:
        axis.axhline(0, color="black", linewidth=0.6)
        _layer_axis(axis, max(len(report.result.loss) for report in reports))
        axis.set_xlabel("removed block l")
    if not log:
        _clip_first(increase, [[loss - r.result.baseline_loss for loss in r.result.loss] for r in reports])
    _legend(figure, increase)
    return figure


def _clip_first(axis: Any, increases: Sequence[Sequence[float]]) -> None:
    """Cut block 1 off where it would flatten all others, and write its numbers instead."""
    rest = [value for line in increases for value in line[1:]]
    first = [line[0] for line in increases]
    if rest and max(first) > 3 * (top := max(*rest, 1e-3)):
        axis.set_ylim(min(0.0, *rest) - 0.1 * top, 1.25 * top)
        numbers = " / ".join(f"{value:.2g}" for value in first)
        axis.annotate(f"block 1: {numbers}", (1, 1.25 * top), (8, -4), textcoords="offset points", va="top", fontsize=8)


def _errorbar(axis: Any, y: Sequence[float], errors: Sequence[float | None], label: str, style: dict[str, Any]) -> None:
    known = None if any(error is None for error in errors) else errors
    axis.errorbar(range(1, len(y) + 1), y, yerr=known, capsize=2, label=label, **style)


def _jacobian(reports: Sequence[Report], log: bool) -> Any:
    plt = _pyplot()
    from matplotlib.colors import SymLogNorm

    # Off-diagonal entries are a hundred times smaller than the diagonal's 1 and would not be seen on a linear scale.
    scale = SymLogNorm(linthresh=0.01, vmin=-1, vmax=1, base=10)
    shown = [_spread(len(report.result.heat_maps)) for report in reports]
    columns = max(2, *map(len, shown))
    figure = plt.figure(figsize=(1.7 * columns + 0.8, 1.9 * len(reports) + 2.8), layout="constrained")
    top, bottom = figure.subfigures(2, 1, height_ratios=[1.9 * len(reports), 2.8])
    axes = top.subplots(len(reports), columns, squeeze=False)
    for row, report, blocks in zip(axes, reports, shown, strict=True):
        for axis in row:
            axis.set_axis_off()
        for axis, block in zip(row, blocks, strict=False):
            axis.set_axis_on()
            axis.grid(False)
            axis.set_xticks([])
            axis.set_yticks([])
            image = axis.imshow(report.result.heat_maps[block], norm=scale, cmap="PuOr", interpolation="nearest")
            axis.set_title(f"block {block + 1}", fontsize=8)
        row[0].set_ylabel(f"{report.label}\n({report.result.method})", fontsize=8)
    top.colorbar(image, ax=list(axes.flat), label="entry of J (symmetric log)", shrink=0.8)
    distance, dominance = bottom.subplots(1, 2)
    _lines(distance, reports, lambda r: r.identity_distance, "distance to identity\n|J - I| / |I|")
    _lines(dominance, reports, lambda r: r.diagonal_dominance, "diagonal dominance\n(1 = diagonal)")
    distance.set_yscale("log") if log else distance.set_ylim(bottom=0)
    dominance.set_ylim(0, 1)
    _legend(bottom, distance)
    return figure


def _spread(count: int) -> list[int]:
    return sorted({round(i) for i in np.linspace(0, count - 1, min(count, SHOWN_BLOCKS))})


def _gradnorm(reports: Sequence[Report], log: bool) -> Any:
    kinds = list(dict.fromkeys(kind for report in reports for block in report.result.kinds for kind in block))
    figure, axes = _pyplot().subplots(
        1, 1 + len(kinds), figsize=(2.7 * (1 + len(kinds)), 2.7), layout="constrained", squeeze=False
    )
    _lines(axes[0][0], reports, lambda r: r.total, "gradient norm [nats/token per unit]")
    axes[0][0].set_title("whole block", fontsize=9)
    for axis, kind in zip(axes[0][1:], kinds, strict=True):
        _lines(axis, reports, partial(_kind_norms, kind=kind), "")
        axis.set_title(kind, fontsize=9)
    for axis in axes[0]:
        axis.set_yscale("log") if log else axis.set_ylim(bottom=0)
    _legend(figure, axes[0][0])
    return figure


def _kind_norms(result: Any, kind: str) -> list[float]:
    return [block.get(kind, math.nan) for block in result.kinds]


#: Name of a diagnostic -> its figure for (reports, logarithmic axis).
FIGURES: dict[str, Callable[[Sequence[Report], bool], Any]] = {
    "variance": _variance,
    "angular": _angular,
    "layer-drop": _layer_drop,
    "jacobian": _jacobian,
    "gradnorm": _gradnorm,
}


def draw_training(paths: Sequence[Path], labels: Sequence[str], *, log: bool = False) -> Any:
    """Variance through training from the monitor's CSV files: one panel a run, one line a block, one scale."""
    plt = _pyplot()
    figure, axes = plt.subplots(
        1, len(paths), figsize=(3.2 * len(paths) + 0.8, 3), sharey=True, layout="constrained", squeeze=False
    )
    runs = [read_training(path) for path in paths]
    deepest = max(max(run) for run in runs)
    norm = plt.Normalize(1, deepest)
    for axis, run, label in zip(axes[0], runs, labels, strict=True):
        for block, points in run.items():
            axis.plot(*zip(*points, strict=True), color=plt.get_cmap("viridis")(norm(block)), linewidth=1.2)
        axis.set_title(label, fontsize=9)
        axis.set_xlabel("training step")
        axis.set_yscale("log") if log else axis.set_ylim(bottom=0)
    axes[0][0].set_ylabel("output variance (mean over tokens)")
    mappable = plt.cm.ScalarMappable(norm, "viridis")
    figure.colorbar(mappable, ax=list(axes[0]), label="block l", ticks=plt.MaxNLocator(integer=True))
    return figure


def read_training(path: Path) -> dict[int, list[tuple[int, float]]]:
    """Block -> (step, variance) points of a monitor's CSV file."""
    try:
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            if tuple(reader.fieldnames or ()) != COLUMNS:
                raise LNSError(
                    f"{path}: found columns {reader.fieldnames}, expected the monitor's {', '.join(COLUMNS)}"
                )
            points: dict[int, list[tuple[int, float]]] = {}
            for row in reader:
                try:
                    points.setdefault(int(row["block"]), []).append((int(row["step"]), float(row["variance"])))
                except (TypeError, ValueError):
                    raise LNSError(f"{path}, line {reader.line_num}: found {row}, expected numbers") from None
    except OSError as error:
        raise LNSError(f"{path}: {error.strerror or error}") from None
    if not points:
        raise LNSError(f"{path} has no rows yet: the run has not reached its first sampled step")
    return points
