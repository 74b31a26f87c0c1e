"""The study's report: Markdown tables and the paper's figure, loss against parameters."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Sequence

from olmo_lns.study.arms import ARMS, BASELINE, Arm
from olmo_lns.study.collect.gather import COMPLETE, Result
from olmo_lns.study.plan.spec import Study
from olmo_lns.study.report import published_report
from olmo_lns.study.report.fit import PAPER, Point, paired, points, power_law, saved_parameters

__all__ = ["figure", "markdown", "write"]


#: Above this many arms a report has a line for each.
MANY_ARMS = 6


def write(study: Study, results: Sequence[Result], out: Path) -> list[Path]:
    """Write ``report.md`` and ``loss.png`` into ``out``."""
    out.mkdir(parents=True, exist_ok=True)
    image, text = out / "loss.png", out / "report.md"
    drawn = figure(study, results, image)
    text.write_text(markdown(study, results, image.name if drawn else None))
    return [text, *([image] if drawn else [])]


def markdown(study: Study, results: Sequence[Result], image: str | None) -> str:
    """The report; every number is of ``results``, the paper's are labelled."""
    done = sum(result.status == COMPLETE for result in results)
    parts = [
        f"# Scaling study `{study.name}`",
        f"{done} of {len(results)} runs complete. A run's loss is the mean training loss (nats per token) over the "
        f"last {study.final_fraction:.0%} of its steps; ± is the standard deviation over seeds, given only where there "
        "are two or more. Arms of one size and seed saw the same batches in the same order; `study collect` checked "
        "that their settings and data differ in nothing but the arm.",
    ]
    if image:
        parts.append(f"![loss against parameters]({image})")
    parts += ["## Loss", _loss_table(study, results), "## Power law", _fits(study, results)]
    if any(result.heldout is not None for result in results):
        parts += ["## Perplexity", published_report.perplexity(study, results)]
    parts += ["## Runs", _run_table(results), "## The paper"]
    parts.append(published_report.beside(study, results) if study.published else _paper())
    return "\n\n".join(parts) + "\n"


def _number(mean: float, std: float | None, count: int, *, sign: bool = False) -> str:
    text = f"{mean:+.4f}" if sign else f"{mean:.4f}"
    return f"{text} ± {std:.4f} ({count} seeds)" if std is not None else f"{text} (1 seed)"


def _loss_table(study: Study, results: Sequence[Result]) -> str:
    """A row for each size, or for each arm where there are too many for one line."""
    base = ARMS[BASELINE].label
    others = [arm for arm in study.arms if arm != BASELINE] if BASELINE in study.arms else []
    many = len(study.arms) > MANY_ARMS
    table = _by_arm(study, results, others) if many else _by_size(study, results, others)
    lines = ["| " + " | ".join(row) + " |" for row in table]
    lines.insert(1, "|---" * len(table[0]) + "|")
    note = f"Differences are paired by seed. Negative: lower loss than {base}."
    if several := [ARMS[arm].label for arm in others if not ARMS[arm].isolates]:
        note += f" Changing more than one thing, and so beside the others: {'; '.join(several)}."
    if any(r.status != COMPLETE for r in results):
        note += " Runs that did not finish take no part in any number."
    return "\n".join(lines) + "\n\n" + note


def _by_size(study: Study, results: Sequence[Result], others: Sequence[str]) -> list[list[str]]:
    base = ARMS[BASELINE].label
    head = ["size", "parameters", *(ARMS[a].label for a in study.arms), *(f"{ARMS[a].label} − {base}" for a in others)]
    rows = [head]
    for size in study.sizes:
        losses = [_loss(results, size, arm) for arm in study.arms]
        gaps = [_gap(results, size, arm) for arm in others]
        rows.append([size, f"{next(r.parameters for r in results if r.size == size):,}", *losses, *gaps])
    return rows


def _by_arm(study: Study, results: Sequence[Result], others: Sequence[str]) -> list[list[str]]:
    rows = [["arm", *(text for size in study.sizes for text in (size, f"{size} − {ARMS[BASELINE].label}"))]]
    for arm in study.arms:
        row = [ARMS[arm].label]
        for size in study.sizes:
            row += [_loss(results, size, arm), _gap(results, size, arm) if arm in others else "–"]
        rows.append(row)
    return rows


def _loss(results: Sequence[Result], size: str, arm: str) -> str:
    found = [point for point in points(results, arm) if point.size == size]
    return _number(found[0].loss, found[0].std, found[0].seeds) if found else _unfinished(results, size, arm)


def _gap(results: Sequence[Result], size: str, arm: str) -> str:
    gap = paired(results, size, arm)
    return _number(*gap, sign=True) if gap else "–"


def _unfinished(results: Sequence[Result], size: str, arm: str) -> str:
    mine = [r for r in results if r.size == size and r.arm == arm]
    furthest = max(mine, key=lambda r: r.step / r.steps)
    return f"{furthest.status} ({furthest.step:,} of {furthest.steps:,} steps)"


