"""The result of the search: the names of the norms that a scheme multiplies."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Mapping

from torch import nn


@dataclass(frozen=True, kw_only=True)
class Located:
    """The norms before the branches of a model.

    They are described by their names, so that the description is valid for another process and for a copy of the model.

    :param path: name of the list of blocks, or ``""`` if the user passed the blocks or the norms.
    :param blocks: name of each block, or ``""`` for a block that is not a module.
    :param norms: names of the norms of each block: those of attention and feed-forward, or the one that both read.
    :param shapes: shape of the input of each block's norms.
    :param width: the hidden size of block 1.
    :param cancelled: names of the norms whose factor is cancelled completely by a later norm.
    :param partly_cancelled: names of the norms whose factor is cancelled by a later norm in a part of the branch.
    :param hooked: names of the norms that need a hook. Without it, PyTorch runs a fused kernel on their weights.
    :param not_run: names of the parts of the model that the example did not run.
    :param sites_from: ``probe`` if every block was run and reads its stream through these norms only, or else where
        the norms are from: ``norms=`` or ``the config``.
    :param projections: the residual output projections of each block. It is empty if they were not determined.
    """

    path: str
    blocks: tuple[str, ...]
    norms: tuple[tuple[str, ...], ...]
    shapes: tuple[tuple[int, ...], ...] = ()
    width: int = 0
    cancelled: tuple[str, ...] = ()
    partly_cancelled: tuple[str, ...] = ()
    hooked: tuple[str, ...] = ()
    not_run: tuple[str, ...] = ()
    sites_from: str = "probe"
    projections: tuple[Mapping[str, int], ...] = ()

    def blocks_of(self, model: nn.Module) -> list[nn.Module]:
        """Return the blocks of a model. For a block that is not a module, return the parent of its first norm."""
        names = zip(self.blocks, self.norms, strict=True)
        return [model.get_submodule(block or norms[0].rpartition(".")[0]) for block, norms in names]

    def norms_of(self, model: nn.Module) -> dict[str, list[nn.Module]]:
        """Return the norms of a model: name of a norm with ``*`` for the block's number -> this norm in all blocks."""
        norms: dict[str, list[nn.Module]] = {}
        for names in zip(*self.norms, strict=True) if len({*map(len, self.norms)}) == 1 else self.norms:
            by_place: dict[str, list[str]] = {}
            for name in names:
                by_place.setdefault(re.sub(r"\d+", "*", name), []).append(name)
            for alike in by_place.values():
                numbers = zip(*(re.findall(r"\d+", name) for name in alike), strict=True)
                differing = iter(["*" if len({*each}) > 1 else each[0] for each in numbers])
                place = re.sub(r"\d+", lambda match, differing=differing: next(differing), alike[0])  # type: ignore[misc]
                norms.setdefault(place, []).extend(map(model.get_submodule, alike))
        return norms
