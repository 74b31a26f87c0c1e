"""Write the report of a study: tables of loss and perplexity, and a figure of loss by number of parameters."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Callable, Sequence

import pandas as pd

from olmo_lns.arms import ARMS, BASELINE, LNS_ARM
from olmo_lns.study.collect import COMPLETE
from olmo_lns.study.data.corpora import CORPUS_BUILDERS
from olmo_lns.study.describe import Study
from olmo_lns.study.schema import published


def complete(study: Study, results: pd.DataFrame) -> pd.DataFrame:
    """Return the complete runs, with the columns ``size``, ``rate`` and ``perplexity``; NaN if missing."""
    runs = {run.name: run for run in study.runs}
    rows = results[(results.status == COMPLETE) & results.loss.notna() & results.run.isin([*runs])]
    return rows.assign(
        size=[runs[name].size for name in rows.run],
        rate=pd.Series([runs[name].rate for name in rows.run], index=rows.index, dtype="float64"),
        perplexity=rows.heldout.astype(float).map(math.exp, na_action="ignore"),
    )


def best(runs: pd.DataFrame) -> pd.DataFrame:
    """Return the runs of each size and arm at the learning rate with the lowest mean loss."""
    mean = runs.groupby(["size", "arm", "rate"], dropna=False).loss.transform("mean")
    return runs[mean == mean.groupby([runs["size"], runs.arm]).transform("min")]


def difference(runs: pd.DataFrame, size: str, arm: str, base: str = BASELINE) -> pd.Series:
    """Return ``loss(arm) - loss(base)`` for each common seed."""
    losses = runs[runs["size"] == size].pivot_table(index="seed", columns="arm", values="loss")
    return (losses[arm] - losses[base]).dropna() if {arm, base} <= set(losses) else pd.Series(dtype=float)


def write(study: Study, results: pd.DataFrame, out: Path) -> list[Path]:
    """Write ``report.md``, and ``loss.png`` if a run is complete, into ``out``. Return the paths."""
    out.mkdir(parents=True, exist_ok=True)
    image, report = out / "loss.png", out / "report.md"
    runs = complete(study, results)
    if len(runs):
        figure(study, runs, image)
    report.write_text(markdown(study, runs, image.name if len(runs) else None), encoding="utf-8")
    return [report, image] if len(runs) else [report]


def markdown(study: Study, runs: pd.DataFrame, image: str | None) -> str:
    """Return the report of the :func:`complete` runs. The papers' numbers are labeled."""
    best_runs, parameters = best(runs), {run.size: run.workload.parameters for run in study.runs}

    def loss(size: str, arm: str) -> str:
        arm_runs = best_runs[(best_runs["size"] == size) & (best_runs.arm == arm)]
        text = _format_mean(arm_runs.loss)
        if arm_runs.rate.notna().any():
            text += f" at {arm_runs.rate.iloc[0]:g}"
        if arm != BASELINE and len(differences := difference(best_runs, size, arm)):
            text += f"; {_format_mean(differences, sign='+')}"
        return text

    parts = [
        f"# Scaling study `{study.name}`",
        f"{len(runs)} of {len(study.runs)} runs are complete; the numbers exclude the others. The loss of a run is the "
        f"mean training loss (nats per token) over the last {study.final_fraction:.0%} of its steps; ± is the standard "
        "deviation over n seeds."
        + (_comparison(runs) if len(runs) else " Launch the runs and collect them again to get numbers."),
        *([f"![loss by number of parameters]({image})"] if image else []),
        "## Loss",
        _by_arm(study, [f"{size} ({parameters[size]:,})" for size in study.sizes], loss),
        f"After the semicolon: the difference from {ARMS[BASELINE].label}, paired by seed; negative is lower.",
    ]
    if labels := [ARMS[arm].label for arm in study.arms if not ARMS[arm].only_difference]:
        parts.append(f"Arms that change more than one thing: {'; '.join(labels)}.")
    if runs.rate.notna().any():
        parts.append("Each arm is at its best rate. These losses chose the rate, which favors each arm slightly.")
        losses = runs.groupby(["size", "rate", "arm"]).loss.apply(_format_mean).unstack("arm")
        arms = [arm for arm in study.arms if arm in losses]
        table = losses[arms].fillna("–").sort_index()
        rows = [[size, f"{rate:g}", *cells] for (size, rate), *cells in table.itertuples()]
        parts += ["## Every rate", _table([["size", "rate", *(ARMS[arm].label for arm in arms)], *rows])]
    if best_runs.perplexity.notna().any():
        perplexities = _by_arm(study, study.sizes, lambda size, arm: _cell(best_runs, size, arm, "perplexity"))
        parts += ["## Perplexity", perplexities, "On held-out text after the last step, per token with a label."]
    if study.published:
        parts += ["## The paper", published_table(study, best_runs)]
    return "\n\n".join(parts) + "\n"