def _fits(study: Study, results: Sequence[Result]) -> str:
    lines = ["`loss = A · N^-α`, least squares in log-log over sizes, N all parameters."]
    laws = {arm: power_law(points(results, arm)) for arm in study.arms}
    if not any(laws.values()):
        return f"{lines[0]} No arm has two complete sizes: no fit."
    for arm, law in laws.items():
        if law is None:
            lines.append(f"- {ARMS[arm].label}: fewer than two sizes are complete: no fit.")
        elif law.alpha_error is None:
            lines.append(
                f"- {ARMS[arm].label}: α = {law.alpha:.4f}, A = {law.scale:.3f}, the line through two points: "
                "no uncertainty can be given."
            )
        else:
            lines.append(
                f"- {ARMS[arm].label}: α = {law.alpha:.4f} ± {law.alpha_error:.4f} (standard error, {law.points} "
                f"sizes, {law.points - 2} degree{'s' if law.points > 3 else ''} of freedom), A = {law.scale:.3f}."
            )
    saved = [text for arm in study.arms if arm != BASELINE and (text := _saved(results, arm))]
    return "\n".join([*lines, *saved])


def _saved(results: Sequence[Result], arm: str) -> str | None:
    """Parameters saved at equal loss, from the two fits; None where either has none."""
    found = saved_parameters(points(results, arm), points(results, BASELINE))
    if found is None:
        return None
    size, needed, outside = found
    share = 1 - needed / size
    words = f"{share:.0%} fewer" if share >= 0 else f"{-share:.0%} more"
    text = (
        f"- Parameters saved at equal loss, by these fits: {ARMS[arm].label} needs {needed:.3g} for the loss of "
        f"{ARMS[BASELINE].label} at {size:.3g}: {words}"
    )
    return text + (" (outside the sizes that were trained)." if outside else ".")


def _run_table(results: Sequence[Result]) -> str:
    lines = [
        "| run | status | steps | tokens | loss | within the window ± | CPU s | tokens per CPU s |",
        "|---" * 8 + "|",
    ]
    for r in results:
        loss = f"{r.loss:.4f}" if r.loss is not None else "–"
        std = f"{r.loss_std:.4f} ({r.points} logged)" if r.loss_std is not None else "–"
        speed = f"{r.tokens / r.cpu_s:,.0f}" if r.cpu_s and r.status == COMPLETE else "–"
        cpu = f"{r.cpu_s:,.0f}" if r.cpu_s else "–"
        lines.append(
            f"| {r.run} | {r.status} | {r.step:,}/{r.steps:,} | {r.tokens:,} | {loss} | {std} | {cpu} | {speed} |"
        )
    return "\n".join(lines)


def _paper() -> str:
    lines = ["Final training loss after 20B tokens, as published (arXiv 2502.05795); not ours:", ""]
    lines += ["| | Pre-LN | LNS |", "|---|---|---|"]
    for label in dict.fromkeys(label for label, *_ in PAPER):
        values = {arm: loss for name, _, arm, loss in PAPER if name == label}
        lines.append(f"| {label} | {values['preln']} | {values['lns']} |")
    lines += [
        "",
        "Levels are comparable only for one corpus and tokenizer; the difference between arms is what to compare.",
    ]
    return "\n".join(lines)


def figure(study: Study, results: Sequence[Result], path: Path) -> bool:
    """Draw the figure; the paper's points are hollow and named. False, and no file, when no run is complete."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    curves = {arm: found for arm in study.arms if (found := points(results, arm))}
    if not curves:
        return False
    chart, axes = pyplot.subplots(figsize=(7, 4.5), dpi=120)
    for arm, found in curves.items():
        _draw_arm(axes, ARMS[arm], found)
    _draw_paper(axes)
    axes.set_xscale("log")
    axes.margins(y=0.1)
    axes.set_xlabel("parameters")
    axes.set_ylabel("final training loss (nats per token)")
    axes.set_title(f"{study.name}: {study.runs[0].shape.tokens:,} tokens a run", fontsize=10)
    axes.legend(fontsize=7)
    axes.grid(alpha=0.3)
    chart.tight_layout()
    chart.savefig(path, metadata={"Software": None})
    pyplot.close(chart)
    return True


def _draw_arm(axes: Any, arm: Arm, found: Sequence[Point]) -> None:
    x, y = [p.parameters for p in found], [p.loss for p in found]
    axes.plot(x, y, arm.marker, color=arm.colour, markersize=5, label=f"{arm.label} (this study)")
    if spread := [p for p in found if p.std is not None]:
        stds = [p.std for p in spread]
        at = [p.parameters for p in spread], [p.loss for p in spread]
        axes.errorbar(*at, stds, fmt="none", color=arm.colour, capsize=3)
    law = power_law(found)
    if law is not None and law.points > 2:
        axes.plot(x, [law(n) for n in x], arm.line, color=arm.colour, linewidth=1, alpha=0.7)


def _draw_paper(axes: Any) -> None:
    for arm in dict.fromkeys(arm for _, _, arm, _ in PAPER):
        published = [(n, loss) for _, n, name, loss in PAPER if name == arm]
        label = f"{ARMS[arm].label} (paper, 20B tokens)"
        axes.plot(
            *zip(*published, strict=True), ARMS[arm].marker, color=ARMS[arm].colour, fillstyle="none", label=label
        )
    for label, n, arm, loss in PAPER:
        if arm == BASELINE:
            text = label.replace("paper, v1: ", "").replace("paper: ", "")
            axes.annotate(text, (n, loss), textcoords="offset points", xytext=(0, 7), fontsize=7, ha="center")
