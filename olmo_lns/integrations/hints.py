"""The arguments of ``olmo_lns.apply`` that describe a model, in one value that all integrations take."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Sequence

from torch import nn


@dataclass(frozen=True, kw_only=True)
class Hints:
    """The optional arguments of :func:`olmo_lns.apply`. None means that the integration finds it out by itself.

    :param blocks, norms, example, trained: as in :func:`olmo_lns.apply`.

    Example: ``Hints(example=images, trained=False)``.
    """

    blocks: Sequence[nn.Module] | None = None
    norms: Sequence[Any] | None = None
    example: Any = None
    trained: bool | None = None
