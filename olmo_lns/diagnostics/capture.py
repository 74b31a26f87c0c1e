"""Shared parts of the diagnostics: batches, hooks on blocks (also compiled), the loss.

The hooks see the *raw* inputs and outputs of the blocks. Hugging Face's ``hidden_states[-1]`` is the final norm's
output, not the last block's, and hides the growth that LayerNorm Scaling removes.
"""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from typing import Any, Callable, Iterable, Iterator, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import nn

from olmo_lns.diagnostics.structure import forward_of
from olmo_lns.errors import LNSError

#: Token ids of shape (batch, sequence), alone or with an ``attention_mask`` of the same shape (1 = real token).
Batch = torch.Tensor | Mapping[str, torch.Tensor]
Batches = Iterable[Batch]
#: Called with the 0-based block, the arguments of its call, and its output.
Observer = Callable[[int, tuple[Any, ...], dict[str, Any], Any], None]
#: An :data:`Observer` that also takes the batch's mask of real tokens.
MaskedObserver = Callable[[int, tuple[Any, ...], dict[str, Any], Any, torch.Tensor | None], None]
#: Ids and mask -> negative log-likelihood in nats (batch, positions), float32, and which positions count.
TokenLoss = Callable[[torch.Tensor, torch.Tensor | None], tuple[torch.Tensor, torch.Tensor]]


def first_tensor(output: Any) -> torch.Tensor:
    """Return the hidden state in a block's output: the output itself, or the first element of a tuple."""
    hidden = output[0] if isinstance(output, (tuple, list)) and output else output
    if not isinstance(hidden, torch.Tensor):
        raise LNSError(
            f"a block returned {type(output).__name__}, expected a tensor or a tuple that starts with one; "
            "name the list of transformer blocks with --blocks"
        )
    return hidden


def block_input(args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.Tensor:
    """Return the hidden state among a block's arguments: the first positional one, or by its usual name."""
    for candidate in (*args[:1], kwargs.get("hidden_states"), kwargs.get("x")):
        if isinstance(candidate, torch.Tensor):
            return candidate
    raise LNSError(
        f"a block was called without a hidden state: found arguments {sorted(kwargs)}, expected a positional one "
        "or as hidden_states; name the list of transformer blocks with --blocks"
    )


@contextmanager
def observe(blocks: Sequence[nn.Module], seen: Observer) -> Iterator[None]:
    """Call ``seen`` after every call of every block while the context is open.

    A module that is compiled in place (``block.compile()``, as in OLMo) runs its hooks inside the compiled graph, which
    ignores a later hook. For such a module the compiled call is wrapped from outside, without recompilation.
    """
    with ExitStack() as stack:
        for index, block in enumerate(blocks):
            _observe_one(stack, block, index, seen)
        yield


def _observe_one(stack: ExitStack, block: nn.Module, index: int, seen: Observer) -> None:
    compiled: Callable[..., Any] | None = getattr(block, "_compiled_call_impl", None)
    if compiled is None:
        hook = block.register_forward_hook(
            lambda _, args, kwargs, out: seen(index, args, kwargs, out), with_kwargs=True
        )
        stack.callback(hook.remove)
        return

    def call(*args: Any, **kwargs: Any) -> Any:
        output = compiled(*args, **kwargs)
        seen(index, args, kwargs, output)
        return output

    # nn.Module.__call__ reads this instance attribute. Module.__setattr__ refuses a second assignment.
    block.__dict__["_compiled_call_impl"] = call
    stack.callback(block.__dict__.__setitem__, "_compiled_call_impl", compiled)


def not_finite(where: str) -> LNSError:
    """Return the error for NaN or infinity in ``where``."""
    return LNSError(
        f"{where} holds NaN or infinity, expected finite activations: check the checkpoint and the dtype "
        "(fp16 overflows earlier than bf16 and fp32)"
    )


def unpack(batch: Batch, device: torch.device | str) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the token ids and the bool mask of real tokens (None: every token is real)."""
    ids, mask = (batch, None) if isinstance(batch, torch.Tensor) else (batch["input_ids"], batch.get("attention_mask"))
    real = None if mask is None or bool(mask.bool().all()) else mask.to(device).bool()
    return ids.to(device), real


def real_tokens(ids: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """Return the bool mask of real tokens, in the shape of ``ids``."""
    return torch.ones_like(ids, dtype=torch.bool) if mask is None else mask


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Switch to ``model.eval()``; restore each module's mode afterwards."""
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
) -> Iterator[tuple[torch.Tensor, torch.Tensor | None]]:
    """Run ``forward`` on every batch; yield the ids and the mask after each run.

    :raises LNSError: no batch, or no token in any batch.
    """
    tokens = 0
    with evaluating(model):
        for batch in batches:
            ids, mask = unpack(batch, device)
            forward(ids, mask)
            tokens += ids.numel() if mask is None else int(mask.sum())
            yield ids, mask
    if tokens == 0:
        raise LNSError("the data has no token: give a file or data set with at least one sequence")


def run_observed(
    model: nn.Module, blocks: Sequence[nn.Module], batches: Batches, device: torch.device | str, seen: MaskedObserver
) -> Iterator[tuple[torch.Tensor, torch.Tensor | None]]:
    """Run all blocks on every batch, observed by ``seen``; yield the ids and the mask after each run."""
    forward = forward_of(model, logits=False)

    def watched(ids: torch.Tensor, mask: torch.Tensor | None) -> None:
        with observe(blocks, lambda block, args, kwargs, output: seen(block, args, kwargs, output, mask)):
            forward(ids, mask)

    return run(model, batches, device, watched)


def token_loss(model: nn.Module) -> TokenLoss:
    """Return the next-token loss of a decoder.

    :raises LNSError: an encoder such as BERT, which predicts masked tokens.
    """
    if type(model).__name__.endswith("MaskedLM"):
        raise LNSError(f"{type(model).__name__} predicts masked tokens: this diagnostic needs a next-token loss")
    logits = forward_of(model, logits=True)

    def next_token(ids: torch.Tensor, mask: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        real, pairs = real_tokens(ids, mask), zip(logits(ids, mask)[:, :-1], ids[:, 1:], strict=True)
        # One sequence at a time, since float32 logits of a whole batch can be larger than the model.
        losses = [F.cross_entropy(x.float(), y, reduction="none") for x, y in pairs]
        return torch.stack(losses), real[:, 1:] & real[:, :-1]

    return next_token
