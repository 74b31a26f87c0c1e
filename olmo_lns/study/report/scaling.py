"""The study's report: Markdown tables, the papers' numbers beside them, and loss against parameters."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Sequence

import pandas as pd

from olmo_lns.study.arms import ARMS, BASELINE
from olmo_lns.study.collect.results import COMPLETE, Result
from olmo_lns.study.data.corpora import BUILT
from olmo_lns.study.plan.description import published
from olmo_lns.study.plan.spec import Study
from olmo_lns.study.report.fit import best, complete, difference, power_law, saved_parameters, summary

__all__ = ["beside", "figure", "markdown", "write"]

#: Above this many arms a report has a line for each.
MANY_ARMS = 6


def write(study: Study, results: Sequence[Result], out: Path) -> list[Path]:
    """Write ``report.md`` and ``loss.png`` into ``out``."""
    out.mkdir(parents=True, exist_ok=True)
    image, text = out / "loss.png", out / "report.md"
    drawn = figure(study, results, image)
    text.write_text(markdown(study, results, image.name if drawn else None), encoding="utf-8")
    return [text, *([image] if drawn else [])]


def markdown(study: Study, results: Sequence[Result], image: str | None) -> str:
    """The report; every number is of ``results``, the papers' are labelled."""
    found = complete(study, results)
    parts = [
        f"# Scaling study `{study.name}`",
        f"{len(found)} of {len(results)} runs complete. A run's loss is the mean training loss (nats per token) over "
        f"the last {study.final_fraction:.0%} of its steps; ± is the standard deviation over seeds, given only where "
        "there are two or more. Arms of one size and seed saw the same batches in the same order; `study collect` "
        "checked that their settings and data differ in nothing but the arm.",
    ]
    if image:
        parts.append(f"![loss against parameters]({image})")
    parts += ["## Loss", _losses(study, results, best(found))]
    if found.rate.notna().any():
        parts += ["## Every rate", _rates(study, found)]
    parts += ["## Power law", _fits(study, best(found))]
    if found.heldout.notna().any():
        note = "Of held-out text after the last step, per token with a label (padding counts for nothing)."
        parts += ["## Perplexity", f"{_perplexities(study, best(found))}\n\n{note}"]
    parts += ["## Runs", _runs(results), "## The paper", beside(study, results) if study.published else _paper()]
    return "\n\n".join(parts) + "\n"


def _table(rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([lines[0], "|---" * len(rows[0]) + "|", *lines[1:]])


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
    """A row for each size, or for each arm where there are too many for one line."""
    base = ARMS[BASELINE].label
    others = [arm for arm in study.arms if arm != BASELINE] if BASELINE in study.arms else []

    def loss(group: str, arm: str) -> str:
        mine = _of(found, group, arm)
        if not len(mine):
            return _unfinished(study, results, group, arm)
        return _number(mine.loss) + (f" at {mine.rate.iloc[0]:g}" if mine.rate.notna().any() else "")

    def gap(group: str, arm: str) -> str:
        return _number(difference(found, group, arm), sign="+") if arm in others else "–"

    if len(study.arms) > MANY_ARMS:
        rows = [["arm", *(text for group in study.groups for text in (group, f"{group} − {base}"))]]
        for arm in study.arms:
            pairs = (text for group in study.groups for text in (loss(group, arm), gap(group, arm)))
            rows.append([ARMS[arm].label, *pairs])
    else:
        labels = [*(ARMS[arm].label for arm in study.arms), *(f"{ARMS[arm].label} − {base}" for arm in others)]
        rows = [["size", "parameters", *labels]]
        parameters = {run.group: run.shape.parameters for run in study.runs}
        for group in study.groups:
            cells = [*(loss(group, arm) for arm in study.arms), *(gap(group, arm) for arm in others)]
            rows.append([group, f"{parameters[group]:,}", *cells])
    note = f"Differences are paired by seed. Negative: lower loss than {base}."
    if several := [ARMS[arm].label for arm in others if not ARMS[arm].isolates]:
        note += f" Changing more than one thing, and so beside the others: {'; '.join(several)}."
    if found.rate.notna().any():
        note += (
            " Each arm is at the best of its learning rates, chosen by the same losses, which flatters each a little."
        )
    if any(result.status != COMPLETE for result in results):
        note += " Runs that did not finish take no part in any number."
    return f"{_table(rows)}\n\n{note}"


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


def _fits(study: Study, found: pd.DataFrame) -> str:
    lines = ["`loss = A · N^-α`, least squares in log-log over sizes, N all parameters."]
    points = {arm: summary(found, arm) for arm in study.arms}
    laws = {arm: power_law(points[arm]) for arm in study.arms}
    if not any(laws.values()):
        return f"{lines[0]} No arm has two complete sizes: no fit."
    for arm, law in laws.items():
        if law is None:
            text = "fewer than two sizes are complete: no fit."
        elif law.error is None:
            text = (
                f"α = {law.alpha:.4f}, A = {law.scale:.3f}, the line through two points: no uncertainty can be given."
            )
        else:
            freedom = f"{law.points - 2} degree{'s' if law.points > 3 else ''} of freedom"
            error = f"{law.error:.4f} (standard error, {law.points} sizes, {freedom})"
            text = f"α = {law.alpha:.4f} ± {error}, A = {law.scale:.3f}."
        lines.append(f"- {ARMS[arm].label}: {text}")
    for arm in study.arms:
        if (
            arm == BASELINE
            or BASELINE not in points
            or (saved := saved_parameters(points[arm], points[BASELINE])) is None
        ):
            continue
        size, needed, outside = saved
        words = f"{abs(1 - needed / size):.0%} {'fewer' if needed <= size else 'more'}"
        words += " (outside the sizes that were trained)." if outside else "."
        lines.append(
            f"- Parameters saved at equal loss, by these fits: {ARMS[arm].label} needs {needed:.3g} for the loss of "
            f"{ARMS[BASELINE].label} at {size:.3g}: {words}"
        )
    return "\n".join(lines)


def _perplexity(found: pd.DataFrame, group: str, arm: str) -> str:
    """The exponential of the mean held-out loss."""
    losses = _of(found, group, arm).heldout.dropna()
    if not len(losses):
        return "–"
    spread = f" ± {losses.map(math.exp).std():.2f} ({len(losses)} seeds)" if len(losses) > 1 else ""
    return f"{math.exp(losses.mean()):.2f}{spread}"


def _perplexities(study: Study, found: pd.DataFrame) -> str:
    """Sizes down and arms across."""
    rows = [["size", *(ARMS[arm].label for arm in study.arms)]]
    return _table(rows + [[g, *(_perplexity(found, g, arm) for arm in study.arms)] for g in study.groups])


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


def _paper() -> str:
    rows = [["", ARMS["preln"].label, "LNS"]]
    rows += [[point["label"], f"{point['preln']:g}", f"{point['lns']:g}"] for point in published()["points"]]
    return (
        "Final training loss after 20B tokens, as published (arXiv 2502.05795); not ours:\n\n" + _table(rows) + "\n\n"
        "Levels are comparable only for one corpus and tokenizer; the difference between arms is what to compare."
    )


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
            if (law := power_law(points)) is not None and law.points > 2:
                line = points.parameters.map(law)
                axes.plot(points.parameters, line, ARMS[name].line, color=ARMS[name].colour, alpha=0.7)
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
