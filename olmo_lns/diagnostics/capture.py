"""Watching the residual stream: hooks on blocks that also work on compiled ones.

What is watched are the *raw* inputs and outputs of the blocks. Hugging Face's
``hidden_states[-1]`` is not the last block's output but what the final norm made of it, which
hides the very growth that LayerNorm Scaling is about.
"""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from typing import Any, Callable, Iterable, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn

from olmo_lns.errors import LNSError

__all__ = [
    "Batch",
    "Batches",
    "accumulator_dtype",
    "evaluating",
    "first_tensor",
    "group_device",
    "images",
    "not_finite",
    "observe",
    "run",
    "unpack",
]

#: Token ids of shape (batch, sequence), alone or with an ``attention_mask`` of the same shape (1 = real token).
#: Of a vision-language model also with what its processor made of the images.
Batch = torch.Tensor | Mapping[str, torch.Tensor]
Batches = Iterable[Batch]
#: Called with the 0-based block and its hidden state of shape (batch, sequence, d_model).
Observer = Callable[[int, torch.Tensor], None]


def first_tensor(output: Any) -> torch.Tensor:
    """The hidden state in a block's output: the output itself, or the first element of a tuple."""
    hidden = output[0] if isinstance(output, (tuple, list)) and output else output
    if not isinstance(hidden, torch.Tensor):
        raise LNSError(
            f"a block returned {type(output).__name__}, expected a tensor or a tuple that starts with one; "
            "name the list of transformer blocks with --blocks"
        )
    return hidden


def block_input(args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.Tensor:
    """The hidden state among a block's call arguments: the first positional one, or by its usual name."""
    for candidate in (*args[:1], kwargs.get("hidden_states"), kwargs.get("x")):
        if isinstance(candidate, torch.Tensor):
            return candidate
    raise LNSError(
        f"a block was called without a hidden state: found arguments {sorted(kwargs)}, expected it first "
        "or as hidden_states; name the list of transformer blocks with --blocks"
    )


@contextmanager
def observe(
    blocks: Sequence[nn.Module], *, on_input: Observer | None = None, on_output: Observer | None = None
) -> Iterator[None]:
    """Call the observers for every call of every block while the context is open.

    A module compiled in place (``block.compile()``, as OLMo does) runs its hooks inside the
    compiled graph, where a hook added later is not seen; there the compiled call is wrapped from
    the outside instead, so nothing is recompiled and the graph has no new break.
    """
    with ExitStack() as stack:
        for index, block in enumerate(blocks):
            stack.enter_context(_observe_one(block, index, on_input, on_output))
        yield


@contextmanager
def _observe_one(block: nn.Module, index: int, on_input: Observer | None, on_output: Observer | None) -> Iterator[None]:
    def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if on_input is not None:
            on_input(index, block_input(args, kwargs))

    def after(_: nn.Module, __: Any, output: Any) -> None:
        if on_output is not None:
            on_output(index, first_tensor(output))

    compiled: Callable[..., Any] | None = getattr(block, "_compiled_call_impl", None)
    if compiled is None:
        handles = [block.register_forward_pre_hook(before, with_kwargs=True), block.register_forward_hook(after)]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
        return

    def call(*args: Any, **kwargs: Any) -> Any:
        before(block, args, kwargs)
        output = compiled(*args, **kwargs)
        after(block, args, output)
        return output

    # An instance attribute that nn.Module.__call__ reads; __dict__, because Module would not let us set it twice.
    block.__dict__["_compiled_call_impl"] = call
    try:
        yield
    finally:
        block.__dict__["_compiled_call_impl"] = compiled


def accumulator_dtype(device: torch.device) -> torch.dtype:
    """float64 for sums over tokens, float32 on MPS, which has no float64."""
    return torch.float32 if device.type == "mps" else torch.float64


def group_device(group: dist.ProcessGroup | None = None) -> torch.device:
    """Where tensors have to be for the collectives of ``group``."""
    nccl = dist.get_backend(group) == "nccl"
    return torch.device("cuda", torch.cuda.current_device()) if nccl else torch.device("cpu")


def not_finite(where: str) -> LNSError:
    """The error for NaN or infinity in ``where``."""
    return LNSError(
        f"{where} holds NaN or infinity: expected finite activations; check the checkpoint and the dtype "
        "(fp16 overflows where bf16 and fp32 do not)"
    )


def unpack(batch: Batch, device: torch.device | str) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Token ids and the mask of real tokens as bool, or None when every token is real."""
    if isinstance(batch, torch.Tensor):
        return batch.to(device), None
    ids, mask = batch["input_ids"].to(device), batch.get("attention_mask")
    if mask is None or bool(mask.bool().all()):
        return ids, None
    return ids, mask.to(device).bool()


def images(batch: Batch, device: torch.device | str) -> dict[str, torch.Tensor]:
    """What a batch holds beside ids and mask: the inputs that a vision-language model makes of images."""
    if isinstance(batch, torch.Tensor):
        return {}
    return {name: value.to(device) for name, value in batch.items() if name not in ("input_ids", "attention_mask")}


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """``model.eval()`` inside, each module's own mode again afterwards."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


@torch.no_grad()
def run(
    model: nn.Module,
    batches: Batches,
    device: torch.device | str,
    forward: Callable[..., Any],
    *,
    may_be_empty: bool = False,
    with_images: bool = False,
) -> Iterator[tuple[torch.Tensor, torch.Tensor | None]]:
    """Run ``forward`` on every batch and yield its ids and mask afterwards.

    :param may_be_empty: no error without tokens: one rank of several may have got none.
    :param with_images: ``forward`` also takes the :func:`images` of a batch, by keyword.
    :raises LNSError: there was no batch, or none held a token.
    """
    tokens = 0
    with evaluating(model):
        for batch in batches:
            ids, mask = unpack(batch, device)
            forward(ids, mask, **(images(batch, device) if with_images else {}))
            tokens += ids.numel() if mask is None else int(mask.sum())
            yield ids, mask
    if tokens == 0 and not may_be_empty:
        raise LNSError("the data holds no token: give a file or data set with at least one sequence")
