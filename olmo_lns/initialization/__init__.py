"""Find the residual output projections of a model, measure how they were initialized, and remove a depth factor.

A residual output projection is the last matrix of a branch, whose output is added to the stream. Scaled initialization
draws these matrices smaller than all others: with the standard deviation std/sqrt(2L) in a model of L blocks, or
std/sqrt(2l) in block l. A scheme such as LayerNorm Scaling takes the place of this depth factor (arXiv 2502.05795,
footnote 1 and section 6), so a model under a scheme is initialized plainly, without it.

Read the modules in this order. Each imports only those above it.

* ``projections``: which matrices of a block are residual output projections.
* ``marks``: the records of matrices and norms on the modules of a model.
* ``rule``: the rule by which the matrices were initialized, and what the start-up line says about it.
* ``trained``: whether the weights were trained.
* ``plain``: the depth factor is removed.
* ``drawn``: a check for frameworks that draw with a known standard deviation.
"""

from olmo_lns.initialization.drawn import check_drawn, drawn_std
from olmo_lns.initialization.marks import (
    Matrix,
    mark_matrices,
    marked_matrices,
    marks_restored_on_failure,
    matrices_of,
    unmark,
)
from olmo_lns.initialization.plain import make_plain
from olmo_lns.initialization.projections import residual_projections
from olmo_lns.initialization.rule import Initialization, measure
from olmo_lns.initialization.trained import mark_folded, why_trained

__all__ = [
    "Initialization",
    "Matrix",
    "check_drawn",
    "drawn_std",
    "make_plain",
    "mark_folded",
    "mark_matrices",
    "marked_matrices",
    "marks_restored_on_failure",
    "matrices_of",
    "measure",
    "residual_projections",
    "unmark",
    "why_trained",
]
