"""Check that one residual stream goes through all blocks of a model.

Both functions run the model again and change outputs of its blocks. The change must arrive at the later blocks, because
each of them reads the stream that the earlier blocks wrote.

* :func:`require_one_stream` needs to know the blocks only. It refuses a model in which the change does not arrive,
  since its blocks then belong to two towers, and a model that normalizes the stream between two blocks.
* :func:`require_residual_stream` also needs to know the sites. It freezes them and adds random numbers to the stream.
  If the model runs ``x = block(x)`` for each block, these numbers arrive unchanged after the last block. If the model
  runs ``x = norm(block(x))``, they do not.
"""

from __future__ import annotations

from typing import Any, Callable, Iterable, Sequence

import torch
from torch import nn

from olmo_lns import probe
from olmo_lns.errors import LNSConfigError
from olmo_lns.response import first_output, replace_first
from olmo_lns.whole_model.names import norms_example
from olmo_lns.whole_model.trace import Trace, replace_stream

_SINGLE = (torch.float32, torch.float64)
#: The model normalizes the stream between two blocks if the second block reads almost the same tensor after the first
#: block's output was multiplied by four, but another tensor after the first block returned other numbers. "Almost the
#: same" means a relative difference below this value.
_NORMALIZED = 0.05
#: Two changes of a stream are the same if their relative difference is below this value.
_SAME_CHANGE = 0.01


def tolerance_of_proportion(dtype: torch.dtype) -> float:
    """Return a relative tolerance: a change counts as twice another change if it differs from that by less.

    :param dtype: the dtype of the stream, whose rounding the tolerance has to cover.
    """
    return 0.02 if dtype in _SINGLE else 0.1


