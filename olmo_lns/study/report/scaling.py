"""The study's report: Markdown tables, the papers' numbers beside them, and loss against parameters."""

from __future__ import annotations

import math
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, Callable, Sequence

import pandas as pd

from olmo_lns.study.arms import ARMS, BASELINE
from olmo_lns.study.collect.gather import COMPLETE, Result
from olmo_lns.study.data.corpora import BUILT
from olmo_lns.study.plan.spec import Study, published


def complete(study: Study, results: Sequence[Result]) -> pd.DataFrame:
    """The complete runs, a row each. ``group`` is the size without its rate; ``rate`` is NaN where none is tried."""
    runs = {run.name: run for run in study.runs}
    found = pd.DataFrame([asdict(result) for result in results], columns=[field.name for field in fields(Result)])
    found = found.assign(
        group=[runs[name].group for name in found.run],
        rate=pd.Series([runs[name].rate for name in found.run], index=found.index, dtype="float64"),
    )
    return found[(found.status == COMPLETE) & found.loss.notna()].astype({"loss": float, "heldout": float})


def best(found: pd.DataFrame) -> pd.DataFrame:
    """Of each size and arm the runs at the rate whose mean loss is lowest."""
    mean = found.groupby(["group", "arm", "size"]).loss.transform("mean")
    return found[mean == mean.groupby([found.group, found.arm]).transform("min")]


def summary(found: pd.DataFrame, arm: str, column: str = "loss") -> pd.DataFrame:
    """By size, smallest first: ``parameters``, ``seeds``, ``mean``, ``std`` (n - 1; NaN for one seed) and ``rate``."""
    mine = found[(found.arm == arm) & found[column].notna()].groupby("group", sort=False)
    table = mine.agg(
        parameters=("parameters", "first"),
        seeds=(column, "size"),
        mean=(column, "mean"),
        std=(column, "std"),
        rate=("rate", "first"),
    )
    return table.sort_values("parameters")


def difference(found: pd.DataFrame, group: str, arm: str, base: str = BASELINE) -> pd.Series:
    """``loss(arm) - loss(base)`` of each seed that both have."""
    by = found[found.group == group].pivot_table(index="seed", columns="arm", values="loss")
    return (by[arm] - by[base]).dropna() if {arm, base} <= set(by) else pd.Series(dtype=float)


def write(study: Study, results: Sequence[Result], out: Path) -> list[Path]:
    """Write ``report.md`` and ``loss.png`` into ``out``."""
    out.mkdir(parents=True, exist_ok=True)
    image, text = out / "loss.png", out / "report.md"
    drawn = figure(study, results, image)
    text.write_text(markdown(study, results, image.name if drawn else None), encoding="utf-8")
    return [text, *([image] if drawn else [])]


def markdown(study: Study, results: Sequence[Result], image: str | None) -> str:
    """The report; every number is of ``results``, the papers' are labelled."""
    every = complete(study, results)
    found = best(every)
    parts = [
        f"# Scaling study `{study.name}`",
        f"{len(every)} of {len(results)} runs complete. A run's loss is the mean training loss (nats per token) over "
        f"the last {study.final_fraction:.0%} of its steps; ± is the standard deviation over seeds, given only where "
        "there are two or more. Arms of one size and seed saw the same batches in the same order; `study collect` "
        "checked that their settings and data differ in nothing but the arm.",
    ]
    if image:
        parts.append(f"![loss against parameters]({image})")
    parts += ["## Loss", _losses(study, results, found)]
    if every.rate.notna().any():
        parts += ["## Every rate", _rates(study, every)]
    if found.heldout.notna().any():
        note = "Of held-out text after the last step, per token with a label (padding counts for nothing)."
        parts += [
            "## Perplexity",
            _by_arm(study, study.groups, lambda group, arm: _perplexity(found, group, arm)),
            note,
        ]
    parts += ["## Runs", _runs(results), *(["## The paper", beside(study, results)] if study.published else [])]
    return "\n\n".join(parts) + "\n"


