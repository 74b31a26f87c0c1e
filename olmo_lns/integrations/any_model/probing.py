"""Probe the blocks of a model.

The probe examines the first block of each structure. Another block of this structure is compared with the first one,
and the probe examines it only if it computes something different.
"""

from __future__ import annotations

import math
from typing import Any, Collection, Mapping, Sequence

import torch
from torch import nn

from olmo_lns import probe, shadow
from olmo_lns.errors import LNSConfigError
from olmo_lns.whole_model.trace import Trace


class BlockProbes:
    """The blocks of a model and what the probe found in them.

    :param stack: the blocks, None for a block that is not a module.
    :param pairs: the norms that the user passed for each block, or None.
    :param trace: the forward in which the blocks were found.
    :param advice: text that is added to an error if naming the norms can help.
    :param weights: memory of the random parameters of the copies.
    """

    def __init__(
        self,
        stack: Sequence[nn.Module | None],
        pairs: Sequence[tuple[nn.Module, ...] | None],
        trace: Trace,
        advice: str,
        weights: shadow.RandomWeights,
    ) -> None:
        self.stack, self.pairs, self.advice, self.weights = stack, pairs, advice, weights
        #: The blocks that were probed separately, with their results.
        self.separately: list[tuple[nn.Module, probe.BlockSites]] = []
        #: The blocks that computed the same as the first block of their structure only while their norms had hooks. A
        #: block may do so if its model uses a fused kernel that reads the weights of a norm, and avoids this kernel if
        #: the norm has hooks.
        self.equal_only_with_hooks: list[tuple[nn.Module, probe.BlockSites]] = []
        self._calls = [None if block is None else trace.calls.get(block) for block in stack]
        self._given = [
            None if pair is None or block is None else tuple(_names(block)[norm] for norm in pair)
            for block, pair in zip(stack, pairs, strict=True)
        ]
        self._results: dict[int, probe.BlockSites] = {}  # number of a block, from 1 -> its result
        self._first: dict[Any, int] = {}  # structure -> number of the first block that has it
        self._first_alike: dict[int, int] = {}  # number of a block -> number of the first block with its structure
        for number, (block, call, names) in enumerate(zip(stack, self._calls, self._given, strict=True), start=1):
            if block is not None and call is not None:
                key = (structure(block), names, tuple(tensor.shape for tensor in call.tensors()))
                self._first_alike[number] = self._first.setdefault(key, number)

    def probe_structures(self) -> None:
        """Probe the first block of each structure."""
        for number in self._first.values():
            self._probe(number, None)

    def probe_others(self, confirmed: Collection[nn.Module], ran: Collection[nn.Module] = ()) -> None:
        """Compare each block with the first block of its structure, and probe it if the two compute different results.

        :param confirmed: the blocks that were compared before and computed the same result as their first block.
        :param ran: the blocks that were compared before, without hooks on their norms. If one of them is not in
            ``confirmed``, but now computes the same result with hooks, it is stored in ``equal_only_with_hooks``.
        """
        for number, first in self._first_alike.items():
            if number == first:
                continue
            earlier = self._results[first]
            if self.stack[number - 1] in confirmed:
                self._results[number] = earlier
                continue
            found, block = self._probe(number, earlier), self.stack[number - 1]
            if found is earlier and block is not None and block in ran:
                self.equal_only_with_hooks.append((block, found))
            if found is not earlier and found.names == earlier.names:
                _require_no_factor(found, earlier, number, first)

    def _probe(self, number: int, earlier: probe.BlockSites | None) -> probe.BlockSites:
        block, call, names = self.stack[number - 1], self._calls[number - 1], self._given[number - 1]
        assert block is not None and call is not None
        _refuse_scripted(block, number)
        found = probe.pre_ln_sites(
            block,
            call,
            where=f"block {number}",
            names_by_user=names,
            earlier=earlier,
            advice=self.advice,
            weights=self.weights,
        )
        self._results[number] = found
        if found is not earlier:
            self.separately.append((block, found))
        return found

    @property
    def replays(self) -> dict[nn.Module, probe.Replay]:
        """Block -> the copy of the first block with its structure."""
        firsts = [(self.stack[number - 1], first) for number, first in self._first_alike.items()]
        return {block: self._results[first].replay for block, first in firsts if block is not None}

    @property
    def probed(self) -> set[int]:
        """The numbers of the blocks that were examined."""
        return set(self._results)

    @property
    def norms(self) -> list[tuple[nn.Module, ...]]:
        """The norms of each block."""
        found: list[tuple[nn.Module, ...]] = []
        for number, (block, pair) in enumerate(zip(self.stack, self.pairs, strict=True), start=1):
            if block is None or number not in self._results:
                found.append(pair or ())
            else:
                found.append(tuple(block.get_submodule(name) for name in self._results[number].names))
        return found

    @property
    def projections(self) -> tuple[Mapping[str, int], ...]:
        """The residual output projections of each block, or ``()`` if a block could not be probed."""
        found = [result.projections for _, result in sorted(self._results.items(), key=lambda item: item[0])]
        return tuple(found if len(found) == len(self.stack) else ())


def structure(block: nn.Module) -> Any:
    """Return the classes of a block's modules and the shapes and devices of its parameters.

    Two blocks have the same structure if these are equal.
    """
    modules = tuple((name, type(module)) for name, module in block.named_modules())
    return modules, tuple((name, tuple(p.shape), p.device) for name, p in block.named_parameters())


def _refuse_scripted(block: nn.Module, number: int) -> None:
    """Refuse a block with a part that ``torch.jit.script`` has compiled, on which no hook can be registered.

    :raises LNSConfigError: if there is one. The message names it.
    """
    for name, part in block.named_modules():
        if isinstance(part, torch.jit.ScriptModule):
            raise LNSConfigError(
                f"block {number} ({type(block).__name__}): {name or 'the block itself'} was compiled by "
                "torch.jit.script or trace, so its modules take no hooks and cannot be measured. Expected modules of "
                "Python. Apply the scheme before this part is compiled."
            )


def _names(block: nn.Module) -> dict[nn.Module, str]:
    return {module: name for name, module in block.named_modules()}


def _require_no_factor(found: probe.BlockSites, earlier: probe.BlockSites, number: int, first: int) -> None:
    """Refuse a model whose blocks multiply the outputs of their norms by 1/sqrt(l) themselves.

    The model of the paper's repository does this.

    :param found: the result for this block.
    :param earlier: the result for an earlier block with the same structure.
    :param number: number of this block.
    :param first: number of the earlier block.
    :raises LNSConfigError: if this block is the earlier one with the factor of its own number.
    """
    if found.replay.computes_the_same_with_factor(earlier.replay, math.sqrt(first / number)):
        raise LNSConfigError(
            f"Block {number} ({type(found.replay.block).__name__}) computes what block {first} computes if the outputs "
            f"of its norms are multiplied by sqrt({first}/{number}). This model therefore has LayerNorm Scaling in its "
            "own code, and apply() would multiply twice. Remove the model's own factor, or do not call apply()."
        )
