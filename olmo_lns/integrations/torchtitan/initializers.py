"""Remove the depth factor from torchtitan's initializers, and measure the weights that they draw.

Every parameter in torchtitan has an initializer, such as ``partial(trunc_normal_, std=0.02 / sqrt(2 * l))`` in block l.
A comparison of their standard deviations over all blocks shows which of them have a depth factor. LayerNorm Scaling
takes the place of this factor (arXiv 2502.05795, footnote 1 and section 6).
"""

from __future__ import annotations

import math
from collections import defaultdict
from functools import partial
from typing import Any, Callable, Iterator

from olmo_lns.errors import LNSConfigError, UpstreamChangedError
from olmo_lns.initialization import check_drawn
from olmo_lns.schemes.depth_factor import inverse_depth_factor

#: Attribute in which a module of torchtitan keeps its initializers: name of a parameter -> its initializer. It is
#: private, and no public one exists.
_INITIALIZERS = "_param_init"
#: Number of a block -> the standard deviation that one initializer has in this block.
_StdOfBlock = dict[int, float]


def remove_depth_factors(decoder: Any) -> None:
    """Replace each initializer that has a depth factor by one without it.

    Two factors are recognized: 1/√(2l) in block l, and 1/√(2L) in a model of L blocks.

    :param decoder: a built model whose weights are not drawn yet.
    :raises LNSConfigError: if an initializer differs between the blocks in another way.
    :raises UpstreamChangedError: if this version of torchtitan keeps its initializers elsewhere.
    """
    if not any(True for _ in _initializers(decoder)):
        raise UpstreamChangedError(
            f"{type(decoder).__name__}: no module of its blocks has its initializers in {_INITIALIZERS}, as in "
            "torchtitan 0.3. A scheme removes their depth factor, and has to find them. Install another version of "
            "torchtitan or a newer olmo-lns."
        )
    by_draw, n_layers = _stds_by_draw(decoder), len(decoder.layers)
    bases = {_base(name, stds, n_layers) for (name, _), stds in by_draw.items() if len(set(stds.values())) > 1}
    in_block: dict[int, set[float]] = defaultdict(set)
    for stds in by_draw.values():
        for number, std in stds.items():
            in_block[number].add(std)

    plain: dict[tuple[str, int], float] = {}
    for key, stds in by_draw.items():
        # A weight that only one block has does not differ between the blocks. It has the base of another weight.
        for base in bases:
            if all(_same(std, base) for std in _without_block_factor(stds, n_layers)):
                plain[key] = base
        if key not in plain and n_layers > 1 and len(set(stds.values())) == 1:
            base = next(iter(stds.values())) * inverse_depth_factor("scaled", 1, n_layers)
            if any(_same(base, other) for number in stds for other in in_block[number]):
                plain[key] = base
    _replace(decoder, plain)


def _stds_by_draw(decoder: Any) -> dict[tuple[str, int], _StdOfBlock]:
    """Return the standard deviations in all blocks for each draw.

    A draw is identified by the name of the parameter in its block, and by its position among the draws of the
    parameter's initializer. A fused weight has several.
    """
    by_draw: dict[tuple[str, int], _StdOfBlock] = defaultdict(dict)
    for number, name, _, _, initializer in _initializers(decoder):
        for place, draw in enumerate(_draws(initializer)):
            if draw.keywords["std"] > 0:
                by_draw[name, place][number] = float(draw.keywords["std"])
    return by_draw


def _base(name: str, stds: _StdOfBlock, n_layers: int) -> float:
    """Return the standard deviation that an initializer would have without its factor 1/√(2l).

    :raises LNSConfigError: if its standard deviations differ between the blocks in another way.
    """
    bases = _without_block_factor(stds, n_layers)
    if not all(_same(base, bases[0]) for base in bases):
        raise LNSConfigError(
            f"{name} is drawn with the standard deviations {stds} by block. A scheme replaces a depth factor of "
            "1/sqrt(2l) or 1/sqrt(2L) in block l of L, and this is neither. Give all blocks one value, or keep the "
            'initializers with olmo_lns.torchtitan.lns={"keep_scaled_init": true}.'
        )
    return bases[0]


def _without_block_factor(stds: _StdOfBlock, n_layers: int) -> list[float]:
    """Return the standard deviations that an initializer would have in its blocks without a factor 1/√(2l)."""
    return [std * inverse_depth_factor("depth_scaled", number, n_layers) for number, std in stds.items()]


def _same(a: float, b: float) -> bool:
    return math.isclose(a, b, rel_tol=1e-6)


def _initializers(decoder: Any) -> Iterator[tuple[int, str, Any, str, Callable[..., Any]]]:
    """Yield for each parameter: block number, name in the block, module, name in the module, and initializer."""
    for key, block in decoder.layers.items():
        for path, module in block.named_modules():
            for name, initializer in (getattr(module, _INITIALIZERS, None) or {}).items():
                yield int(key) + 1, f"{path}.{name}", module, name, initializer


def _draws(initializer: Any) -> Iterator[partial[Any]]:
    """Yield the draws of an initializer: the initializer itself, or one draw for each part of a fused weight."""
    if isinstance(initializer, partial):
        if isinstance(initializer.keywords.get("std"), (int, float)):
            yield initializer
        return
    for cell in getattr(initializer, "__closure__", None) or ():
        yield from _draws(cell.cell_contents)


def _replace(decoder: Any, plain: dict[tuple[str, int], float]) -> None:
    for _, name, module, parameter, initializer in list(_initializers(decoder)):
        stds = [plain.get((name, place)) for place, _ in enumerate(_draws(initializer))]
        if any(stds):
            present = getattr(module, _INITIALIZERS)
            setattr(module, _INITIALIZERS, {**present, parameter: _with_stds(initializer, stds)})
            if isinstance(initializer, partial):
                module.lns_drawn = {**getattr(module, "lns_drawn", {}), parameter: stds[0]}


def _with_stds(initializer: Callable[..., Any], stds: list[float | None]) -> Callable[..., Any]:
    """Return an initializer that draws with other standard deviations.

    :param stds: the new standard deviation of each draw, in order. None keeps the present one.
    """
    if isinstance(initializer, partial):
        return partial(initializer, std=stds[0])

    def fused(parameter: Any) -> None:
        stock = [(draw.keywords, draw.keywords["std"]) for draw in _draws(initializer)]
        try:
            for (keywords, present), std in zip(stock, stds, strict=True):
                keywords["std"] = present if std is None else std
            initializer(parameter)
        finally:
            for keywords, std in stock:
                keywords["std"] = std

    return fused


def wrap_init_states(init_states: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``Decoder.init_states``: measure the weights whose initializer was replaced."""

    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = init_states(self, *args, **kwargs)
        for path, module in self.named_modules():
            for name, std in vars(module).get("lns_drawn", {}).items():
                check_drawn({name: getattr(module, name)}, std, where=path)
        return result

    return wrapped
