"""Find the sites of a block, or confirm those that are expected.

The search freezes all norms of the block, and compares two runs on different streams. It then goes through the norms
from the last to the first, and leaves out each norm without which the comparison still succeeds. Suppose that attention
also normalizes its queries, so that the block of :mod:`olmo_lns.probe` has the norms ``norm1``, ``attn.q_norm`` and
``norm2``:

* Without ``norm2``, ``block(x) - x`` depends on x, because ``mlp`` reads the stream. ``norm2`` stays.
* Without ``attn.q_norm``, it does not, because the queries are computed from the frozen output of ``norm1``.
  ``attn.q_norm`` is left out.
* Without ``norm1``, it does. ``norm1`` stays.

The norms that remain are the sites. :mod:`olmo_lns.probe.checks` then decides whether a scheme can scale them.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Iterator, Mapping, Sequence

import torch
from torch import nn

from olmo_lns.errors import LNSConfigError, MeasurementError
from olmo_lns.probe import checks
from olmo_lns.probe.call import BlockFailed, Call, NotPreLN, code_of_the_block, hooks
from olmo_lns.probe.copies import random_copy
from olmo_lns.probe.norms import find_norms
from olmo_lns.probe.projections import find_projections
from olmo_lns.probe.replay import Replay, Result
from olmo_lns.shadow import RandomWeights

#: If the output of a site is halved, a branch without further norms becomes smaller by 0.5 of its size. If a later norm
#: in the branch cancels the factor, the branch changes by less than ``_CANCELLED`` of its size. If the norm cancels the
#: factor in a part of the branch only, the branch changes by less than ``_PARTLY_CANCELLED`` of its size.
_CANCELLED, _PARTLY_CANCELLED = 0.01, 0.25


@dataclass(frozen=True)
class BlockSites:
    """The Pre-LN sites of a block.

    :param names: names of the norms, in the order in which they run. A parallel block, whose two branches read the
        same norm, has one; every other block has two.
    :param cancelled: names of the norms whose factor is cancelled completely by a later norm.
    :param partly_cancelled: names of the norms whose factor is cancelled by a later norm in a part of the branch.
    :param projections: result of :func:`olmo_lns.initialization.residual_projections` for this block.
    :param replay: the copy of the block and its call, on which the sites were found.
    """

    names: tuple[str, ...]
    cancelled: tuple[str, ...] = ()
    partly_cancelled: tuple[str, ...] = ()
    projections: Mapping[str, int] = field(default_factory=dict)
    replay: Replay = field(repr=False, compare=False, kw_only=True)


def pre_ln_sites(
    block: nn.Module,
    call: Call,
    *,
    where: str = "block 1",
    expected_names: tuple[str, ...] | None = None,
    names_by_user: tuple[str, ...] | None = None,
    earlier: BlockSites | None = None,
    advice: str = "",
    weights: RandomWeights | None = None,
) -> BlockSites:
    """Find the norms through which ``block`` reads its stream, by running a copy of the block.

    :param block: a block with weights of any floating dtype. They must not be on the meta device.
    :param call: the arguments that the block received in a real forward of the model.
    :param where: name of the block in error messages.
    :param expected_names: the norms that the framework's block has. The probe confirms that they are the sites.
    :param names_by_user: the norms that the user named with ``norms=``. The probe then searches for no others, and only
        checks that the block reads its stream through these.
    :param earlier: the result for an earlier block with the same structure. The copy of this block then gets the random
        parameters and the frozen outputs of the earlier one, and runs once in eval and once in training mode. If both
        blocks compute equal results, ``earlier`` is returned. Otherwise this block is searched separately.
    :param advice: text that is added to an error if naming the norms can help.
    :param weights: memory of the random parameters, which the copies of several blocks share.
    :raises LNSConfigError: if the block is not Pre-LN. The message names the block and the reason.
    :raises MeasurementError: if the copy of the block cannot be run.

    Example: ``pre_ln_sites(model.model.layers[0], call).names`` is ``("input_layernorm", "post_attention_layernorm")``
    for a Llama.
    """
    problem: BlockFailed | None = None
    # Some kernels accept half precision only. The last attempt keeps the dtypes of the block.
    for dtype in (torch.float32, torch.bfloat16, None) if earlier is None else (earlier.replay.dtype,):
        try:
            # Each run sets its own seed, so the random state of the training run is restored afterwards.
            # The caller may be under autocast, whose rounding would hide what the probe compares.
            device = call.stream.device
            without_autocast = torch.autocast(device.type, enabled=False)
            with torch.no_grad(), without_autocast, torch.random.fork_rng([device] if call.stream.is_cuda else []):
                with code_of_the_block():
                    copied = random_copy(block, None if earlier is None else earlier.replay.block, weights, dtype)
                replay = Replay(copied, call.detached(dtype), dtype)
                if earlier is not None:
                    replay.take_from(earlier.replay)
                    if replay.computes_the_same_as(earlier.replay):
                        return earlier
                    replay, expected_names = Replay(copied, replay.call, dtype), earlier.names
                with _refusing_runs_of(block):
                    find_norms(replay)
                if names_by_user is not None:
                    _check_sites_of_user(replay, names_by_user)
                else:
                    _search_sites(replay, expected_names)
                shares = checks.check_block(replay, named_by_user=names_by_user is not None)
                return BlockSites(
                    replay.site_names,
                    cancelled=tuple(name for name, share in shares.items() if share < _CANCELLED),
                    partly_cancelled=tuple(
                        name for name, share in shares.items() if _CANCELLED <= share < _PARTLY_CANCELLED
                    ),
                    projections=find_projections(replay, call) if earlier is None else earlier.projections,
                    replay=replay,
                )
        except NotPreLN as reason:
            raise LNSConfigError(
                f"{where} ({type(block).__name__}) is not Pre-LN: {reason}. A scheme needs a block whose two branches "
                "read the stream through a norm that is a module. docs/without-a-plugin.md scales other models."
                + (f" {advice}" if advice and reason.norms_argument_may_help else "")
            ) from None
        except BlockFailed as error:
            problem = problem or error
    raise MeasurementError(
        f"{where} ({type(block).__name__}) could not be run a second time ({problem}). "
        "Expected a forward that does not depend on a cache from an earlier call. Pass an example= without such a "
        f"cache. {advice}"
    ) from problem


@contextmanager
def _refusing_runs_of(block: nn.Module) -> Iterator[None]:
    """Check that the copy of a block runs its own modules in this context, and none of the block.

    :raises BlockFailed: if it runs a module of the original, which the message names.
    """
    names = {module: name for name, module in block.named_modules() if not isinstance(module, torch.jit.ScriptModule)}
    ran: list[nn.Module] = []
    with hooks(module.register_forward_pre_hook(lambda module, args: ran.append(module)) for module in names):
        yield
    if ran:
        raise BlockFailed(f"its copy runs {names[ran[0]] or 'the block itself'} of the original, to which it refers")


def _search_sites(replay: Replay, expected: tuple[str, ...] | None) -> None:
    """Find the sites of the block, and store their names in ``replay``.

    :param expected: the expected sites, which are confirmed; None to search for them.
    :raises NotPreLN: if the block is not Pre-LN, or has other sites than expected.
    """
    if not replay.norms:
        raise NotPreLN(
            "none of its modules is a norm of the stream. Norms that are functions cannot be scaled",
            norms_argument_may_help=True,
        )
    if expected is not None and not replay.norms.keys() >= set(expected):
        raise NotPreLN(
            f"its norms are {', '.join(replay.norms)}. Expected {', '.join(expected)}, as in a block built alike"
        )
    names = list(expected or replay.norms)
    results = replay.run_twice(names)
    if not replay.are_independent_of_stream(results, accept_inner=expected is None):
        raise NotPreLN(
            f"it reads its stream elsewhere than through its norms, {', '.join(replay.norms)}",
            norms_argument_may_help=True,
        )
    if expected is None:
        readers = _readers_of_stream(replay, names, results)
        if readers and _are_sites(replay, *_leave_out_inner(replay, names, results, keep=readers)):
            return
        names, results = _leave_out_inner(replay, names, results, keep=())
    if not replay.are_independent_of_stream(results):
        raise NotPreLN(f"its norms {', '.join(names)} do not read its stream", norms_argument_may_help=True)
    replay.set_sites(names, results[0])


def _readers_of_stream(replay: Replay, names: Sequence[str], results: tuple[Result, Result]) -> tuple[str, ...]:
    """Return the norms that read the stream itself if there are one or two, or else ``()``.

    :param names: all norms of the stream.
    :param results: the results of :meth:`Replay.run` on the two streams while these norms are frozen.
    """
    (_, inputs), (_, second_inputs) = results
    if len(inputs) != len(names):
        return ()
    readers = [
        name
        for name, a, b in zip(names, inputs, second_inputs, strict=True)
        if a.shape == replay.x.shape and replay.is_equal(a, b)
    ]
    return tuple(readers) if len(readers) <= 2 else ()


def _leave_out_inner(
    replay: Replay, names: list[str], results: tuple[Result, Result], keep: Sequence[str]
) -> tuple[list[str], tuple[Result, Result]]:
    """Leave out the norms inside of the branches, such as those of queries, which read what an earlier norm passed on.

    The search goes from the last norm to the first, so it leaves out the inner norm and keeps the earlier one.

    :param names: all norms of the stream.
    :param results: the results of :meth:`Replay.run` on the two streams while these norms are frozen.
    :param keep: the norms that are not left out.
    :returns: the norms that remain, and the results while only these are frozen.
    """
    for name in [name for name in reversed(names) if name not in keep]:
        without = [other for other in names if other != name]
        if without and replay.are_independent_of_stream(tried := replay.run_twice(without), accept_inner=True):
            names, results = without, tried
    return names, results


def _are_sites(replay: Replay, names: list[str], results: tuple[Result, Result]) -> bool:
    """Return true if the branches read the stream through each of these norms, which become the sites of ``replay``.

    A norm that reads the stream is not a site if its output has no effect on the stream that the block returns.
    """
    if not replay.are_independent_of_stream(results):
        return False
    replay.set_sites(names, results[0])
    return all(map(replay.is_noticeable, replay.effects_of_sites()))


def _check_sites_of_user(replay: Replay, names: tuple[str, ...]) -> None:
    """Check that the block reads its stream through the norms that the user named, and store them in ``replay``.

    :raises NotPreLN: if it reads the stream elsewhere.
    """
    if missing := [name for name in names if name not in replay.norms]:
        others = f". Its norms are {', '.join(replay.norms)}" if replay.norms else ""
        raise NotPreLN(f"{', '.join(missing)} given by norms= is no norm of its stream{others}")
    replay.site_names = names
    forms: tuple[dict[str, bool], ...] = ({}, {"returns_parts": True}, {"returns_change": True})
    for form in forms:
        replay.call = replace(replay.call, **{"returns_parts": False, "returns_change": False, **form})  # type: ignore[arg-type]
        if replay.are_independent_of_stream(results := replay.run_twice(names)):
            replay.set_sites(names, results[0])
            break
    else:
        raise NotPreLN(f"it reads its stream elsewhere than through {' and '.join(names)}, given by norms=")
