"""Draw figures of results: heat maps, and line plots over the blocks."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, NamedTuple, Sequence

import numpy as np

from olmo_lns.arms import ARMS, Arm
from olmo_lns.diagnostics.results import Measurement
from olmo_lns.schemes import parse

#: Maximum number of heat maps side by side.
MAX_COLUMNS = 6
#: Ratio of the largest to the smallest value above which an axis is logarithmic.
LOG_RATIO = 20


class Line(NamedTuple):
    """A line plot over the blocks. :param error: column of the standard errors, or ``""``."""

    column: str
    label: str
    error: str = ""


#: Diagnostic -> its line plots. A column that no result has is omitted.
LINES = {
    "variance": [
        Line("variance", "output variance\n(mean over tokens)"),
        Line("max", "largest |activation|"),
    ],
    "angular": [Line("d1", "d(l, l+1)  [fraction of π]")],
    "layer-drop": [Line("increase", "loss increase [nats/token]", "increase_stderr")],
    "jacobian": [
        Line("identity_distance", "distance to identity\n|J - I| / |I|"),
        Line("diagonal_dominance", "diagonal dominance\n(1 = diagonal)"),
    ],
    "gradnorm": [
        Line("total", "gradient norm of the block\n[nats/token per unit]"),
        Line("norm", "of its norms"),
        Line("attention", "of attention"),
        Line("mlp", "of the MLP"),
    ],
}


def new_figure(width: float, height: float) -> Any:
    """Return an empty figure in the common style. It is outside of pyplot, so nobody must close it."""
    import matplotlib
    from matplotlib.figure import Figure

    # Dash patterns look the same in shorter legend handles.
    matplotlib.rcParams.update({"legend.handlelength": 3.5, "legend.frameon": False, "lines.markersize": 4})
    matplotlib.rcParams.update({"font.size": 9, "axes.titlesize": 9, "axes.grid": True, "grid.alpha": 0.3})
    return Figure(figsize=(width, height), layout="constrained")


def save(figure: Any, path: Path) -> Path:
    """Write a figure in the format of the suffix of ``path``."""
    figure.savefig(path, bbox_inches="tight", dpi=200)
    return path


def arm_of(result: Measurement) -> Arm | None:
    """Return the arm of the study with the label of the result, or else with its scheme."""
    scheme = parse(result.settings.get("scheme", "preln"))
    same_label = [arm for arm in ARMS.values() if result.label in (arm.name, arm.label)]
    same_scheme = [arm for arm in ARMS.values() if (arm.scheme, arm.initialization) == (scheme, "plain")]
    return next(iter(same_label + same_scheme), None)


def styles(results: Sequence[Measurement]) -> list[dict[str, Any]]:
    """Return the line styles of the models: the color of the arm, black for no arm of the table.

    A repeated arm keeps its color and gets the line and marker of another arm.
    """
    table, arms = list(ARMS.values()), [arm_of(result) for result in results]
    line_styles = []
    for number, arm in enumerate(arms):
        position = (table.index(arm) if arm else 0) + arms[:number].count(arm)
        shape = table[position % len(table)]
        color = arm.color if arm else "black"
        line_styles.append({"color": color, "linestyle": shape.line, "marker": shape.marker})
    return line_styles


def block_axis(axis: Any, blocks: int) -> None:
    """Set ticks at block 1 and at multiples of a round number."""
    step = next(step for step in (1, 2, 4, 5, 8, 10, 20, 50, blocks) if blocks <= 8 * step or step == blocks)
    axis.set_xlabel("block l")
    axis.set_xticks(sorted({1, *range(step, blocks + 1, step)}))
    axis.set_xlim(0.5, blocks + 0.5)


def draw(results: Sequence[Measurement]) -> Any:
    """Draw one diagnostic of one or more models, with heat maps above line plots."""
    maps = [heat_map for result in results for heat_map in heat_maps(result)]
    tasks = {name: task["metric"] for result in results for name, task in result.details.get("tasks", {}).items()}
    lines = [line for line in LINES[results[0].what] if any(line.column in result.blocks for result in results)]
    lines += [Line(f"{name}:drop", f"drop of {metric} on {name}", f"{name}:stderr") for name, metric in tasks.items()]
    rows = math.ceil(len(maps) / MAX_COLUMNS)
    width = max(4 * len(lines), 2 * min(MAX_COLUMNS, len(maps)))
    figure = lower = new_figure(width, 3 + 2.2 * rows)
    if maps:
        upper, lower = figure.subfigures(2, 1, height_ratios=[2.2 * rows, 3])
        _draw_maps(upper, maps, rows, angles=results[0].what == "angular")
    axes = lower.subplots(1, len(lines), squeeze=False)[0]
    for axis, line in zip(axes, lines, strict=True):
        _draw_line(axis, results, line)
    lower.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=min(3, len(results)))
    return figure


def heat_maps(result: Measurement) -> list[tuple[str, np.ndarray]]:
    """Return the titles and values of a result's heat maps: angles of all pairs, or Jacobians of some blocks."""
    if result.what == "angular":
        return [(result.label, np.array(list(result.blocks.values()), dtype=float))]
    maps = result.details.get("heat_maps", [])
    selected = sorted({round(index) for index in np.linspace(0, len(maps) - 1, MAX_COLUMNS)}) if maps else []
    return [(f"{result.label}\nblock {index + 1}", np.array(maps[index])) for index in selected]


def _draw_maps(figure: Any, maps: Sequence[tuple[str, np.ndarray]], rows: int, *, angles: bool) -> None:
    """Draw the heat maps with one color scale: linear for angles, symmetric log for the small entries of J."""
    from matplotlib.colors import Normalize, SymLogNorm

    axes = figure.subplots(rows, min(MAX_COLUMNS, len(maps)), squeeze=False)
    if angles:
        scale, colors = Normalize(0, max(np.nanmax(grid) for _, grid in maps)), "cividis"
    else:
        scale, colors = SymLogNorm(linthresh=0.01, vmin=-1, vmax=1, base=10), "PuOr"
    for axis in axes.flat[len(maps) :]:
        axis.set_axis_off()
    for axis, (title, grid) in zip(axes.flat, maps, strict=False):
        extent = (0.5, len(grid) + 0.5) * 2
        image = axis.imshow(grid, norm=scale, cmap=colors, origin="lower" if angles else "upper", extent=extent)
        axis.grid(False)
        if angles:
            block_axis(axis, len(grid))
            axis.set(title=title, yticks=axis.get_xticks(), ylabel="n of d(l, l+n)")
        else:
            axis.set(title=title, xticks=[], yticks=[])
    figure.colorbar(image, ax=list(axes.flat), label="fraction of π" if angles else "entry of J (symmetric log)")


def _draw_line(axis: Any, results: Sequence[Measurement], line: Line) -> None:
    for style, result in zip(styles(results), results, strict=True):
        y = result.blocks.get(line.column, [None] * len(result.main))
        errors = result.blocks.get(line.error)
        if errors and None in errors:
            errors = None
        axis.errorbar(range(1, len(y) + 1), np.array(y, float), yerr=errors, capsize=2, label=result.label, **style)
    block_axis(axis, max(len(result.main) for result in results))
    axis.set_ylabel(line.label)
    values = [value for result in results for value in result.blocks.get(line.column, []) if value is not None]
    if min(values) > 0 and max(values) > LOG_RATIO * min(values):
        axis.set_yscale("log")
