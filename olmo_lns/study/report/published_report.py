"""Perplexities of a study, and the papers' numbers beside them."""

from __future__ import annotations

import math
import statistics
from typing import Sequence

from olmo_lns.study.arms import ARMS
from olmo_lns.study.collect.results import COMPLETE, Result
from olmo_lns.study.plan.published import PUBLISHED, Published, corrected
from olmo_lns.study.plan.spec import Study

__all__ = ["beside", "perplexity"]


def _own(results: Sequence[Result], size: str, arm: str, measure: str) -> str:
    """Over the seeds; ``–`` for none. Perplexity is of held-out text, the exponential of the mean loss."""
    mine = [r for r in results if (r.size, r.arm, r.status) == (size, arm, COMPLETE)]
    losses = [loss for r in mine if (loss := r.heldout if measure == "perplexity" else r.loss) is not None]
    if not losses:
        return "–"
    mean = statistics.fmean(losses)
    text = f"{math.exp(mean):.2f}" if measure == "perplexity" else f"{mean:.3f}"
    if len(losses) < 2:
        return text
    spread = statistics.stdev([math.exp(loss) if measure == "perplexity" else loss for loss in losses])
    return f"{text} ± {spread:.2f} ({len(losses)} seeds)"


def perplexity(study: Study, results: Sequence[Result]) -> str:
    """A table of held-out perplexity, sizes down and arms across."""
    lines = [
        "| size | " + " | ".join(ARMS[arm].label for arm in study.arms) + " |",
        "|---" * (len(study.arms) + 1) + "|",
    ]
    for size in study.sizes:
        cells = [_own(results, size, arm, "perplexity") for arm in study.arms]
        lines.append(f"| {size} | {' | '.join(cells)} |")
    note = "Of held-out text after the last step, per token with a label (padding counts for nothing)."
    return "\n".join(lines) + f"\n\n{note}"


def _printed(table: Published, size: str, value: float) -> str:
    text = f"{value:g}"
    better = corrected(size.split("_")[0], value) if table.measure == "perplexity" and value < 100 else None
    return text if better is None else f"{text} ({better:.2f})"


def beside(study: Study, results: Sequence[Result]) -> str:
    """The table that the description names: this study's number and the published one, size by size and arm by arm."""
    table = PUBLISHED[study.published or ""]
    sizes = [size for size in study.sizes if size in table.cells]
    arms = [arm for arm in ARMS if arm in study.arms or any(arm in table.cells[size] for size in sizes)]
    head = "".join(f" {size}, ours | {size}, published |" for size in sizes)
    lines = [f"{table.title} ({table.measure}), as published and not ours:", ""]
    lines += [f"| arm |{head}", "|---" * (2 * len(sizes) + 1) + "|"]
    for arm in arms:
        cells = []
        for size in sizes:
            value = table.cells[size].get(arm)
            cells += [_own(results, size, arm, table.measure), "–" if value is None else _printed(table, size, value)]
        lines.append(f"| {ARMS[arm].label} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", *(f"- {note}" for note in table.notes)])
