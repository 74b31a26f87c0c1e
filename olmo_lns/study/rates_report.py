"""The report of a study over learning rate, depth and tokens: tables and figures from its results, nothing else."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Sequence

from olmo_lns.errors import LNSConfigError
from olmo_lns.study import rates, rates_figures
from olmo_lns.study.arms import ARMS, BASELINE
from olmo_lns.study.rates import Gap, Group
from olmo_lns.study.results import COMPLETE, Result

__all__ = ["base_of", "fill", "sections", "write"]

_REGION = re.compile(r"(<!-- study:(\w+) -->\n).*?(<!-- /study -->)", re.DOTALL)


def write(results: Sequence[Result], out: Path, page: Path | None = None) -> list[Path]:
    """Write ``report.md`` and the figures into ``out``; with ``page``, fill its regions from the same tables.

    :raises LNSConfigError: the page has no region, or one that the report does not have.
    """
    out.mkdir(parents=True, exist_ok=True)
    drawn = rates_figures.draw(rates.groups(results), out)
    body = "\n\n".join(f"## {_TITLES[name]}\n\n{text}" for name, text in sections(results).items())
    report = out / "report.md"
    report.write_text(f"# Learning rate, depth, tokens\n\n{body}\n")
    if page is not None:
        folder = Path(os.path.relpath(out, page.parent)).as_posix()
        page.write_text(fill(page.read_text(), sections(results, f"{folder}/"), page))
    return [report, *drawn, *([page] if page else [])]


def fill(text: str, texts: dict[str, str], page: Path) -> str:
    """``<!-- study:NAME -->`` … ``<!-- /study -->`` with what the report says under that name."""
    if not (regions := _REGION.findall(text)):
        raise LNSConfigError(
            f"{page}: no region <!-- study:NAME --> … <!-- /study --> to fill; names: {', '.join(texts)}"
        )
    for _, name, _ in regions:
        if name not in texts:
            raise LNSConfigError(f"{page}: no part {name!r} in the report; its parts: {', '.join(texts)}")
    return _REGION.sub(lambda found: f"{found[1]}\n{texts[found[2]]}\n\n{found[3]}", text)


_TITLES = {
    "state": "What has been run",
    "rates": "Loss against learning rate",
    "best": "Each arm at its best rate",
    "tokens": "Loss against tokens",
    "controls": "Controls",
    "missing": "What is missing",
}


#: The part that shows a figure.
_FIGURES = {"rates": "rates", "depth": "best", "tokens": "tokens"}


def sections(results: Sequence[Result], folder: str = "") -> dict[str, str]:
    """Name of a part -> its Markdown. A part without runs says so.

    :param folder: of the figures, seen from the page, with its slash.
    """
    found = rates.groups(results)
    plain = [group for group in found if not group.variant]
    several = [group for group in plain if len(group.rates) > 1]
    texts = {
        "state": _state(found, results),
        "rates": _rates(several) or "No depth has been trained at more than one rate yet.",
        "best": _best(plain) or "No run is complete yet.",
        "tokens": _tokens(rates.losses_by_tokens(found)) or "No depth has been trained at more than one budget yet.",
        "controls": _controls(found) or "No control has been run yet.",
        "missing": _missing(found, results),
    }
    for name in rates_figures.panels(found):
        part = _FIGURES[name]
        texts[part] = f"![{_TITLES[part].lower()}]({folder}{name}.png)\n\n{texts[part]}"
    return texts


def base_of(arm: str, group: Group) -> str:
    """What an arm is compared with: LNS with some initialization with Pre-LN with the same, where that was run."""
    same = f"preln{arm[3:]}"
    return same if arm.startswith("lns") and same in group.arms else BASELINE


def _lines(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    if not rows:
        return ""
    return "\n".join("| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *rows))


def _place(group: Group) -> list[str]:
    return [str(group.layers), str(group.width), tokens(group.tokens), f"{group.tokens / group.parameters:.2g}"]


_PLACE = ["blocks", "width", "tokens", "tokens a parameter"]


def tokens(count: float) -> str:
    """``1.05M``, ``20.0B``."""
    for unit, size in (("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if count >= size:
            return f"{count / size:.3g}{unit}"
    return f"{count:g}"


def _state(found: Sequence[Group], results: Sequence[Result]) -> str:
    rows = [
        [
            *_place(group),
            group.variant or "–",
            ", ".join(group.arms),
            ", ".join(f"{rate:g}" for rate in group.rates),
            ", ".join(map(str, sorted({run.seed for run in group.runs}))),
            str(len(group.runs)),
        ]
        for group in found
    ]
    done = [run for run in results if run.status == COMPLETE]
    cpu = sum(run.cpu_s or 0 for run in done) / 3600
    held = "held-out loss" if any(run.heldout is not None for run in done) else "training loss, for nothing is held out"
    text = (
        f"{len(done)} runs are complete, {cpu:.1f} CPU-hours where the time is known. All losses: {held}, nats a token."
    )
    return "\n\n".join(filter(None, [text, _lines([*_PLACE, "variant", "arms", "rates", "seeds", "runs"], rows)]))


def _rates(found: Sequence[Group]) -> str:
    parts = []
    for group in found:
        rows = []
        for arm in group.arms:
            losses, best = group.by_rate(arm), group.best(arm)
            cells = [f"{losses[rate]:.3f}" if rate in losses else "–" for rate in group.rates]
            cells = [
                f"**{c}**" if best and rate == best.rate else c for c, rate in zip(cells, group.rates, strict=True)
            ]
            rows.append([ARMS[arm].label, *cells])
        title = f"{group.layers} blocks, width {group.width}, {tokens(group.tokens)} tokens, seed {group.choosing}:"
        parts.append(f"{title}\n\n{_lines(['arm', *(f'{rate:g}' for rate in group.rates)], rows)}")
    return "\n\n".join(parts)


def spread(gap: Gap) -> str:
    """``-0.012 ± 0.004 (5 seeds)``; ± is half the 95 % interval."""
    half, count = rates.interval(gap.values), len(gap.values)
    text = f"{gap.mean:+.3f}" + (f" ± {half:.3f}" if half is not None else "")
    what = "the seed that chose the rates" if gap.chosen_on else f"{count} seed{'s' * (count > 1)}"
    return f"{text} ({what})"


def _arm_rows(group: Group, place: Sequence[str]) -> list[list[str]]:
    rows = []
    for arm in group.arms:
        if (best := group.best(arm)) is None:
            continue
        base = base_of(arm, group)
        gap = group.gap(arm, base) if arm != base else None
        edge = f" ({best.edge} tried)" if best.edge else " (one tried)" if best.rates == 1 else ""
        against = f"{spread(gap)} against {base}" if gap else "–"
        rows.append([*place, ARMS[arm].label, f"{best.rate:g}{edge}", f"{best.loss:.3f}", against])
    return rows


_ARM = ["arm", "best rate", "loss on the choosing seed", "difference at own best rates"]
_NOTE = (
    "The rate is chosen on one seed. ± is half the 95 % interval over the other seeds, paired; without ± there is one "
    "pair only. Negative: lower loss."
)


def _best(found: Sequence[Group]) -> str:
    table = _lines([*_PLACE, *_ARM], [row for group in found for row in _arm_rows(group, _place(group))])
    return f"{table}\n\n{_NOTE}" if table else ""


def _tokens(series: Sequence[Sequence[Group]]) -> str:
    parts = []
    for line in series:
        first = line[0]
        rows = [row for group in line for row in _arm_rows(group, _place(group)[2:])]
        where = f"{first.layers} blocks, width {first.width}" + (f", {first.variant}" if first.variant else "")
        parts.append(f"{where}:\n\n{_lines([*_PLACE[2:], *_ARM], rows)}\n\n{_crossing(line)}")
    return "\n\n".join(parts)


def _crossing(line: Sequence[Group]) -> str:
    gaps = [(group.tokens, gap.mean) for group in line if (gap := group.gap("lns", BASELINE)) is not None]
    if len(gaps) < 2:
        return "LNS − Pre-LN is known at fewer than two budgets."
    found = rates.crossings(gaps)
    if not found:
        side = "ahead" if gaps[-1][1] < 0 else "behind"
        return f"LNS is {side} at each of the {len(gaps)} budgets: no crossing."
    places = "; ".join(f"between {tokens(low)} and {tokens(high)} tokens" for low, high in found)
    return f"LNS − Pre-LN changes its sign {places}."


def _controls(found: Sequence[Group]) -> str:
    varied = {(group.width, group.layers, group.tokens) for group in found if group.variant}
    rows = [
        row
        for group in found
        if (group.width, group.layers, group.tokens) in varied
        for row in _arm_rows(group, [*_place(group), group.variant or "–"])
    ]
    table = _lines([*_PLACE, "variant", *_ARM], rows)
    return f"{table}\n\n{_NOTE}" if table else ""


def _missing(found: Sequence[Group], results: Sequence[Result]) -> str:
    lines = []
    for group in found:
        where = f"{group.layers} blocks, width {group.width}, {tokens(group.tokens)} tokens"
        where += f", {group.variant}" if group.variant else ""
        for arm in group.arms:
            losses, best = group.by_rate(arm), group.best(arm)
            if holes := [f"{rate:g}" for rate in group.rates if rate not in losses]:
                lines.append(f"{where}: {arm} was not run at {', '.join(holes)} (seed {group.choosing}).")
            if best and best.edge:
                lines.append(f"{where}: the best rate of {arm}, {best.rate:g}, is the {best.edge} tried.")
        if not {"lns", BASELINE} <= set(group.arms) and not {"lns_head", "preln_head"} <= set(group.arms):
            lines.append(f"{where}: not both of lns and {BASELINE}: no difference.")
        elif (gap := group.gap("lns", BASELINE)) is not None and gap.chosen_on:
            lines.append(f"{where}: no seed but the one that chose the rates.")
    if not rates.losses_by_tokens(found):
        lines.append(
            "No depth was trained at several budgets: nothing is known of how the difference moves with tokens."
        )
    if not any(group.variant for group in found):
        lines.append("No control was run.")
    for run in results:
        if run.status != COMPLETE:
            lines.append(f"{run.run}: {run.status}, step {run.step:,} of {run.steps:,}.")
        elif run.layers is None or run.learning_rate is None:
            lines.append(f"{run.run}: its row has no depth and rate: run `olmo-lns study collect` again.")
    return "\n".join(f"- {line}" for line in lines) or "Nothing."