def _table(rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([lines[0], "|---" * len(rows[0]) + "|", *lines[1:]])


def _comparison(runs: pd.DataFrame) -> str:
    """Return what is known of the settings of the complete runs."""
    without = [str(run) for run, has_settings in zip(runs.run, runs.has_settings, strict=True) if not has_settings]
    text = (
        " Arms of one size and seed are compared. `study collect` compared the settings that the runs saved, and found"
    )
    text += " that they differ only in the arm."
    if without:
        text += f" It could not compare {len(without)} of them, which saved no settings: {', '.join(without)}."
    return text


def _by_arm(study: Study, titles: Sequence[str], cell: Callable[[str, str], str]) -> str:
    """Return a table with a line for each arm and a column for each size."""
    rows = [[ARMS[arm].label, *(cell(size, arm) for size in study.sizes)] for arm in study.arms]
    return _table([["arm", *titles], *rows])


def _format_mean(values: pd.Series, digits: int = 4, sign: str = "") -> str:
    """Return mean, standard deviation and number of values as text, or ``–`` if there are no values."""
    if not len(values):
        return "–"
    deviation = f" ± {values.std():.{digits}f}" if len(values) > 1 else ""
    return f"{values.mean():{sign}.{digits}f}{deviation} (n = {len(values)})"


def _cell(runs: pd.DataFrame, size: str, arm: str, measure: str) -> str:
    """Return the mean loss or perplexity of a size and arm as text."""
    values = runs[(runs["size"] == size) & (runs.arm == arm)][measure].dropna()
    return _format_mean(values, digits=3 if measure == "loss" else 2)


def published_table(study: Study, runs: pd.DataFrame) -> str:
    """Return the table that the description names, with this study's numbers beside the published ones."""
    table = published()["tables"][study.published]
    cells, sizes = table["cells"], [size for size in study.sizes if size in table["cells"]]
    rows = [["arm", *(title for size in sizes for title in (f"{size}, ours", f"{size}, published"))]]
    for arm in (arm for arm in ARMS if arm in study.arms or any(arm in cells[size] for size in sizes)):
        row = [ARMS[arm].label]
        for size in sizes:
            row += [_cell(runs, size, arm, table["measure"]), f"{cells[size].get(arm, '–')}"]
        rows.append(row)
    notes = [text for note in table["notes"] for text in ([note] if isinstance(note, str) else note)]
    head = f"{table['title']} ({table['measure']}), as published:"
    return "\n".join([head, "", _table(rows), "", *(f"- {note}" for note in notes)])


def figure(study: Study, runs: pd.DataFrame, path: Path) -> None:
    """Draw loss by number of parameters.

    The paper's points are hollow and named. They are omitted for a study of bytes, whose losses are not comparable.
    """
    from matplotlib.figure import Figure

    best_runs, chart = best(runs), Figure(figsize=(8, 4.5), dpi=120, layout="constrained")
    axes = chart.subplots()
    for arm in (arm for arm in study.arms if (best_runs.arm == arm).any()):
        by_size, style = best_runs[best_runs.arm == arm].groupby("size", sort=False), ARMS[arm]
        parameters, mean, deviation = by_size.parameters.first(), by_size.loss.mean(), by_size.loss.std().fillna(0)
        axes.errorbar(parameters, mean, deviation, fmt=style.marker, color=style.color, label=style.label, capsize=3)
    for point in [] if study.data in CORPUS_BUILDERS else published()["points"]:
        for style in (ARMS[BASELINE], ARMS[LNS_ARM]):
            axes.plot(point["parameters"], point[style.name], color=style.color, marker=style.marker, fillstyle="none")
        axes.annotate(f"{point['label']} (hollow)", (point["parameters"], point[BASELINE]), fontsize=7, ha="center")
    axes.set(xscale="log", xlabel="parameters", ylabel="final training loss (nats per token)", title=study.name)
    axes.grid(alpha=0.3)
    chart.legend(loc="outside right upper", fontsize=7)
    chart.savefig(path, metadata={"Software": None})
