"""Confirm in one forward for each mode that every block does what the probed block of its structure does.

The probe examines one block of each structure, on a copy with random parameters and frozen sites. This module runs the
whole model while every block has the random parameters and the frozen outputs of that copy. A block is confirmed if it
adds to its stream what the copy added. This module also adds a random number to each element of the stream, before the
first block and after every block. If a block reads the stream past its sites, for example as an earlier stream that the
model keeps in an attribute, these random numbers change what the block adds, and the block is not confirmed.

The forward takes as long as one run of each block. It also shows whether the model passes the stream unchanged from
block to block. If a block is not confirmed, the probe examines it separately. If the stream is not, then
:func:`olmo_lns.whole_model.stream.require_residual_stream` examines the stream.

In eval mode the blocks run in the dtypes of the model, because a block may compute something else there than in fp32. A
block in half precision is compared with a copy in the same dtypes, up to their rounding. For such a block the random
numbers replace the stream, since a stream that grows from block to block would round away what a block adds. In
training mode all blocks run in fp32, and the comparison is as fine as in a model in fp32.
"""

from __future__ import annotations

import functools
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Callable, Iterable, Iterator, Mapping, Sequence

import torch
from torch import nn

from olmo_lns import probe
from olmo_lns.whole_model.stream import is_same
from olmo_lns.whole_model.trace import Trace, replace_stream


@dataclass
class Confirmation:
    """The result of one forward of the model in which blocks were confirmed.

    :param blocks: the blocks that computed what the probed block of their structure computed.
    :param is_residual_stream: true if ``blocks`` contains all blocks, and each block read what the block before it
        returned.
    :param order: the blocks in the order in which they ran.
    :param changed: pairs of blocks that ran one after the other, if the second did not read the tensor that the first
        returned.
    :param norm_runs: site -> how often it ran.
    """

    blocks: set[nn.Module] = field(default_factory=set)
    is_residual_stream: bool = False
    order: list[nn.Module] = field(default_factory=list)
    changed: list[tuple[nn.Module, nn.Module]] = field(default_factory=list)
    norm_runs: dict[nn.Module, int] = field(default_factory=dict)


#: The dtypes of models whose blocks can be confirmed.
_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def can_confirm(blocks: Sequence[nn.Module], replays: Mapping[nn.Module, probe.Replay], trace: Trace) -> bool:
    """Return true if the blocks can run in the model as the probe ran them, and if they return the stream.

    torch's autograd must not refer to a parameter that is not in fp32. If its dtype changes, even for a moment, torch
    drops the node that accumulates its gradient, and with it the hooks of DistributedDataParallel on this node.
    """
    parameters = [parameter for block in blocks for parameter in block.parameters()]
    return (
        len(blocks) == len(replays) > 0
        and all(replay.dtype == torch.float32 and replay.returns_stream for replay in replays.values())
        and all((call := trace.calls.get(block)) is not None and not call.returns_change for block in blocks)
        and not any(isinstance(part, torch.jit.ScriptModule) for block in blocks for part in block.modules())
        and all(type(p.data) is torch.Tensor and p.dtype in _DTYPES for p in parameters)
        and all(p.dtype == torch.float32 or _is_referred_to_once(p) for p in parameters)
    )


def _is_referred_to_once(parameter: nn.Parameter) -> bool:
    """Return true if only Python refers to a parameter. If this cannot be known, return false."""
    count = getattr(parameter, "_use_count", None)  # a private method of torch since 2.3
    return count is not None and count() == 1


