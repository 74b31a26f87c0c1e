"""Figures from result files: labels and units on every axis, 1-based layers, safe for colour-blind readers."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any, Callable, Sequence

import numpy as np

from olmo_lns.diagnostics.monitor import COLUMNS
from olmo_lns.diagnostics.results import Report
from olmo_lns.errors import LNSError

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
SCALED_STYLE, LNS_STYLE = 1, 2
#: Heat maps of a Jacobian that are shown side by side at most.
SHOWN_BLOCKS = 6
#: An axis is logarithmic by itself where the largest value is so many times the smallest.
WIDE = 20


def new_figure(width: float, height: float) -> Any:
    """An empty figure in our style, outside of pyplot: nothing has to be closed."""
    import matplotlib
    from matplotlib.figure import Figure

    # A fixed salt and no date give the same SVG file for the same numbers. With shorter handles dashes look alike.
    matplotlib.rcParams.update({"svg.hashsalt": "olmo-lns", "legend.handlelength": 3.5})
    matplotlib.rcParams.update({"font.size": 9, "axes.titlesize": 9, "axes.grid": True, "grid.alpha": 0.3})
    matplotlib.rcParams.update({"lines.markersize": 4, "legend.frameon": False})
    return Figure(figsize=(width, height), layout="constrained")


def save(figure: Any, path: Path) -> Path:
    """Write PNG or SVG, by the suffix of ``path``."""
    figure.savefig(path, bbox_inches="tight", dpi=200, metadata={"Date": None} if path.suffix == ".svg" else None)
    return path


def draw(reports: Sequence[Report], *, log: bool = False) -> Any:
    """One figure of one diagnostic for one or several models.

    :param log: logarithmic vertical axes, also where values are close; for the loss increase, which may be negative,
        logarithmic beyond 0.001.
    """
    return FIGURES[reports[0].what](reports, log)


def styles(reports: Sequence[Report]) -> list[dict[str, Any]]:
    """One colour an arm where there are several, repetitions by marker and dash; else one style a model."""
    own = {("lns", "plain"): LNS_STYLE, ("preln", "scaled"): SCALED_STYLE}
    arms = []
    for report in reports:
        scheme = (report.settings.get("lns") or {}).get("scheme", "preln")
        arms.append(own.get((scheme, report.settings.get("initialization", "plain")), 0))
    found = []
    for number, arm in enumerate(arms):
        style = STYLES[(arm + arms[:number].count(arm)) % len(STYLES)]
        found.append(style if len(set(arms)) == 1 else {**style, "color": STYLES[arm]["color"]})
    return found


def block_axis(axis: Any, blocks: int) -> None:
    """Ticks at block 1 and at multiples of a round number."""
    step = next(step for step in (1, 2, 4, 5, 8, 10, 20, 50, blocks) if blocks <= 8 * step or step == blocks)
    axis.set_xlabel("block l")
    axis.set_xticks(sorted({1, *range(step, blocks + 1, step)}))
    axis.set_xlim(0.5, blocks + 0.5)


def _lines(
    axis: Any, reports: Sequence[Report], values: Callable[[Any], Sequence[float]], label: str, log: bool
) -> None:
    lines = [values(report.result) for report in reports]
    for style, report, y in zip(styles(reports), reports, lines, strict=True):
        axis.plot(range(1, len(y) + 1), y, label=report.label, **style)
    block_axis(axis, max(map(len, lines)))
    axis.set_ylabel(label)
    known = [value for line in lines for value in line if not math.isnan(value)]
    wide = min(known) > 0 and max(known) > WIDE * min(known)
    axis.set_yscale("log") if log or wide else axis.set_ylim(bottom=0)


def _legend(figure: Any, axis: Any) -> Any:
    """Below the figure, never over the data: as wide as it is, and higher by what the rows take."""
    handles, labels = axis.get_legend_handles_labels()
    whole = figure.figure
    columns = max(1, min(4, len(labels), int(15 * whole.get_figwidth() / (8 + max(map(len, labels))))))
    whole.set_figheight(whole.get_figheight() + 0.17 * (math.ceil(len(labels) / columns) - 1))
    figure.legend(handles, labels, loc="outside lower center", ncols=columns)
    return figure


def _variance(reports: Sequence[Report], log: bool) -> Any:
    figure = new_figure(8, 3)
    axes = figure.subplots(1, 2)
    _lines(axes[0], reports, lambda r: r.variance, "output variance\n(mean over tokens)", log)
    _lines(axes[1], reports, lambda r: r.max, "largest |activation|", log)
    return _legend(figure, axes[0])


def _angular(reports: Sequence[Report], log: bool) -> Any:
    count = len(reports)
    # One scale for all models, so that colours compare, over what is there: most distances are far below 1.
    values = [value for report in reports for row in report.result.distance for value in row] or [0.0, 1.0]
    figure = new_figure(3 * (count + 1) + 0.6, 3)
    *maps, last = figure.subplots(1, count + 1, squeeze=False)[0]
    for axis, report in zip(maps, reports, strict=True):
        rows = report.result.distance
        grid = np.full((len(rows), len(rows)), np.nan)
        for layer, row in enumerate(rows):
            grid[: len(row), layer] = row
        extent = (0.5, len(rows) + 0.5, 0.5, len(rows) + 0.5)
        image = axis.imshow(grid, origin="lower", extent=extent, vmin=min(values), vmax=max(values), cmap="cividis")
        axis.set_title(f"{report.label} ({report.result.variant})")
        axis.grid(False)
        block_axis(axis, len(rows))
        axis.set_yticks(axis.get_xticks())
        axis.set(xlabel="state l (input of block l)", ylabel="n (blocks between)")
    figure.colorbar(image, ax=maps, label="d(l, l+n)  [fraction of π]")
    _lines(last, reports, lambda r: r.adjacent, "d(l, l+1)  [fraction of π]", log)
    return _legend(figure, last)


def _layer_drop(reports: Sequence[Report], log: bool) -> Any:
    tasks = list(dict.fromkeys(name for report in reports for name in report.result.tasks))
    figure = new_figure(4.5 * (1 + len(tasks)), 3)
    first, *others = figure.subplots(1, 1 + len(tasks), squeeze=False)[0]
    for style, report in zip(styles(reports), reports, strict=True):
        _errorbar(first, report.result.increase, report.result.loss_stderr, label=report.label, **style)
        for axis, task in zip(others, tasks, strict=True):
            if scores := report.result.tasks.get(task):
                _errorbar(axis, scores.drop, scores.without_stderr, label=report.label, **style)
                axis.set_ylabel(f"drop of {scores.metric} on {task}")
    first.set_ylabel("loss increase [nats/token]")
    if log:
        first.set_yscale("symlog", linthresh=1e-3)
    for axis in (first, *others):
        axis.axhline(0, color="black", linewidth=0.6)
        block_axis(axis, max(len(report.result.increase) for report in reports))
        axis.set_xlabel("removed block l")
    return _legend(figure, first)


def _errorbar(axis: Any, y: Sequence[float], errors: Sequence[float | None], **style: Any) -> None:
    known = None if any(error is None for error in errors) else errors
    axis.errorbar(range(1, len(y) + 1), y, yerr=known, capsize=2, **style)


def _jacobian(reports: Sequence[Report], log: bool) -> Any:
    figure = new_figure(1, 1)
    from matplotlib.colors import SymLogNorm

    # Off-diagonal entries are a hundred times smaller than the diagonal's 1 and would not be seen on a linear scale.
    scale = SymLogNorm(linthresh=0.01, vmin=-1, vmax=1, base=10)
    shown = [_spread(len(report.result.heat_maps)) for report in reports]
    columns = max(2, *map(len, shown))
    figure.set_size_inches(1.7 * columns + 0.8, 1.9 * len(reports) + 2.8)
    top, bottom = figure.subfigures(2, 1, height_ratios=[1.9 * len(reports), 2.8])
    axes = top.subplots(len(reports), columns, squeeze=False)
    for row, report, blocks in zip(axes, reports, shown, strict=True):
        for axis in row[len(blocks) :]:
            axis.set_axis_off()
        for axis, block in zip(row, blocks, strict=False):
            image = axis.imshow(report.result.heat_maps[block], norm=scale, cmap="PuOr", interpolation="nearest")
            axis.set(title=f"block {block + 1}", xticks=[], yticks=[])
            axis.grid(False)
        row[0].set_ylabel(f"{report.label}\n({report.result.method})")
    top.colorbar(image, ax=list(axes.flat), label="entry of J (symmetric log)", shrink=0.8)
    distance, dominance = bottom.subplots(1, 2)
    _lines(distance, reports, lambda r: r.identity_distance, "distance to identity\n|J - I| / |I|", log)
    _lines(dominance, reports, lambda r: r.diagonal_dominance, "diagonal dominance\n(1 = diagonal)", False)
    dominance.set(yscale="linear", ylim=(0, 1))
    _legend(bottom, distance)
    return figure


def _spread(count: int) -> list[int]:
    return sorted({round(i) for i in np.linspace(0, count - 1, min(count, SHOWN_BLOCKS))})


def _gradnorm(reports: Sequence[Report], log: bool) -> Any:
    kinds = list(dict.fromkeys(kind for report in reports for block in report.result.kinds for kind in block))
    figure = new_figure(2.7 * (1 + len(kinds)), 2.7)
    whole, *others = figure.subplots(1, 1 + len(kinds), squeeze=False)[0]
    _lines(whole, reports, lambda r: r.total, "gradient norm\n[nats/token per unit]", log)
    whole.set_title("whole block")
    for axis, kind in zip(others, kinds, strict=True):
        _lines(axis, reports, partial(_of_kind, kind=kind), "", log)
        axis.set_title(kind)
    return _legend(figure, whole)


def _of_kind(result: Any, kind: str) -> list[float]:
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
    figure = new_figure(3.2 * len(paths) + 0.8, 3)
    import matplotlib as mpl

    runs = [read_training(path) for path in paths]
    axes = figure.subplots(1, len(paths), sharey=True, squeeze=False)[0]
    norm = mpl.colors.Normalize(1, max(max(run.columns) for run in runs))
    for axis, run, label in zip(axes, runs, labels, strict=True):
        for block, variance in run.items():
            axis.plot(run.index, variance, color=mpl.colormaps["viridis"](norm(block)), linewidth=1.2)
        axis.set(title=label, xlabel="training step")
        axis.set_yscale("log") if log else axis.set_ylim(bottom=0)
    axes[0].set_ylabel("output variance (mean over tokens)")
    ticks = mpl.ticker.MaxNLocator(integer=True)
    figure.colorbar(mpl.cm.ScalarMappable(norm, "viridis"), ax=list(axes), label="block l", ticks=ticks)
    return figure


def read_training(path: Path) -> Any:
    """A pandas table of a monitor's CSV file: a row a step, a column a block, the variance in the cells.

    :raises LNSError: other columns, words for numbers, or no row yet.
    """
    import pandas

    try:
        rows = pandas.read_csv(path)
        if tuple(rows.columns) != COLUMNS:
            raise LNSError(f"{path}: found columns {list(rows.columns)}, expected the monitor's {', '.join(COLUMNS)}")
        rows = rows.apply(pandas.to_numeric)
        found = rows.pivot(index="step", columns="block", values="variance")
    except ValueError as error:  # pandas' own errors, too
        raise LNSError(f"{path}: not the monitor's file: {error}") from None
    if found.empty:
        raise LNSError(f"{path} has no rows yet: the run has not reached its first sampled step")
    return found
