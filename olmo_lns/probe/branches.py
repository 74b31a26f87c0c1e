"""Look at the branches of a block: how they are built, how they end, and how many read one norm.

A branch is what the block adds to its stream from the output of one site. In the example of :mod:`olmo_lns.probe`,
``attn(norm1(x))`` is the branch of ``norm1``, and ``mlp(norm2(y))`` is the branch of ``norm2``. The functions of this
module change the output of a site, or of a module inside of a branch, and compare what the block adds to its stream
before and after the change.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any, Mapping, Sequence

import torch
from torch import nn

from olmo_lns.probe.call import hooks
from olmo_lns.probe.recognize import is_leaf, norm_input
from olmo_lns.probe.replay import ROUNDING, Change, Hook, Replay, double_and_roll, raise_one_element
from olmo_lns.response import first_output

#: A stream with this many rows has rows of clearly different sizes, unless a function makes them equal.
_MANY_ROWS = 4
#: A change does not reach a position if the output changes there by less than this part of its largest change.
_NOT_REACHED = 1e-4


def branches_built_alike(replay: Replay) -> tuple[str, ...]:
    """Return the names of the two branches if they are modules with the same structure, or else ``()``.

    An example is a module that computes ``y = x + mlp1(norm1(x))`` and ``y + mlp2(norm2(y))``. The function compares
    the largest modules that contain one site each, or else the first modules that read the output of one site each.
    """
    if len(replay.site_names) != 2:
        return ()
    names = {module: name for name, module in replay.block.named_modules()}
    readers = _first_readers(replay)
    for pair in (
        [_holder(replay, name) for name in replay.site_names],
        [readers.get(name) for name in replay.site_names],
    ):
        first, second = pair
        if first is None or second is None or first is second or not _is_built_like(first, second):
            continue
        if replay.is_added(first) and replay.is_added(second):  # a conditioned norm is not added
            return names[first], names[second]
    return ()


def _first_readers(replay: Replay) -> dict[str, nn.Module]:
    """Return the first module with children that reads the output of each site, if there is one."""
    readers: dict[str, nn.Module] = {}
    outputs: dict[int, str] = {}
    kept: list[torch.Tensor] = []  # keeps the outputs alive, so that no other tensor gets their address

    def wrote(name: str) -> Hook:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            kept.append(first_output(output))
            outputs[kept[-1].data_ptr()] = name

        return hook

    def read(module: nn.Module, args: Any, kwargs: Any) -> None:
        value = norm_input(args, kwargs)
        if torch.is_tensor(value) and not is_leaf(module):
            name = outputs.get(value.data_ptr())
            if name is not None and replay.norms[name] not in set(module.modules()):
                readers.setdefault(name, module)

    handles = [module.register_forward_pre_hook(read, with_kwargs=True) for module in replay.block.modules()]
    handles += [replay.norms[name].register_forward_hook(wrote(name)) for name in replay.site_names]
    with hooks(handles):
        replay.forward()
    return readers


def _holder(replay: Replay, name: str) -> nn.Module | None:
    """Return the largest module in the block that contains this site and no further site, or None if there is none."""
    others = {replay.norms[other] for other in replay.site_names if other != name}
    parts = name.split(".")
    for length in range(1, len(parts)):
        module = replay.block.get_submodule(".".join(parts[:length]))
        if not others.intersection(module.modules()):
            return module
    return None


def _is_built_like(one: nn.Module, other: nn.Module) -> bool:
    """Return true if two modules have parts of the same names and classes, and parameters of the same shapes."""

    def structure(module: nn.Module) -> Any:
        classes = [(name, type(part)) for name, part in module.named_modules()]
        return classes, [(name, parameter.shape) for name, parameter in module.named_parameters()]

    return structure(one) == structure(other)


@dataclass(frozen=True)
class NeutralBranch:
    """The output that one branch adds to the stream while all gains of the block are 1 and all biases 0.

    The three tensors come from three runs of the block, in which the site returns zeros, half of its frozen tensor, and
    its whole frozen tensor.

    :param name: the site that the branch reads.
    :param zero: ``block(x) - x`` while the output of the site is zero.
    :param half: ``block(x) - x`` while the output of the site is halved.
    :param whole: ``block(x) - x`` while the output of the site is not changed.
    """

    name: str
    zero: torch.Tensor
    half: torch.Tensor
    whole: torch.Tensor


def neutral_branches(replay: Replay) -> list[NeutralBranch]:
    """Run the branch of each site while gains are 1 and biases 0."""
    with replay.with_neutral_vectors():
        whole = replay.delta()
        return [
            NeutralBranch(
                name,
                zero=replay.delta({site: torch.zeros_like}),
                half=replay.delta({site: lambda y: 0.5 * y}),
                whole=whole,
            )
            for name, site in zip(replay.site_names, replay.sites, strict=True)
        ]


def ends_in_functional_norm(replay: Replay, neutral: NeutralBranch) -> bool:
    """Return true if all rows of the branch's output have the same size, however the output of its norm changes.

    A norm without gain and bias gives such rows. Gains and biases are therefore neutral during the check.
    """
    name = neutral.name

    def by_row(y: torch.Tensor) -> torch.Tensor:
        # Rows become larger only, since a function with an eps makes small rows smaller.
        factors = torch.arange(2.0, 2.0 + y.shape[-2], device=y.device, dtype=y.dtype)
        return factors[:, None] * y.roll(1, -1)

    # Two rows may have almost the same size by chance, so a stream of few rows is changed once more.
    has_few_rows = replay.x.numel() < _MANY_ROWS * replay.x.shape[-1]
    changes: tuple[Change, ...] = (by_row, lambda y: 3.0 * y.roll(2, -1)) if has_few_rows else (by_row,)
    with replay.with_neutral_vectors():
        moved = [replay.delta({replay.norms[name]: change}) for change in changes]
    branch = torch.stack([each - neutral.zero for each in (neutral.whole, *moved)])

    def has_equal_sizes(view: torch.Tensor) -> bool:
        sizes = view.norm(dim=-1)
        return float(sizes.min()) > 0 and float(sizes.max() / sizes.min()) < 1 + replay.size_tolerance

    # The function at the end of a branch may normalize the channels of each position. The channels are the last
    # dimension, or the second one of an image, or where the site has them.
    in_norm = torch.stack([replay.as_norm_reads(name, each) for each in branch])
    if any(map(has_equal_sizes, (branch, branch.movedim(2, -1) if branch.dim() == 5 else branch, in_norm))):
        return True
    # The function may instead normalize each example as a whole. All examples then have one size, although their rows
    # grow with the rows of the norm's output. In a wide branch that ignores the size of each row, all examples have
    # about one size too, but its rows do not grow.
    rows = in_norm.norm(dim=-1)
    growth = rows[1] / rows[0].clamp_min(1e-30)
    count = rows.shape[-1]
    has_grown = count == 1 or not float(growth.max() / growth.min()) < ((1 + count) / 2) ** 0.5
    return has_grown and has_equal_sizes(branch.flatten(2))


def reads_norm_twice(replay: Replay) -> bool:
    """Return true if two branches of the block read its only site, and each has an output that is added to the stream.

    An example is ``x + attn(norm(x)) + mlp(norm(x))``. The function changes the output of the norm in one position. The
    output of attention then changes in other positions too, because attention mixes positions. The output of the
    feed-forward changes in this position only. The function returns true if it finds one output of each kind.
    """
    (name,) = replay.site_names
    here = torch.zeros_like(replay.x)
    replay.as_norm_reads(name, here)[(0,) * (here.dim() - 1)].fill_(1.0)
    if _mixes_and_does_not(replay, name, here):
        return True
    # A GroupNorm reads images that have their channels first.
    here = torch.zeros_like(replay.x)
    here.movedim(1, -1)[(0,) * (here.dim() - 1)].fill_(1.0)
    return here.dim() > 3 and _mixes_and_does_not(replay, name, here)


def _mixes_and_does_not(replay: Replay, name: str, here: torch.Tensor) -> bool:
    """Change one position, and return true if one added output spreads the change and another does not.

    :param name: the norm whose output is changed.
    :param here: a mask in the shape of the stream, 1 for all channels of that position and 0 elsewhere.
    """
    in_norm = replay.as_norm_reads(name, here)
    modules = [module for module in replay.block.modules() if module not in (replay.block, *replay.all_norms.values())]
    change: dict[nn.Module, Change] = {
        replay.norms[name]: lambda y: y + in_norm.reshape(y.shape) * (1.0 + y.roll(1, -1))
    }
    before, after = replay.outputs_of(modules, {}), replay.outputs_of(modules, change)
    mixing: list[nn.Module] = []
    others: list[nn.Module] = []
    for module in [module for module in before if module in after and replay.is_added(module)]:
        moved = (after[module] - before[module]).reshape(replay.x.shape)
        inside, outside = float((moved * here).norm()), float((moved * (1 - here)).norm())
        if inside + outside > 0:
            (mixing if outside > ROUNDING * (inside + outside) else others).append(module)
    # Both outputs may belong to one branch. The second is a separate branch only if the block still depends on it
    # while the output that mixes positions is replaced by zeros.
    for first, second in itertools.product(mixing, others):
        frozen: dict[nn.Module, Change] = {first: torch.zeros_like}
        if not replay.is_equal(replay.delta(frozen), replay.delta({**frozen, second: double_and_roll})):
            return True
    return False


def has_separate_paths(replay: Replay) -> bool:
    """Return true if two paths lead from the only site to the stream, and only one of them mixes positions.

    Some parallel blocks join the results of attention and feed-forward and apply one fused matrix,
    ``x + out(cat(attention, feed_forward))``. Neither of the two has an output that is added to the stream, so
    :func:`reads_norm_twice` does not recognize them. This function changes the outputs of two modules inside of the
    block instead, one that mixes positions and one that does not. The two modules are on separate paths if a change of
    either does not change what the second module computes, and if the effects of both changes on the stream add up. The
    gate of a branch is not a separate path, because it multiplies the branch, so the effects do not add up.
    """

    (name,) = replay.site_names
    norms = {part for norm in replay.all_norms.values() for part in norm.modules()} - {*replay.all_norms.values()}
    modules = [
        part for part in replay.block.modules() if part not in norms and part not in (replay.block, *replay.sites)
    ]
    before = _outputs(replay, modules, {})
    mixing: list[nn.Module] = []
    others: list[nn.Module] = []
    for module in before:
        rows = replay.as_norm_reads(name, replay.effect(module, change=raise_one_element)).flatten(0, -2).norm(dim=-1)
        if float(rows.max()) > ROUNDING:
            (mixing if int((rows > _NOT_REACHED * rows.max()).sum()) > 1 else others).append(module)
    for first, second in itertools.product(mixing, others):
        effects = [replay.effect(module) for module in (first, second)]
        if not replay.is_equal(replay.effect(first, second), effects[0] + effects[1]):
            continue
        if all(
            replay.is_equal(_outputs(replay, [read], {changed: double_and_roll})[read], before[read])
            for changed, read in ((first, second), (second, first))
        ):
            return True
    return False


def _outputs(
    replay: Replay, modules: Sequence[nn.Module], changes: Mapping[nn.Module, Change]
) -> dict[nn.Module, torch.Tensor]:
    """Freeze the sites, and return the first outputs of those modules that ran once and returned a floating tensor."""
    outputs: dict[nn.Module, list[Any]] = {}

    def note(module: nn.Module, args: Any, output: Any) -> None:
        outputs.setdefault(module, []).append(first_output(output))

    with hooks(module.register_forward_hook(note) for module in modules):
        replay.delta(changes)
    once = {module: found[0] for module, found in outputs.items() if len(found) == 1}
    return {m: y.detach().double() for m, y in once.items() if torch.is_tensor(y) and y.is_floating_point()}