@contextmanager
def confirming(
    blocks: Sequence[nn.Module],
    replays: Mapping[nn.Module, probe.Replay],
    trace: Trace,
    *,
    trains: bool,
    in_dtype_of_model: bool,
) -> Iterator[Confirmation]:
    """Let each block run as the probed copy of its structure did, in one forward of the model in this context.

    :param replays: block -> the probed block of its structure.
    :param trains: true to compare with the probed copies in training mode with gradients, false to compare with them in
        eval mode without gradients. The caller must set this mode in the model before.
    :param in_dtype_of_model: true to run the blocks in the dtypes of their parameters, false to run them in fp32.
    :returns: the confirmation, which is complete when the context ends.
    """
    generator = torch.Generator().manual_seed(9)
    confirmation = Confirmation()
    calls = {block: call for block in blocks if (call := trace.calls[block]) is not None}
    before: dict[nn.Module, torch.Tensor] = {}  # block -> the stream before it
    inputs: dict[nn.Module, dict[str, torch.Tensor]] = {block: {} for block in blocks}
    last: list[torch.Tensor] = []  # what the last block returned; the model has a copy, which it may change in place
    order = confirmation.order
    returned: set[nn.Module] = set()
    # The dtype of the stream of each block, and those of its parameters.
    dtypes = {block: (calls[block].stream.dtype, *(p.dtype for p in block.parameters())) for block in calls}
    in_half: dict[Any, probe.Result | None] = {}  # structure with its dtypes -> the result of a copy with these dtypes

    def moved(block: nn.Module, stream: torch.Tensor) -> torch.Tensor:
        noise = torch.randn(stream.shape, generator=generator, device="cpu").to(stream)
        return noise if _is_half(dtypes[block]) else stream.detach() + noise

    def run_block(block: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        replay, call = replays[block], calls[block]
        stream = call.stream_among(args, kwargs)
        if last and not is_same(last.pop(), stream):
            confirmation.changed.append((order[-1], block))
        order.append(block)
        before[block] = stream.detach().clone() if returned else moved(block, stream)
        probe.seed_generators(stream.device, replay.call.seed)
        with torch.set_grad_enabled(trains):
            x = before[block].clone().requires_grad_(trains).clone()  # no leaf, since the block may change it in place
            args, kwargs = call.with_stream(args, kwargs, x)
            if not in_dtype_of_model and set(dtypes[block]) != {torch.float32}:
                # A block may write to a list or a dict, so it gets the model's own. It may fail on their dtype.
                args = tuple(probe.converted(each, torch.float32, is_kept=_is_container) for each in args)
                kwargs = {k: probe.converted(each, torch.float32, is_kept=_is_container) for k, each in kwargs.items()}
            output = forward(*args, **kwargs)
        if (after := probe.stream_of(output)) is None:
            return output
        delta = after.detach().double() - before[block].double()
        read = inputs.pop(block)
        found = [read[name] for name in replay.site_names if name in read]
        if is_confirmed(block, (delta, found)):
            confirmation.blocks.add(block)
        returned.add(block)
        last.append(moved(block, after.to(trace.outputs[block].dtype)))
        return replace_stream(output, last[-1].clone())

    def is_confirmed(block: nn.Module, result: probe.Result) -> bool:
        if (key := (replays[block], dtypes[block])) not in in_half:
            return replays[block].computes(result, trains=trains)
        expected = in_half[key]
        return expected is not None and replays[block].is_same_result(result, expected, _rounding_in(dtypes[block]))

    def run_norm(block: nn.Module, name: str, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        output, norm = forward(*args, **kwargs), block.get_submodule(name)
        confirmation.norm_runs[norm] = confirmation.norm_runs.get(norm, 0) + 1
        if block not in before or block not in inputs:  # another module runs the norm
            return output
        return replays[block].frozen_output(name, before[block], inputs[block], args, kwargs, output)

    parameters_as = functools.cache(probe.Replay.parameters_as)  # blocks with one structure share one set of parameters
    with ExitStack() as stack:
        for block in blocks:
            replay, key = replays[block], (replays[block], dtypes[block])
            wanted = dtypes[block][1:] if in_dtype_of_model else (torch.float32,) * (len(dtypes[block]) - 1)
            stack.enter_context(replay.parameters_in(block, parameters_as(replay, wanted)))
            if in_dtype_of_model and _is_half(dtypes[block]) and key not in in_half:
                in_half[key] = replay.result_of(block, calls[block])
        for block in blocks:
            stack.enter_context(_running(block, functools.partial(run_block, block)))
            for name in replays[block].site_names:
                stack.enter_context(_running(block.get_submodule(name), functools.partial(run_norm, block, name)))
        yield confirmation
    is_whole = order == list(blocks) and len(returned) == len(confirmation.blocks) == len(blocks)
    confirmation.is_residual_stream = is_whole and not confirmation.changed


def _rounding_in(dtypes: Iterable[torch.dtype]) -> float:
    """Return by which part of its size a number may be rounded in the coarsest of these dtypes."""
    return max(torch.finfo(dtype).eps / 2 for dtype in dtypes)


def _is_half(dtypes: Iterable[torch.dtype]) -> bool:
    return _rounding_in(dtypes) > probe.SAME


def _is_container(value: Any) -> bool:
    return isinstance(value, (list, dict))


@contextmanager
def _running(module: nn.Module, run: Callable[..., Any]) -> Iterator[None]:
    """Let ``run`` compute what a module returns while the context runs. It receives the module's forward and arguments.

    The forward of the instance is replaced. A hook would switch off the fused kernels that read the weights of a norm
    and do not call it. Without a hook, such a kernel runs here too, and its block is not confirmed.
    """
    own, forward = vars(module).get("forward"), module.forward

    @functools.wraps(forward)
    def replaced(*args: Any, **kwargs: Any) -> Any:
        return run(forward, args, kwargs)

    vars(module)["forward"] = replaced  # some classes refuse an assignment
    try:
        yield
    finally:
        vars(module).pop("forward", None)  # a model may have removed it
        if own is not None:
            vars(module)["forward"] = own
