"""The study's report: Markdown tables with the papers' numbers, and a figure of loss against parameters."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Callable, Sequence

import pandas as pd

from olmo_lns.study.arms import ARMS, BASELINE
from olmo_lns.study.collect import COMPLETE
from olmo_lns.study.data.corpora import BUILT
from olmo_lns.study.describe import Study, published


def complete(study: Study, results: pd.DataFrame) -> pd.DataFrame:
    """Return the complete runs. ``group`` is the size without its rate; ``rate`` is NaN without ``rates``."""
    runs = {run.name: run for run in study.runs}
    found = results[(results.status == COMPLETE) & results.loss.notna() & results.run.isin([*runs])]
    return found.assign(
        group=[runs[name].group for name in found.run],
        rate=pd.Series([runs[name].rate for name in found.run], index=found.index, dtype="float64"),
    )


def best(found: pd.DataFrame) -> pd.DataFrame:
    """Return the runs of each size and arm at the rate with the lowest mean loss."""
    mean = found.groupby(["group", "arm", "size"]).loss.transform("mean")
    return found[mean == mean.groupby([found.group, found.arm]).transform("min")]


def difference(found: pd.DataFrame, group: str, arm: str, base: str = BASELINE) -> pd.Series:
    """Return ``loss(arm) - loss(base)`` for each common seed."""
    by = found[found.group == group].pivot_table(index="seed", columns="arm", values="loss")
    return (by[arm] - by[base]).dropna() if {arm, base} <= set(by) else pd.Series(dtype=float)


def write(study: Study, results: pd.DataFrame, out: Path) -> list[Path]:
    """Write ``report.md`` and ``loss.png`` into ``out``."""
    out.mkdir(parents=True, exist_ok=True)
    image, text = out / "loss.png", out / "report.md"
    drawn = figure(study, results, image)
    text.write_text(markdown(study, results, image.name if drawn else None), encoding="utf-8")
    return [text, *([image] if drawn else [])]


def markdown(study: Study, results: pd.DataFrame, image: str | None) -> str:
    """Return the report. Numbers come from ``results``; the papers' are labelled."""
    every = complete(study, results)
    found = best(every)
    parts = [
        f"# Scaling study `{study.name}`",
        f"{len(every)} of {len(study.runs)} runs complete. A run's loss is the mean training loss (nats per token) "
        f"over the last {study.final_fraction:.0%} of its steps; ± is the standard deviation over seeds, given "
        "for two seeds or more. Arms of one size and seed read the same batches in the same order; `study collect` "
        "checked that their settings differ only in the arm.",
    ]
    if image:
        parts.append(f"![loss against parameters]({image})")
    parts += ["## Loss", _losses(study, results, found)]
    if every.rate.notna().any():
        tried = every.pivot_table(index=["group", "rate"], columns="arm", values="loss", aggfunc=_number, sort=False)
        arms = [arm for arm in study.arms if arm in tried]
        rows = [[group, f"{rate:g}", *row] for (group, rate), *row in tried[arms].fillna("–").sort_index().itertuples()]
        parts += ["## Every rate", _table([["size", "rate", *(ARMS[arm].label for arm in arms)], *rows])]
    if found.heldout.notna().any():
        note = "On held-out text after the last step, per token with a label (padding is excluded)."
        cells = _by_arm(study, study.groups, lambda group, arm: _perplexity(_of(found, group, arm)))
        parts += ["## Perplexity", cells, note]
    return "\n\n".join(parts + (["## The paper", beside(study, results)] if study.published else [])) + "\n"


