"""Figures of a study over learning rate, depth and tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Sequence

from olmo_lns.study import rates
from olmo_lns.study.arms import ARMS, BASELINE
from olmo_lns.study.rates import Group

__all__ = ["draw", "panels"]

_PANEL = (4.2, 3.4)
_COLUMNS = 3


def panels(found: Sequence[Group]) -> dict[str, list[tuple[Any, Any]]]:
    """Name of a figure -> what its panels show and how; only figures that have something to show."""
    plain = [group for group in found if not group.variant]
    searched = [group for group in plain if len(group.rates) > 1]  # one rate is nobody's best
    figures: dict[str, list[tuple[Any, Any]]] = {
        "rates": [(group, _rate_panel) for group in searched],
        "depth": [(line, _depth_panel) for line in _by_depth(searched) if len(line) > 1],
        "tokens": [(line, panel) for line in rates.losses_by_tokens(found) for panel in (_tokens_panel, _gap_panel)],
    }
    return {name: shown for name, shown in figures.items() if shown}


def draw(found: Sequence[Group], out: Path) -> list[Path]:
    """Write ``rates.png``, ``depth.png`` and ``tokens.png``, each where there is something to draw."""
    import matplotlib

    matplotlib.use("Agg")
    return [_figure(shown, out / f"{name}.png") for name, shown in panels(found).items()]


def _by_depth(found: Sequence[Group]) -> list[list[Group]]:
    lines: dict[tuple[int, int], list[Group]] = {}
    for group in found:
        lines.setdefault((group.width, group.tokens), []).append(group)
    return list(lines.values())


def _figure(shown: Sequence[tuple[Any, Any]], path: Path) -> Path:
    from matplotlib import pyplot

    columns = min(_COLUMNS, len(shown))
    rows = -(-len(shown) // columns)
    chart, grid = pyplot.subplots(
        rows, columns, figsize=(_PANEL[0] * columns, _PANEL[1] * rows), dpi=120, squeeze=False
    )
    for axes in grid.flat[len(shown) :]:
        axes.set_visible(False)
    for axes, (subject, panel) in zip(grid.flat, shown, strict=False):
        panel(axes, subject)
        axes.set_xscale("log")
        _tick_what_was_run(axes)
        axes.grid(alpha=0.3)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize=6)
    chart.tight_layout()
    chart.savefig(path, metadata={"Software": None})
    pyplot.close(chart)
    return path


def _tick_what_was_run(axes: Any) -> None:
    """A tick for each rate, depth or budget, instead of decades whose labels overlap."""
    curves = [list(line.get_xdata()) for line in axes.get_lines()]
    values = sorted({x for curve in curves if curve != [0, 1] for x in curve})  # (0, 1): a line across the panel
    names = [f"{x / 1e6:.2g}M" if x >= 1e5 else f"{x:g}" for x in values]
    axes.set_xticks(values, names)
    axes.minorticks_off()


def _line(axes: Any, arm: str, points: Sequence[tuple[float, float]]) -> None:
    style = ARMS[arm]
    axes.plot(
        *zip(*points, strict=True), style.line, marker=style.marker, color=style.colour, label=style.label, markersize=4
    )


def _where(group: Group, *, tokens: bool) -> str:
    text = f"{group.layers} blocks, width {group.width}" + (f", {group.variant}" if group.variant else "")
    return text + (f", {group.tokens / 1e6:.3g}M tokens" if tokens else "")


def _rate_panel(axes: Any, group: Group) -> None:
    for arm in group.arms:
        if points := sorted(group.by_rate(arm).items()):
            _line(axes, arm, points)
    axes.set_title(_where(group, tokens=True), fontsize=8)
    axes.set_xlabel("learning rate")
    axes.set_ylabel(f"loss, seed {group.choosing} (nats a token)")


def _depth_panel(axes: Any, line: Sequence[Group]) -> None:
    for arm in dict.fromkeys(arm for group in line for arm in group.arms):
        if points := [(group.layers, best.loss) for group in line if (best := group.best(arm)) is not None]:
            _line(axes, arm, points)
    axes.set_title(f"width {line[0].width}, {line[0].tokens / 1e6:.3g}M tokens", fontsize=8)
    axes.set_xlabel("blocks")
    axes.set_ylabel("loss at the best rate (nats a token)")


def _tokens_panel(axes: Any, line: Sequence[Group]) -> None:
    for arm in dict.fromkeys(arm for group in line for arm in group.arms):
        if points := [(group.tokens, best.loss) for group in line if (best := group.best(arm)) is not None]:
            _line(axes, arm, points)
    axes.set_title(_where(line[0], tokens=False), fontsize=8)
    axes.set_xlabel("tokens")
    axes.set_ylabel("loss at the best rate (nats a token)")


def _gap_panel(axes: Any, line: Sequence[Group]) -> None:
    """LNS − Pre-LN by tokens; bars: the 95 % interval over seeds."""
    gaps = [(group.tokens, gap) for group in line if (gap := group.gap("lns", BASELINE)) is not None]
    axes.axhline(0, color="black", linewidth=0.8)
    if gaps:
        style = ARMS["lns"]
        bars = [rates.interval(gap.values) or 0.0 for _, gap in gaps]
        at = [count for count, _ in gaps], [gap.mean for _, gap in gaps]
        axes.errorbar(*at, bars, color=style.colour, marker=style.marker, linestyle=style.line, capsize=3, markersize=4)
    axes.set_title(_where(line[0], tokens=False), fontsize=8)
    axes.set_xlabel("tokens")
    axes.set_ylabel("LNS − Pre-LN, own best rates")
