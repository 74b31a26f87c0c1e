"""Write the report of a study: tables of loss and perplexity, and a figure of loss against parameters."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Callable, Sequence

import pandas as pd

from olmo_lns.study.arms import ARMS, BASELINE
from olmo_lns.study.collect import COMPLETE
from olmo_lns.study.data.corpora import CORPUS_BUILDERS
from olmo_lns.study.describe import Study, published


def complete(study: Study, results: pd.DataFrame) -> pd.DataFrame:
    """Return the complete runs. ``group`` is the size without its rate; ``rate`` is NaN without ``rates``."""
    runs = {run.name: run for run in study.runs}
    found = results[(results.status == COMPLETE) & results.loss.notna() & results.run.isin([*runs])]
    return found.assign(
        group=[runs[name].group for name in found.run],
        rate=pd.Series([runs[name].rate for name in found.run], index=found.index, dtype="float64"),
        perplexity=found.heldout.astype(float).map(math.exp, na_action="ignore"),
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
    """Write ``report.md``, and ``loss.png`` if a run is complete, into ``out``."""
    out.mkdir(parents=True, exist_ok=True)
    image, text = out / "loss.png", out / "report.md"
    found = complete(study, results)
    if len(found):
        figure(study, found, image)
    text.write_text(markdown(study, found, image.name if len(found) else None), encoding="utf-8")
    return [text, *([image] if len(found) else [])]


def markdown(study: Study, every: pd.DataFrame, image: str | None) -> str:
    """Return the report of the :func:`complete` runs. The papers' numbers are labelled."""
    found, parameters = best(every), {run.group: run.shape.parameters for run in study.runs}

    def loss(group: str, arm: str) -> str:
        mine = found[(found.group == group) & (found.arm == arm)]
        gap = difference(found, group, arm) if arm != BASELINE else ()
        at = f" at {mine.rate.iloc[0]:g}" if mine.rate.notna().any() else ""
        return _number(mine.loss) + at + (f"; {_number(gap, sign='+')}" if len(gap) else "")

    parts = [
        f"# Scaling study `{study.name}`",
        f"{len(every)} of {len(study.runs)} runs complete; the others are in no number. A run's loss is the mean "
        f"training loss (nats per token) over the last {study.final_fraction:.0%} of its steps; ± is the standard "
        "deviation over n seeds. Arms of one size and seed read the same batches in the same order; `study collect` "
        "checked that their settings differ only in the arm.",
        *([f"![loss against parameters]({image})"] if image else []),
        "## Loss",
        _by_arm(study, [f"{group} ({parameters[group]:,})" for group in study.groups], loss),
        f"After the semicolon: the difference to {ARMS[BASELINE].label}, paired by seed; negative is lower.",
    ]
    if several := [ARMS[arm].label for arm in study.arms if not ARMS[arm].isolates]:
        parts.append(f"Arms that change more than one thing: {'; '.join(several)}.")
    if every.rate.notna().any():
        parts.append("Each arm is at its best rate, chosen by these losses, which favours each arm slightly.")
        tried = every.pivot_table(index=["group", "rate"], columns="arm", values="loss", aggfunc=_number, sort=False)
        arms = [arm for arm in study.arms if arm in tried]
        rows = [[group, f"{rate:g}", *row] for (group, rate), *row in tried[arms].fillna("–").sort_index().itertuples()]
        parts += ["## Every rate", _table([["size", "rate", *(ARMS[arm].label for arm in arms)], *rows])]
    if found.perplexity.notna().any():
        cells = _by_arm(study, study.groups, lambda group, arm: _of(found, group, arm, "perplexity"))
        parts += ["## Perplexity", cells, "On held-out text after the last step, per token with a label."]
    return "\n\n".join(parts + (["## The paper", beside(study, found)] if study.published else [])) + "\n"


def _table(rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([lines[0], "|---" * len(rows[0]) + "|", *lines[1:]])


def _by_arm(study: Study, titles: Sequence[str], cell: Callable[[str, str], str]) -> str:
    """Return a table with a line for each arm and a column for each size."""
    rows = [[ARMS[arm].label, *(cell(group, arm) for group in study.groups)] for arm in study.arms]
    return _table([["arm", *titles], *rows])


def _number(values: pd.Series, digits: int = 4, sign: str = "") -> str:
    """Return the mean over seeds as text; ``–`` without any."""
    if not len(values):
        return "–"
    spread = f" ± {values.std():.{digits}f}" if len(values) > 1 else ""
    return f"{values.mean():{sign}.{digits}f}{spread} (n = {len(values)})"


def _of(found: pd.DataFrame, group: str, arm: str, measure: str) -> str:
    """Return the mean loss or perplexity of a size and arm as text."""
    return _number(found[(found.group == group) & (found.arm == arm)][measure].dropna(), 3 if measure == "loss" else 2)


def beside(study: Study, found: pd.DataFrame) -> str:
    """Return the description's published table with this study's numbers beside, by size and arm."""
    table = published()["tables"][study.published]
    cells, groups = table["cells"], [group for group in study.groups if group in table["cells"]]
    rows = [["arm", *(text for group in groups for text in (f"{group}, ours", f"{group}, published"))]]
    for arm in (arm for arm in ARMS if arm in study.arms or any(arm in cells[group] for group in groups)):
        row = [ARMS[arm].label]
        for group in groups:
            row += [_of(found, group, arm, table["measure"]), f"{cells[group].get(arm, '–')}"]
        rows.append(row)
    notes = [text for note in table["notes"] for text in ([note] if isinstance(note, str) else note)]
    head = f"{table['title']} ({table['measure']}), as published:"
    return "\n".join([head, "", _table(rows), "", *(f"- {note}" for note in notes)])


def figure(study: Study, every: pd.DataFrame, path: Path) -> None:
    """Draw loss against parameters.

    The paper's points are hollow and named; they are omitted for losses of bytes, which are not comparable.
    """
    from matplotlib.figure import Figure

    found, chart = best(every), Figure(figsize=(8, 4.5), dpi=120, layout="constrained")
    axes = chart.subplots()
    for arm in (arm for arm in study.arms if (found.arm == arm).any()):
        by = found[found.arm == arm].groupby("group", sort=False)
        mean, spread, style = by.loss.mean(), by.loss.std().fillna(0), ARMS[arm]
        at = by.parameters.first()
        axes.errorbar(at, mean, spread, fmt=style.marker, color=style.colour, label=style.label, capsize=3)
    for point in [] if study.data in CORPUS_BUILDERS else published()["points"]:
        for style in (ARMS["preln"], ARMS["lns"]):
            axes.plot(point["parameters"], point[style.name], color=style.colour, marker=style.marker, fillstyle="none")
        axes.annotate(f"{point['label']} (hollow)", (point["parameters"], point["preln"]), fontsize=7, ha="center")
    axes.set(xscale="log", xlabel="parameters", ylabel="final training loss (nats per token)", title=study.name)
    axes.grid(alpha=0.3)
    chart.legend(loc="outside right upper", fontsize=7)
    chart.savefig(path, metadata={"Software": None})
