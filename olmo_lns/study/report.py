"""The study's report: Markdown tables and the paper's figure, loss against parameters."""

from __future__ import annotations

from pathlib import Path
from typing import Sequence

from olmo_lns.study.arms import ARMS
from olmo_lns.study.collect import COMPLETE, Result
from olmo_lns.study.fit import PAPER, paired, points, power_law
from olmo_lns.study.spec import Study

__all__ = ["figure", "markdown", "write"]

COLOURS = {"preln": "tab:red", "preln_scaled_init": "tab:orange", "lns": "tab:blue", "preln_mitchell": "tab:gray"}


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
    parts += ["## Runs", _run_table(results), "## The paper", _paper()]
    return "\n\n".join(parts) + "\n"


def _number(mean: float, std: float | None, count: int, *, sign: bool = False) -> str:
    text = f"{mean:+.4f}" if sign else f"{mean:.4f}"
    return f"{text} ± {std:.4f} ({count} seeds)" if std is not None else f"{text} (1 seed)"


def _loss_table(study: Study, results: Sequence[Result]) -> str:
    arms = study.arms
    others = [arm for arm in arms if arm != "preln"] if "preln" in arms else []
    head = ["size", "parameters", *(ARMS[a].label for a in arms), *(f"{ARMS[a].label} − Pre-LN" for a in others)]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for size in study.sizes:
        row = [size, f"{next(r.parameters for r in results if r.size == size):,}"]
        for arm in arms:
            found = [point for point in points(results, arm) if point.size == size]
            row.append(
                _number(found[0].loss, found[0].std, found[0].seeds) if found else _unfinished(results, size, arm)
            )
        for arm in others:
            gap = paired(results, size, arm)
            row.append(_number(*gap, sign=True) if gap else "–")
        lines.append("| " + " | ".join(row) + " |")
    note = "Differences are paired by seed. Negative: lower loss than Pre-LN."
    if "preln_mitchell" in arms:
        note += (
            " The mitchell arm changes every matrix's initialization and so does not isolate the scaled initialization."
        )
    if any(r.status != COMPLETE for r in results):
        note += " Runs that did not finish take no part in any number."
    return "\n".join(lines) + "\n\n" + note


def _unfinished(results: Sequence[Result], size: str, arm: str) -> str:
    mine = [r for r in results if r.size == size and r.arm == arm]
    furthest = max(mine, key=lambda r: r.step / r.steps)
    return f"{furthest.status} ({furthest.step:,} of {furthest.steps:,} steps)"


def _fits(study: Study, results: Sequence[Result]) -> str:
    lines = ["`loss = A · N^-α`, least squares in log-log over sizes, N all parameters."]
    for arm in study.arms:
        law = power_law(points(results, arm))
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
    return "\n".join(lines)


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
        x, y = [p.parameters for p in found], [p.loss for p in found]
        axes.plot(x, y, "o", color=COLOURS[arm], markersize=5, label=f"{ARMS[arm].label} (this study)")
        spread = [p for p in found if p.std is not None]
        if spread:
            stds = [p.std for p in spread]
            axes.errorbar(
                [p.parameters for p in spread],
                [p.loss for p in spread],
                stds,
                fmt="none",
                color=COLOURS[arm],
                capsize=3,
            )
        law = power_law(found)
        if law is not None and law.points > 2:
            axes.plot(x, [law(n) for n in x], "-", color=COLOURS[arm], linewidth=1, alpha=0.7)
    for arm in ("preln", "lns"):
        published = [(n, loss) for _, n, name, loss in PAPER if name == arm]
        axes.plot(
            *zip(*published, strict=True),
            "s",
            color=COLOURS[arm],
            fillstyle="none",
            label=f"{ARMS[arm].label} (paper, 20B tokens)",
        )
    for label, n, arm, loss in PAPER:
        if arm == "preln":
            axes.annotate(
                label.replace("paper, v1: ", "").replace("paper: ", ""),
                (n, loss),
                textcoords="offset points",
                xytext=(0, 7),
                fontsize=7,
                ha="center",
            )
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
