"""The papers' tables, to be set beside a study's own numbers. Copied, not made by us.

LNS: arXiv 2502.05795 (v5 with its tables); Mix-LN: arXiv 2412.13795.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Mapping

__all__ = ["PUBLISHED", "Published", "corrected"]

#: Size -> batches a rank in which the authors' evaluation reads 10M real tokens, from the GPUs of their scripts and 215
#: real tokens a sequence. Their mean divides by one batch more.
BATCHES = {"250M": 91, "350M": 91, "1B": 182}


@dataclass(frozen=True)
class Published:
    """:param measure: ``perplexity`` or ``loss``. :param cells: size -> arm -> value.

    :param notes: what a reader must know before comparing.
    """

    title: str
    measure: str
    cells: Mapping[str, Mapping[str, float]]
    notes: tuple[str, ...] = ()


def corrected(size: str, perplexity: float) -> float | None:
    """A published perplexity without the batch too many; None for sizes whose batches are not known."""
    batches = BATCHES.get(size)
    return None if batches is None else math.exp(math.log(perplexity) * (batches + 1) / batches)


_EVALUATION = (
    "These perplexities come from the authors' evaluation on C4, which divides the sum of n batches by n + 1: they are "
    "low by that in the logarithm. In brackets: without it, where n is known from their scripts (inferred, not said).",
    "Their token counts are of real tokens only, without padding; a study's own count is of positions.",
)
_PRELN, _LNS, _POST, _DEEP, _MIX = "preln", "lns", "postln", "deepnorm", "mixln"
_DEEPNORM = (
    "DeepNorm's numbers are of code that draws with the inverse of the method's gain; the arm here is the method.",
)


def _columns(sizes: str, rows: Mapping[str, str]) -> dict[str, dict[str, float]]:
    """Rows of numbers, ``-`` for none, as size -> arm -> value."""
    names = sizes.split()
    cells: dict[str, dict[str, float]] = {name: {} for name in names}
    for arm, text in rows.items():
        for name, value in zip(names, text.split(), strict=True):
            if value != "-":
                cells[name][arm] = float(value)
    return cells


PUBLISHED: dict[str, Published] = {
    "lns-1": Published(
        "LNS, table 1 (71M: Mix-LN, table 1; 0.5B: LNS, table 4)", "perplexity",
        _columns("71M 130M 250M 350M 0.5B 1B", {
            _POST: "35.18 26.95 1409.79 1368.33 - 1390.75", _DEEP: "34.87 27.17 22.77 1362.59 - 1409.08",
            _MIX: "33.12 26.07 21.39 1363.21 - 1414.78", _PRELN: "34.77 26.73 21.92 19.58 20.62 17.02",
            _LNS: "- 25.76 20.35 18.20 19.57 15.71",
        }),
        (*_EVALUATION, *_DEEPNORM, "Losses around ln(1400) are runs that diverged."),
    ),
    "mixln-1": Published(
        "Mix-LN, table 1", "perplexity",
        _columns("71M 250M 1B", {
            _POST: "35.18 1409.09 1411.54", _DEEP: "34.87 22.77 1410.94", _PRELN: "34.77 21.92 18.65",
            _MIX: "33.12 21.39 18.18",
        }),
        (*_EVALUATION, *_DEEPNORM, "1B: 50,000 steps, half of those of the LNS paper."),
    ),
    "lns-6": Published(
        "LNS, table 6: scaling methods", "perplexity",
        _columns("130M 250M", {
            _PRELN: "26.73 21.92", "layerscale": "27.93 23.45", "skipinit": "27.41 22.29",
            "preln_depth_scaled_init": "26.95 21.50", "preln_scaled_init": "26.04 20.98", _LNS: "25.76 20.35",
            "lns_scaled_init": "25.80 20.79",
        }),
        (*_EVALUATION, "LayerScale there is one vector a block; SkipInit's only code starts at 0.001, the text says "
         "1/sqrt(L)."),
    ),
    "lns-7": Published(
        "LNS, table 7: norms", "perplexity",
        _columns("130M", {
            _PRELN: "26.73", "admin": "27.91", "groupln": "28.01", "sandwich": "26.51", _MIX: "26.07", _LNS: "25.76",
        }),
        (*_EVALUATION, "Their Group-LN takes statistics over future tokens and their Admin is one scalar a block; the "
         "arms here are causal, and admin-torch's closed form."),
    ),
    "lns-8": Published(
        "LNS, table 8: positions of the factor", "perplexity",
        _columns("130M", {
            _PRELN: "26.73", "lnsbefore": "26.97", "lnsafterbranch": "26.53", "lnsafterresidual": "1358.11",
            "lnsafterattn": "26.89", "lnsafterff": "26.43", _LNS: "25.76",
        }),
        (*_EVALUATION, "A norm cancels a factor before it, so LNS before LN is Pre-LN: their difference of 0.24 is "
         "noise."),
    ),
    "mixln-5": Published(
        "Mix-LN, table 5: share of Post-LN blocks, 1B (DeepNorm: table 1)", "perplexity",
        _columns("1B", {
            _PRELN: "18.65", "mixln_17": "18.34", _MIX: "18.18", "mixln_33": "18.41", "mixln_42": "18.55",
            "mixln_50": "18.86", _POST: "1434", _DEEP: "1410.94",
        }),
        (*_EVALUATION, *_DEEPNORM, "50,000 steps."),
    ),
    "mixln-6": Published(
        "Mix-LN, table 6: norms, 250M", "perplexity",
        _columns("250M", {
            _PRELN: "23.39", "admin": "24.82", "groupln": "23.10", "sandwich": "23.26", _MIX: "22.33",
        }),
        (*_EVALUATION, "A shorter run than table 1's (Pre-LN 21.92 there), of unknown length. Group-LN and Admin as in "
         "LNS, table 7."),
    ),
    "mixln-8": Published(
        "Mix-LN, table 8: initializations, 130M", "perplexity",
        _columns("130M 130M_scaledembed", {
            _PRELN: "32.18 -", _MIX: "29.95 -", "preln_scaled_init": "30.63 31.28", "mixln_scaled_init": "29.77 31.19",
        }),
        (*_EVALUATION, "A shorter run, of unknown length. They scale the Pre-LN blocks only, the arm here scales all."),
    ),
    "lns-3": Published(
        "LNS, table 3 and text: OLMo, 20B tokens", "loss",
        {"1B": {"preln_mitchell": 2.96, _LNS: 2.85}, "7B": {_PRELN: 2.69, _LNS: 2.50}},
        ("1B is against OLMo's own scaled initialization, by the name of the arm. These are OLMo's losses: none of the "
         "LLaMA evaluation's peculiarities.",),
    ),
}  # fmt: skip