def _table(rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([lines[0], "|---" * len(rows[0]) + "|", *lines[1:]])


def _by_arm(study: Study, columns: Sequence[str], cell: Callable[[str, str], str]) -> str:
    """Return a table with a line for each arm and a column for each size."""
    rows = [[ARMS[arm].label, *(cell(column.split(" ")[0], arm) for column in columns)] for arm in study.arms]
    return _table([["arm", *columns], *rows])


def _number(values: pd.Series, digits: int = 4, sign: str = "") -> str:
    """Return the mean over seeds as text; ``–`` without any."""
    if not len(values):
        return "–"
    spread = "1 seed" if len(values) == 1 else f"{len(values)} seeds"
    return f"{values.mean():{sign}.{digits}f}" + (
        f" ± {values.std():.{digits}f} ({spread})" if len(values) > 1 else f" ({spread})"
    )


def _of(found: pd.DataFrame, group: str, arm: str) -> pd.DataFrame:
    return found[(found.group == group) & (found.arm == arm)]


def _losses(study: Study, results: pd.DataFrame, found: pd.DataFrame) -> str:
    """Return a table with each arm's loss and its difference to the baseline."""

    def cell(group: str, arm: str) -> str:
        if not len(mine := _of(found, group, arm)):
            names = [run.name for run in study.runs if (run.group, run.arm) == (group, arm)]
            begun = results[results.run.isin(names)].sort_values("step")
            return f"{begun.status.iloc[-1]} ({begun.step.iloc[-1]:,} steps)" if len(begun) else "–"
        text = _number(mine.loss) + (f" at {mine.rate.iloc[0]:g}" if mine.rate.notna().any() else "")
        gap = difference(found, group, arm) if arm != BASELINE else ()
        return f"{text}; {_number(gap, sign='+')}" if len(gap) else text

    parameters = {run.group: run.shape.parameters for run in study.runs}
    note = f"The loss for each size; after the semicolon the difference to {ARMS[BASELINE].label}, paired by seed: "
    note += "negative is lower."
    if several := [ARMS[arm].label for arm in study.arms if not ARMS[arm].isolates]:
        note += f" Arms that change more than one thing: {'; '.join(several)}."
    if found.rate.notna().any():
        note += " Each arm is at its best learning rate, chosen by these losses, which favours each arm slightly."
    if len(results[results.status != COMPLETE]):
        note += " Unfinished runs are excluded from all numbers."
    columns = [f"{group} ({parameters[group]:,})" for group in study.groups]
    return f"{_by_arm(study, columns, cell)}\n\n{note}"


def _perplexity(found: pd.DataFrame) -> str:
    """Return the exponential of the mean held-out loss."""
    losses = found.heldout.dropna()
    if not len(losses):
        return "–"
    spread = f" ± {losses.map(math.exp).std():.2f} ({len(losses)} seeds)" if len(losses) > 1 else ""
    return f"{math.exp(losses.mean()):.2f}{spread}"


def corrected(size: str, perplexity: float) -> float | None:
    """Correct a published perplexity for the additional batch; None for sizes with an unknown number of batches."""
    batches = published()["batches"].get(size)
    return None if batches is None else math.exp(math.log(perplexity) * (batches + 1) / batches)


def beside(study: Study, results: pd.DataFrame) -> str:
    """Return the description's published table with this study's numbers beside, by size and arm."""
    table, found = published()["tables"][study.published], best(complete(study, results))
    cells, of_loss = table["cells"], table["measure"] == "loss"
    groups = [group for group in study.groups if group in cells]
    rows = [["arm", *(text for group in groups for text in (f"{group}, ours", f"{group}, published"))]]
    for arm in (arm for arm in ARMS if arm in study.arms or any(arm in cells[group] for group in groups)):
        row = [ARMS[arm].label]
        for group in groups:
            value, mine = cells[group].get(arm), _of(found, group, arm)
            better = None if value is None or of_loss or value >= 100 else corrected(group.split("_")[0], value)
            row.append(_number(mine.loss, 3) if of_loss else _perplexity(mine))
            row.append("–" if value is None else f"{value:g}" + (f" ({better:.2f})" if better else ""))
        rows.append(row)
    notes = [text for note in table["notes"] for text in ([note] if isinstance(note, str) else note)]
    head = f"{table['title']} ({table['measure']}), as published:"
    return "\n".join([head, "", _table(rows), "", *(f"- {note}" for note in notes)])


def figure(study: Study, results: pd.DataFrame, path: Path) -> bool:
    """Draw loss against parameters; return False, without a file, if no run is complete.

    The paper's points are hollow and named; they are omitted for losses of bytes, which are not comparable.
    """
    from matplotlib.figure import Figure

    found = best(complete(study, results))
    if not len(found):
        return False
    chart = Figure(figsize=(8, 4.5), dpi=120, layout="constrained")
    axes = chart.subplots()
    for arm in (arm for arm in study.arms if (found.arm == arm).any()):
        by = found[found.arm == arm].groupby("group", sort=False)
        mean, spread, style = by.loss.mean(), by.loss.std().fillna(0), ARMS[arm]
        at = by.parameters.first()
        axes.errorbar(at, mean, spread, fmt=style.marker, color=style.colour, label=style.label, capsize=3)
    for point in [] if study.data in BUILT else published()["points"]:
        for style in (ARMS["preln"], ARMS["lns"]):
            axes.plot(point["parameters"], point[style.name], color=style.colour, marker=style.marker, fillstyle="none")
        axes.annotate(f"{point['label']} (hollow)", (point["parameters"], point["preln"]), fontsize=7, ha="center")
    axes.set(xscale="log", xlabel="parameters", ylabel="final training loss (nats per token)", title=study.name)
    axes.grid(alpha=0.3)
    chart.legend(loc="outside right upper", fontsize=7)
    chart.savefig(path, metadata={"Software": None})
    return True