def _table(rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([lines[0], "|---" * len(rows[0]) + "|", *lines[1:]])


def _by_arm(study: Study, columns: Sequence[str], cell: Callable[[str, str], str]) -> str:
    """A line for each arm, a column for each size, by its name."""
    rows = [[ARMS[arm].label, *(cell(column.split(" ")[0], arm) for column in columns)] for arm in study.arms]
    return _table([["arm", *columns], *rows])


def _number(values: pd.Series, digits: int = 4, sign: str = "") -> str:
    """Over the seeds; ``–`` for none."""
    if not len(values):
        return "–"
    if len(values) == 1:
        return f"{values.iloc[0]:{sign}.{digits}f} (1 seed)"
    return f"{values.mean():{sign}.{digits}f} ± {values.std():.{digits}f} ({len(values)} seeds)"


def _of(found: pd.DataFrame, group: str, arm: str) -> pd.DataFrame:
    return found[(found.group == group) & (found.arm == arm)]


def _losses(study: Study, results: Sequence[Result], found: pd.DataFrame) -> str:
    """A line for each arm: its loss, and its difference to the baseline."""

    def cell(group: str, arm: str) -> str:
        mine = _of(found, group, arm)
        if not len(mine):
            return _unfinished(study, results, group, arm)
        text = _number(mine.loss) + (f" at {mine.rate.iloc[0]:g}" if mine.rate.notna().any() else "")
        gap = difference(found, group, arm) if arm != BASELINE else ()
        return f"{text}; {_number(gap, sign='+')}" if len(gap) else text

    parameters = {run.group: run.shape.parameters for run in study.runs}
    note = f"Per size the loss, and after the semicolon its difference to {ARMS[BASELINE].label}, paired by seed: "
    note += "negative is lower."
    if several := [ARMS[arm].label for arm in study.arms if not ARMS[arm].isolates]:
        note += f" Changing more than one thing, and so beside the others: {'; '.join(several)}."
    if found.rate.notna().any():
        note += " Each arm is at the best of its learning rates, chosen by these losses, which flatters each a little."
    if any(result.status != COMPLETE for result in results):
        note += " Runs that did not finish take no part in any number."
    columns = [f"{group} ({parameters[group]:,})" for group in study.groups]
    return f"{_by_arm(study, columns, cell)}\n\n{note}"


def _unfinished(study: Study, results: Sequence[Result], group: str, arm: str) -> str:
    names = {run.name for run in study.runs if (run.group, run.arm) == (group, arm)}
    if not (mine := [result for result in results if result.run in names]):
        return "–"
    furthest = max(mine, key=lambda result: result.step / result.steps)
    return f"{furthest.status} ({furthest.step:,} of {furthest.steps:,} steps)"


def _rates(study: Study, found: pd.DataFrame) -> str:
    tried = found.groupby(["group", "rate", "arm"], sort=False)["loss"]
    cells = {key: _number(losses) for key, losses in tried}
    rows = [["size", "rate", *(ARMS[arm].label for arm in study.arms)]]
    for group, rate in dict.fromkeys((group, rate) for group, rate, _ in sorted(cells, key=lambda key: key[1])):
        rows.append([group, f"{rate:g}", *(cells.get((group, rate, arm), "–") for arm in study.arms)])
    return _table(rows)


def _perplexity(found: pd.DataFrame, group: str, arm: str) -> str:
    """The exponential of the mean held-out loss."""
    losses = _of(found, group, arm).heldout.dropna()
    if not len(losses):
        return "–"
    spread = f" ± {losses.map(math.exp).std():.2f} ({len(losses)} seeds)" if len(losses) > 1 else ""
    return f"{math.exp(losses.mean()):.2f}{spread}"


def _runs(results: Sequence[Result]) -> str:
    rows = [["run", "status", "steps", "tokens", "loss", "within the window ±", "CPU s", "tokens per CPU s"]]
    for r in results:
        loss = f"{r.loss:.4f}" if r.loss is not None else "–"
        std = f"{r.loss_std:.4f} ({r.points} logged)" if r.loss_std is not None else "–"
        cpu = f"{r.cpu_s:,.0f}" if r.cpu_s else "–"
        speed = f"{r.tokens / r.cpu_s:,.0f}" if r.cpu_s and r.status == COMPLETE else "–"
        rows.append([r.run, r.status, f"{r.step:,}/{r.steps:,}", f"{r.tokens:,}", loss, std, cpu, speed])
    return _table(rows)


def corrected(size: str, perplexity: float) -> float | None:
    """A published perplexity without the batch too many; None for sizes whose batches are not known."""
    batches = published()["batches"].get(size)
    return None if batches is None else math.exp(math.log(perplexity) * (batches + 1) / batches)


def beside(study: Study, results: Sequence[Result]) -> str:
    """The table that the description names: this study's number and the published one, size by size and arm by arm."""
    table, found = published()["tables"][study.published], best(complete(study, results))
    cells, of_loss = table["cells"], table["measure"] == "loss"
    groups = [group for group in study.groups if group in cells]
    rows = [["arm", *(text for group in groups for text in (f"{group}, ours", f"{group}, published"))]]
    for arm in (arm for arm in ARMS if arm in study.arms or any(arm in cells[group] for group in groups)):
        row = [ARMS[arm].label]
        for group in groups:
            value = cells[group].get(arm)
            better = None if value is None or of_loss or value >= 100 else corrected(group.split("_")[0], value)
            row.append(_number(_of(found, group, arm).loss, 3) if of_loss else _perplexity(found, group, arm))
            row.append("–" if value is None else f"{value:g}" + (f" ({better:.2f})" if better else ""))
        rows.append(row)
    notes = [text for note in table["notes"] for text in ([note] if isinstance(note, str) else note)]
    head = f"{table['title']} ({table['measure']}), as published and not ours:"
    return "\n".join([head, "", _table(rows), "", *(f"- {note}" for note in notes)])


def figure(study: Study, results: Sequence[Result], path: Path) -> bool:
    """Draw loss against parameters; False, and no file, when no run is complete.

    The paper's points are hollow and named; beside losses of bytes they would not be comparable, and are left out.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import NullLocator

    found = best(complete(study, results))
    curves = {arm: points for arm in study.arms if len(points := summary(found, arm))}
    if not curves:
        return False
    sizes = {group: row.parameters for points in curves.values() for group, row in points.iterrows()}
    chart = Figure(figsize=(8, 4.5), dpi=120, layout="constrained")
    axes = chart.subplots()
    axes.set_title(f"{study.name}: {study.runs[0].shape.tokens:,} tokens a run", fontsize=10)
    axes.grid(alpha=0.3)
    loss = "final training loss (nats per token)"
    if len(sizes) == 1:  # nothing against parameters: a line for each arm, the lowest loss at the top
        ranked = sorted(curves, key=lambda name: curves[name]["mean"].iloc[0], reverse=True)
        for place, name in enumerate(ranked):
            _draw(axes, name, curves[name]["mean"], [place], "x", curves[name]["std"])
        axes.set_yticks(range(len(ranked)), [ARMS[name].label for name in ranked], fontsize=7)
        axes.set_xlabel(loss)
    else:
        for name, points in curves.items():
            _draw(axes, name, points.parameters, points["mean"], "y", points["std"])
        for point in [] if study.data in BUILT else published()["points"]:
            for name in ("preln", "lns"):
                style: dict[str, Any] = {"color": ARMS[name].colour, "marker": ARMS[name].marker, "fillstyle": "none"}
                axes.plot(point["parameters"], point[name], **style)
            at = (point["parameters"], point["preln"])
            axes.annotate(f"{point['label']} (hollow)", at, (0, 7), textcoords="offset points", fontsize=7, ha="center")
        axes.set(xscale="log", xlabel="parameters", ylabel=loss)
        axes.set_xticks(list(sizes.values()), list(sizes))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.margins(y=0.1)
        chart.legend(loc="outside right upper", fontsize=7)
    chart.savefig(path, metadata={"Software": None})
    return True


def _draw(axes: Any, name: str, x: Any, y: Any, direction: str, spread: pd.Series) -> None:
    """Points with the deviation of those that have two seeds or more."""
    arm = ARMS[name]
    axes.plot(x, y, arm.marker, color=arm.colour, label=arm.label)
    if spread.notna().any():
        axes.errorbar(x, y, **{f"{direction}err": spread}, fmt="none", color=arm.colour, capsize=3)
