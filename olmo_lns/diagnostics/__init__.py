"""The papers' diagnostics: output variance, angular distance, layer removal, Jacobians, gradient norms.

``docs/diagnostics.md`` has the definitions and the layout of the result files. Every diagnostic is a command,
``olmo-lns analyze <diagnostic>``, and a function that takes a model and batches and returns a
:class:`~.results.Measurement`.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["DIAGNOSTICS", "Diagnostic"]


class Diagnostic(NamedTuple):
    """Description of a diagnostic. Its function is named as text, so that ``--help`` does not import torch.

    :param title: title in help and reports.
    :param function: ``module:name`` in this package.
    :param column: the column that tables show.
    :param column_title: name and unit of this column, for the head of a table.
    :param tokens: default number of tokens.
    :param max_sequence_length: default limit of the sequence length.
    """

    title: str
    function: str
    column: str
    column_title: str
    tokens: int = 65_536
    max_sequence_length: int = 2048


DIAGNOSTICS = {
    "variance": Diagnostic(
        "Output variance of every block", "variance:block_output_variance",
        "variance", "output variance", 262_144,
    ),
    "angular": Diagnostic(
        "Angular distance between all pairs of layers", "angular:angular_distance",
        "d1", "angular distance d(l, l+1), fraction of pi", 262_144,
    ),
    "layer-drop": Diagnostic(
        "Performance drop of removing each block", "layer_drop:drop_layers",
        "increase", "loss increase without the block, nats/token",
    ),
    "jacobian": Diagnostic(
        "Token-averaged Jacobian of every block", "jacobian:block_jacobians",
        "identity_distance", "distance of the Jacobian to the identity", max_sequence_length=64,
    ),
    "gradnorm": Diagnostic(
        "Gradient norm per layer and part", "gradient_norm:gradient_norms",
        "total", "gradient norm",
    ),
}  # fmt: skip