def require_one_stream(
    model: nn.Module, blocks: Sequence[nn.Module], trace: Trace, source: str, run: Callable[[], Any]
) -> None:
    """Check that each block gets its stream from the block before it.

    The trace shows whether each block reads the very tensor that the block before it returned. If not, the function
    runs the model again with changed outputs of the blocks.

    :raises LNSConfigError: if the input of a block does not depend on the first block, as in a model with two streams,
        or does not depend on the size of the previous block's output, as after a norm.
    """
    calls = [trace.calls[block] for block in blocks]
    pairs = zip(blocks, calls[1:], strict=False)
    if all(call is not None and is_same(trace.outputs[block], call.stream) for block, call in pairs):
        return

    def inputs(changed: Sequence[nn.Module], change: Callable[[torch.Tensor], torch.Tensor]) -> dict[Any, torch.Tensor]:
        """Return the stream before each block while the outputs of the blocks in ``changed`` are changed."""
        streams: dict[Any, torch.Tensor] = {}

        def replace(module: nn.Module, args: Any, output: Any) -> Any:
            return replace_stream(output, change(probe.stream_of(output)))  # type: ignore[arg-type]

        def note(module: nn.Module, args: Any, kwargs: Any) -> None:
            place = trace.calls[module].place  # type: ignore[union-attr]
            streams[module] = args[place] if isinstance(place, int) else kwargs[place]

        hooks = [block.register_forward_hook(replace) for block in changed]
        hooks += [block.register_forward_pre_hook(note, with_kwargs=True) for block in blocks[1:]]
        with probe.hooks(hooks), torch.no_grad():
            run()
        return streams

    streams = inputs(blocks[:1], lambda y: 2.0 * y.roll(1, -1))
    for number, (block, call) in enumerate(zip(blocks[1:], calls[1:], strict=True), start=2):
        if call is None or block not in streams or streams[block].shape != call.stream.shape:
            continue
        # What joins the stream between given blocks, as text after images, comes from another one.
        joined = source == "blocks=" and trace.outputs[blocks[number - 2]].shape != call.stream.shape
        depends = streams[block] != call.stream
        if not bool(depends.any()) or (joined and not bool(depends.any(-1).all())):
            raise LNSConfigError(
                f"{type(model).__name__}: the blocks in {source} have two streams: the input of block {number}, or a "
                "part of it, does not depend on block 1. LayerNorm Scaling expects one stream through all blocks. "
                f"Pass the blocks or the norms of one stream: {norms_example(model, trace)}."
            )
    # Between stages of other widths, as in Swin, the stream may be normalized.
    between = [
        number
        for number, (before, block, call) in enumerate(zip(blocks, blocks[1:], calls[1:], strict=False), start=1)
        if call is not None
        and trace.outputs[before].shape == call.stream.shape
        and not is_same(trace.outputs[before], call.stream)
    ]
    if not between:
        return

    def fixed(size: float, seed: int) -> Callable[[torch.Tensor], torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        return lambda y: size * torch.randn(y.shape, generator=generator, device="cpu").to(y)

    try:
        small, large, other = (inputs(blocks, fixed(*each)) for each in ((64.0, 6), (256.0, 6), (64.0, 7)))
    except LNSConfigError:  # the model does not run on other values
        return
    for number in between:
        block = blocks[number]
        if block in small and block in large and block in other:
            size = float(small[block].norm())
            differences = [float((each[block] - small[block]).norm()) for each in (large, other)]
            if differences[0] < _NORMALIZED * size < differences[1]:
                raise LNSConfigError(
                    f"{type(model).__name__}: the stream is normalized between the blocks {number} and {number + 1} in "
                    f"{source}. LayerNorm Scaling expects a residual stream that grows through all blocks. If you want "
                    f"the factors in this model anyway, pass its norms: {norms_example(model, trace)}."
                )


def require_residual_stream(
    model: nn.Module,
    blocks: Sequence[nn.Module],
    norms: Iterable[nn.Module],
    trace: Trace,
    run: Callable[[], Any],
    *,
    in_training: bool = False,
) -> None:
    """Check that the whole model reads its stream through these norms only.

    The function freezes the outputs of the norms and runs the model twice. In the second run it adds random numbers to
    the input of the first block and to the output of each block. These numbers must pass unchanged through all later
    blocks. Between two blocks the model may apply a linear function to the stream, or begin a stage of another width.

    :param in_training: true if the model is in training mode. Only the blocks are checked then, and not what the model
        does between them.
    :raises LNSConfigError: if the numbers are changed. The message names the block, or the two blocks between which
        the model reads its stream without a norm.
    """
    frozen: dict[nn.Module, torch.Tensor] = {}
    added: dict[Any, torch.Tensor] = {}
    generator = torch.Generator().manual_seed(9)
    numbers = {block: number for number, block in enumerate(blocks)}
    # Where the model adds what a block returns, only outputs are changed.
    calls = {block: call for block in blocks if (call := trace.calls[block]) is not None}
    returns_change = all(block in calls and calls[block].returns_change for block in blocks)

    def drawn(table: dict[Any, torch.Tensor], key: Any, like: torch.Tensor) -> torch.Tensor:
        if key not in table:
            table[key] = torch.randn(like.shape, generator=generator, device="cpu").to(like)
        return table[key]

    def freeze(norm: nn.Module, args: Any, output: Any) -> Any:
        return replace_first(output, drawn(frozen, norm, first_output(output)).clone())

    def forward(size: float, only: int | None = None) -> tuple[dict[int, torch.Tensor], dict[int, torch.Tensor]]:
        """Return the streams before the blocks and the streams after them.

        :param only: the number of the one block whose output is changed.
        """
        before: dict[int, torch.Tensor] = {}
        after: dict[int, torch.Tensor] = {}

        def enter(block: nn.Module, args: Any, kwargs: Any) -> Any:
            number = numbers[block]
            stream = calls[block].stream_among(args, kwargs)
            before[number] = stream.detach().clone()  # the block may change it in place
            if number > 0 or returns_change or only is not None:
                return None
            return calls[block].with_stream(args, kwargs, stream + size * drawn(added, "input", stream))

        def leave(block: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
            stream, number = probe.stream_of(output), numbers[block]
            if stream is None:
                return output
            after[number] = stream.detach()
            change = drawn(added, number, stream)
            return replace_stream(output, stream + size * change) if only in (None, number) else output

        handles = [block.register_forward_pre_hook(enter, with_kwargs=True) for block in blocks]
        handles += [block.register_forward_hook(leave, with_kwargs=True) for block in blocks]
        handles += [norm.register_forward_hook(freeze) for norm in norms]
        with probe.hooks(handles), torch.no_grad():
            run()
        return before, after

    norms = list(norms)
    (before, after), (moved_before, moved_after) = forward(0.0), forward(1.0)
    ran = [*range(len(blocks))]
    if in_training:  # the model may drop blocks, or run some on a part of the batch
        both = (before, moved_before), (after, moved_after)
        ran = [n for n in ran if all(n in a and n in b and a[n].shape == b[n].shape for a, b in both)]
    if not ran:
        return
    difference = {number: moved_before[number].double() - before[number].double() for number in ran}
    expected = added["input"].double() if "input" in added else difference[ran[0]]
    places = []
    for number in ran:
        if number > 0:
            if not _is_moved_by(expected, before[number], moved_before[number], dtype=before[number].dtype):
                places.append(number)
            expected = difference[number]
        streams = after[number], moved_after[number]
        if returns_change:
            streams = before[number].double() + streams[0], moved_before[number].double() + streams[1]
        if not _is_moved_by(expected, *streams, dtype=after[number].dtype):
            raise LNSConfigError(
                f"{type(model).__name__}: {'in training mode ' if in_training else ''}block {number + 1} reads the "
                "model's stream past its norms, for example through an argument that the model computes from the "
                "stream. LayerNorm Scaling expects that the branches read the stream through the norms only. This "
                "model is not supported."
            )
        expected = expected + added[number].double()
    if in_training:
        return
    for place in places:
        if before[place].shape != after[place - 1].shape:  # another stage
            continue
        # The output of the block in front alone: it has to move this block, and in proportion.
        once, twice = (forward(size, place - 1)[0][place].double() - before[place].double() for size in (1.0, 2.0))
        if float((twice - 2 * once).norm()) < tolerance_of_proportion(before[place].dtype) * float(twice.norm()):
            continue
        raise LNSConfigError(
            f"{type(model).__name__}: between the blocks {place} and {place + 1} the model changes its stream by "
            "something else than an addition. LayerNorm Scaling expects a residual stream that goes through all "
            "blocks, one after the other. If you want the factors in this model anyway, pass its norms: "
            f"{norms_example(model, trace)}."
        )


def _is_moved_by(expected: torch.Tensor, stream: torch.Tensor, moved: torch.Tensor, *, dtype: torch.dtype) -> bool:
    """Return true if a stream changed by the expected amount, up to the rounding of the dtype of the model's stream."""
    if expected.shape != stream.shape:
        return False
    rounding = 1e-5 if dtype in _SINGLE else 0.03
    difference = float((moved.double() - stream.double() - expected).norm())
    return difference < _SAME_CHANGE * float(expected.norm()) + rounding * float(stream.double().norm())


def is_same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a is b or (a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b))
