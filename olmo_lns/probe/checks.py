"""Check that a block is one whose two norms a scheme can scale.

Some blocks read their stream only through norms, but a scheme cannot scale them. One such block returns
``x + post_norm(attn(norm1(x)))``: a factor on the output of ``norm1`` has no effect, because ``post_norm`` cancels it.
Each function ``check_…`` refuses one kind of these blocks and raises :class:`~olmo_lns.probe.call.NotPreLN` with the
reason. :func:`check_block` calls all of them, after :mod:`olmo_lns.probe.search` has found the sites.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Sequence

import torch

from olmo_lns.probe import branches
from olmo_lns.probe.call import BlockFailed, NotPreLN
from olmo_lns.probe.replay import SAME_HALF, Change, Replay, Result, double_and_roll

log = logging.getLogger("olmo_lns")


def check_block(replay: Replay, *, named_by_user: bool = False) -> dict[str, float]:
    """Run all checks on a block.

    :param named_by_user: true if the user named the sites with ``norms=``.
    :returns: the result of :func:`shares_lost_by_halving`. If the block computes different results in training mode,
        each value is the smaller one of the two modes, because a BatchNorm cancels a factor in training mode only.
    :raises NotPreLN: if a check fails.
    """
    sites_text = replay.sites_text + (", given by norms=" if named_by_user else "")
    effects = check_sites_are_read(replay)
    check_number_of_sites(replay)
    effect_of_all = effects[0] if len(effects) == 1 else replay.effect(*replay.sites)
    check_other_norms_are_read(replay)
    check_one_stream(replay, sites_text)
    check_branches_differ(replay)
    neutral = branches.neutral_branches(replay)
    check_ends_of_branches(replay, sites_text, neutral)
    if len(replay.site_names) == 1 and named_by_user:
        check_shared_norm(replay)
    else:
        check_two_branches(replay, sites_text, effects, effect_of_all)
    check_with_gradients(replay)
    check_under_autocast(replay)
    shares, in_training = shares_lost_by_halving(replay, neutral), check_in_training(replay, effect_of_all)
    return {name: min(share, in_training.get(name, share)) for name, share in shares.items()}


def check_sites_are_read(replay: Replay) -> list[torch.Tensor]:
    """Check that each site has an effect on what the block returns.

    :returns: the effect of each site.
    """
    effects = replay.effects_of_sites()
    for name, effect in zip(replay.site_names, effects, strict=True):
        if not replay.is_noticeable(effect):
            raise NotPreLN(f"nothing reads its norm {name}")
    return effects


def check_number_of_sites(replay: Replay) -> None:
    """Check that the block has one or two sites."""
    if (count := len(replay.site_names)) > 2:
        found = f"{count} norms read the stream ({', '.join(replay.site_names)}). Expected two"
        raise NotPreLN(found, norms_argument_may_help=count > 3)


def check_other_norms_are_read(replay: Replay) -> None:
    """Check that each norm which is not a site has an effect on some output of the block."""
    for name in [name for name in replay.norms if name not in replay.site_names]:
        outputs = replay.all_outputs({}), replay.all_outputs({replay.norms[name]: double_and_roll})
        is_unchanged = len(outputs[0]) == len(outputs[1]) and all(
            replay.is_equal(a.double(), b.double()) for a, b in zip(*outputs, strict=True)
        )
        if is_unchanged:
            raise NotPreLN(
                f"its norm {name} runs without any effect, as if its branch were switched off. Its factor would be "
                "missing once the branch is switched on"
            )


def check_one_stream(replay: Replay, sites_text: str) -> None:
    """Check that the block has no second stream, such as the states of an encoder that it normalizes too.

    The function looks at each norm that is not a site, and suspects that it reads a second stream in two cases:

    * The input of the norm stays as it is when the outputs of the sites change. An example is ``norm3`` in
      ``y + cross(norm2(y), norm3(states))``, where ``states`` is another argument of the block.
    * The input of the norm is another argument plus a part that does not depend on this argument. An example is
      ``norm3(states + attn(h1))``, where ``states`` is a second residual stream.

    A norm that reads a learned parameter, or keys that all blocks share, is not refused.
    """
    outside = [name for name in replay.all_norms if name not in replay.site_names]
    if not outside:
        return
    changes: dict[torch.nn.Module, Change] = dict.fromkeys(replay.sites, double_and_roll)
    still, moved = (replay.inputs_of(outside, frozen=replay.site_names, changes=each) for each in ({}, changes))
    suspects = {name for name in still.keys() & moved.keys() if replay.is_equal(still[name], moved[name])}
    varied: set[str] = set()  # norms that read an argument, or something that the block computes from one
    unchanged: set[str] = set()  # norms that read an argument which the block does not update, such as shared keys
    names = [*replay.site_names, *outside]
    for index, tensor in enumerate(replay.call.tensors()):
        if not tensor.is_floating_point() or tensor.dim() < 2 or tensor is replay.call.stream:
            continue
        values = [tensor, tensor + 3.0 * replay.draw(tensor)]
        try:
            calls = [replay.call.with_tensor(index, value) for value in values]
            runs = [replay.run(replay.x, names, call=call)[1] for call in calls]
        except BlockFailed:  # the argument cannot have other values, so it is no stream
            runs = []
        if [len(run) for run in runs] != [len(names)] * 2:  # or it decides which norms run
            varied |= suspects
            continue
        for name, *inputs in zip(names, *runs, strict=True):
            if name not in outside or replay.is_equal(*inputs):
                continue
            varied.add(name)
            if inputs[0].numel() != tensor.numel():
                continue
            rests = [y.flatten() - value.double().flatten() for y, value in zip(inputs, values, strict=True)]
            suspects |= {name} if replay.is_equal(*rests) else set()
            if not _returns_another(replay, tensor):
                unchanged.add(name)
    # A norm whose input never varied may read a learned parameter instead of a stream.
    suspects = (suspects - unchanged) & varied
    if suspects:
        names_found = ", ".join(name for name in outside if name in suspects)
        raise NotPreLN(f"it has two streams: its norm {names_found} reads another stream than {sites_text}")


def _returns_another(replay: Replay, argument: torch.Tensor) -> bool:
    """Return true if the block returns a new tensor in the shape of this argument, besides its stream.

    A returned tensor is new if it does not equal any argument. A block that updates a second stream returns a new
    tensor, and a block that passes shared keys on returns the keys themselves.
    """
    arguments = [tensor.double() for tensor in replay.call.tensors() if tensor.shape == argument.shape]
    others = [leaf.double() for leaf in replay.all_outputs({})[1:] if leaf.shape == argument.shape]
    return any(not any(replay.is_equal(leaf, tensor) for tensor in arguments) for leaf in others)


def check_branches_differ(replay: Replay) -> None:
    """Check that the two branches are not built alike.

    Two branches are built alike if they have the same modules and shapes, as in a block with two feed-forwards and no
    attention. A scheme would then number two blocks as one.
    """
    if alike := branches.branches_built_alike(replay):
        raise NotPreLN(
            f"its two branches {' and '.join(alike)} are built alike, so it holds two layers of one branch, or two "
            "blocks. Expected attention and feed-forward"
        )


def check_ends_of_branches(replay: Replay, sites_text: str, neutral: Sequence[branches.NeutralBranch]) -> None:
    """Check that no branch ends in a norm, which would cancel the factor (Sandwich-LN).

    The norm may be a module or a function.
    """
    for name in [name for name in replay.norms if name not in replay.site_names]:
        if replay.is_added(replay.norms[name]):
            raise NotPreLN(f"its norm {name} sits on a branch, besides {sites_text} (Sandwich-LN)")
    for branch in neutral:
        if branches.ends_in_functional_norm(replay, branch):
            raise NotPreLN(f"the branch that reads {branch.name} ends in a norm that is a function (Sandwich-LN)")


def check_two_branches(
    replay: Replay, sites_text: str, effects: Sequence[torch.Tensor], effect_of_all: torch.Tensor
) -> None:
    """Check that the block has two branches.

    With two sites, each has its own branch if the effect of both together is the sum of their single effects. This is
    true for ``x + attn(h1) + mlp(h2)``, and false for ``x + mlp(h1 * h2)``, which is one branch. With one site, the
    function asks :func:`~olmo_lns.probe.branches.reads_norm_twice`.

    :param effects: the effect of each site alone.
    :param effect_of_all: the effect of all sites together.
    """
    if len(replay.site_names) == 2:
        together = effect_of_all - sum(effects)
        if float(together.norm()) > 10 * replay.tolerance * float(replay.reference_delta.norm()):
            raise NotPreLN(f"it has one branch, after {sites_text}. Expected attention and feed-forward")
    elif not branches.reads_norm_twice(replay):
        raise NotPreLN(
            f"it has one branch, after {sites_text}. Expected attention and feed-forward, one of which mixes positions",
            norms_argument_may_help=True,
        )


def check_shared_norm(replay: Replay) -> None:
    """Check that both branches read a norm which the user passed as the only one of the block."""
    if not branches.reads_norm_twice(replay) and not branches.has_separate_paths(replay):
        raise NotPreLN(
            f"one branch reads {replay.sites_text}, given by norms=. A block has two branches, so pass its two norms "
            "as a pair, also if they are in two modules"
        )


def check_with_gradients(replay: Replay) -> None:
    """Check that the branches read the stream through the sites alone even if PyTorch computes gradients.

    In eval mode a block may use a fused kernel if it runs without gradients, and its Python code if it runs with them.
    """
    expected = replay.result(trains=False)
    with torch.enable_grad():
        if not replay.separates_branches_as(expected):
            raise NotPreLN(f"in eval mode with gradients its branches bypass {replay.sites_text}")


def check_under_autocast(replay: Replay) -> None:
    """Check that the branches read the stream through the sites alone under autocast to bf16.

    A block that does not run under autocast is not checked, and the log says so.
    """
    expected = replay.result(trains=False)
    tolerance, replay.tolerance = replay.tolerance, SAME_HALF
    try:
        with torch.autocast(replay.x.device.type, torch.bfloat16):
            is_independent = replay.separates_branches_as(expected)
    except BlockFailed as error:  # dtypes or a kernel that the block lacks
        log.info("%s does not run under autocast, so it was not checked there: %s", type(replay.block).__name__, error)
        is_independent = True
    finally:
        replay.tolerance = tolerance
    if not is_independent:
        raise NotPreLN(f"under autocast its branches bypass {replay.sites_text}")


def check_in_training(replay: Replay, effect_of_all: torch.Tensor) -> dict[str, float]:
    """Check in training mode that the branches read the stream through the sites alone, and that none ends in a norm.

    :param effect_of_all: the effect of all sites in eval mode.
    :returns: the result of :func:`shares_lost_by_halving` in training mode. It is empty if the block computes the same
        results in both modes, apart from dropout.
    """
    changes: dict[torch.nn.Module, Change] = dict.fromkeys(replay.sites, double_and_roll)
    in_eval = replay.reference_delta, replay.reference_delta + effect_of_all
    with replay.in_mode(True):
        result = _run_with_all_branches(replay)
        with torch.no_grad():
            is_independent = replay.separates_branches_as(result)
        results = result, replay.run(replay.second_input, replay.site_names)
        if not (is_independent and replay.are_independent_of_stream(results)):
            raise NotPreLN(f"in training mode its branches bypass {replay.sites_text}")
        replay.reference_delta = result[0]
        in_training = result[0], replay.delta(changes)
        if all(replay.is_equal(a, b) for a, b in zip(in_eval, in_training, strict=True)):
            return {}
        neutral = branches.neutral_branches(replay)
        check_ends_of_branches(replay, f"{replay.sites_text} in training mode", neutral)
        return shares_lost_by_halving(replay, neutral)


def _run_with_all_branches(replay: Replay) -> Result:
    """Choose a seed with which the block runs all of its branches, and run it.

    Some blocks drop a branch at random in training mode (stochastic depth). The function tries eight seeds.

    :returns: the run of the block with this seed, or with the usual seed if a branch is missing under all eight.
    """
    usual = replay.call
    for seed in range(8):
        replay.call = replace(usual, seed=seed)
        if len((result := replay.run(replay.x, replay.site_names))[1]) == len(replay.site_names):
            if seed == usual.seed:
                replay.store_result(result, trains=True)
            return result
    replay.call = usual
    return replay.run(replay.x, replay.site_names)


def shares_lost_by_halving(replay: Replay, neutral: Sequence[branches.NeutralBranch]) -> dict[str, float]:
    """Return for each site which share of its branch is lost if the output of the site is halved.

    The result is about 0.5 for a linear branch, since half of ``mlp(h)`` is lost. It is 0 if a later norm inside of the
    branch cancels the factor, as in ``up(norm(down(h)))``, which returns the same for h and for h / 2. A block is not
    refused for such a norm.
    """
    shares = {}
    for branch in neutral:
        size = float((branch.whole - branch.zero).norm())
        # In training mode a branch may be dropped. Nothing is cancelled then.
        has_branch = size > replay.tolerance * float(replay.reference_delta.norm())
        shares[branch.name] = float((branch.whole - branch.half).norm()) / size if has_branch else 0.5
    return shares
