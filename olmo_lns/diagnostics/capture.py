"""Run a model on batches, observe its blocks, and compute its next-token loss.

An observer receives the *raw* input and output of a block. transformers' ``hidden_states[-1]`` cannot be used instead,
because it is the output of the final norm. This norm hides the growth that LayerNorm Scaling removes.
"""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Callable, Container, Iterable, Iterator, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import nn

from olmo_lns import probe
from olmo_lns.errors import LNSError
from olmo_lns.frameworks import framework_of
from olmo_lns.integrations import any_model
from olmo_lns.temporary_values import replaced_attribute
from olmo_lns.whole_model import blocks
from olmo_lns.whole_model.trace import call_of

#: Token ids of shape (batch, sequence), alone or with an ``attention_mask`` of the same shape (1 = real token).
Batch = torch.Tensor | Mapping[str, torch.Tensor]
Batches = Iterable[Batch]


def find_blocks(model: nn.Module, path: str | None = None) -> list[nn.Module]:
    """Return the blocks of ``model`` in order, as :func:`olmo_lns.apply` finds them, by one forward on eight tokens.

    :param path: dotted name of the list of blocks. Its elements are returned, and the model does not run.
    :raises LNSError: if the model has no such list, or several.

    Example: ``find_blocks(model)`` is ``list(model.model.layers)`` for a Llama of transformers.
    """
    try:
        if path is not None:
            return list(model.get_submodule(path).children())
        with any_model.undisturbed(model):
            return blocks.find_blocks(model, any_model.forward(model)).blocks
    except (LNSError, AttributeError) as error:
        raise LNSError(
            f"The blocks were not found. {error} For a diagnostic, name the list of blocks with --blocks."
        ) from error


@dataclass(frozen=True)
class BlockCall:
    """One call of a block. :param call: its arguments. :param returned: its result, often a tuple."""

    call: probe.Call
    returned: Any

    @property
    def input(self) -> torch.Tensor:
        """The hidden state among the arguments."""
        return self.call.stream

    @property
    def output(self) -> torch.Tensor:
        """The hidden state in the result."""
        hidden = probe.stream_of(self.returned)
        assert hidden is not None, "a call has the place of a stream of the output's shape"
        return hidden


#: Function of a block's 0-based index and its call. A result other than None replaces the block's result.
Observer = Callable[[int, BlockCall], Any]


@contextmanager
def observe(blocks: Sequence[nn.Module], observer: Observer) -> Iterator[None]:
    """Call ``observer`` after every call of every block while the context is open.

    No hook is used for this, but the call of the block is replaced. A block that was compiled in place, as by
    ``block.compile()`` in OLMo, runs its hooks inside the compiled graph, which ignores hooks that are added later.
    """
    with ExitStack() as stack:
        for index, block in enumerate(blocks):
            # nn.Module.__call__ runs this attribute, if it is set, instead of the module.
            stack.enter_context(replaced_attribute(block, "_compiled_call_impl", _observed(block, index, observer)))
        yield


def _observed(block: nn.Module, index: int, observer: Observer) -> Callable[..., Any]:
    run = block._compiled_call_impl or block._call_impl

    def call(*args: Any, **kwargs: Any) -> Any:
        returned = run(*args, **kwargs)
        if (found := call_of(args, kwargs, returned)) is None:
            raise LNSError(
                f"{type(block).__name__} takes {len(args)} arguments and {sorted(kwargs)}, and returns a "
                f"{type(returned).__name__}. Expected a transformer block, which takes a hidden state and returns one "
                "of the same shape. Pass the path of the list of transformer blocks with --blocks."
            )
        replacement = observer(index, BlockCall(found, returned))
        return returned if replacement is None else replacement

    return call


def run_model(model: nn.Module, ids: torch.Tensor, mask: torch.Tensor, *, logits: bool) -> Any:
    """Run all blocks of ``model`` and return its logits.

    The model receives the mask only if a token is masked.

    :param logits: False skips the head where the model allows it, and returns any output.
    :raises LNSError: if the model returns no logits, or if a token is masked and the model is one of OLMo-core, which
        accepts no mask.
    """
    target: Any = model
    options: dict[str, Any] = {} if bool(mask.all()) else {"attention_mask": mask}
    if isinstance(getattr(model, "blocks", None), nn.ModuleDict) and hasattr(model, "lm_head"):  # OLMo-core
        if options:
            raise LNSError(
                "The sequences have different lengths. OLMo-core's models accept no attention mask. Pass sequences of "
                "one length."
            )
        options |= {} if logits else {"logits_to_keep": 1}
    elif framework_of(model) == "olmo":
        options |= {} if logits else {"last_logits_only": True}
    elif hasattr(model, "base_model"):  # transformers
        target = model if logits else model.base_model
        options["use_cache"] = False
    output = target(ids, **options)
    result = getattr(output, "logits", output)
    if logits and not isinstance(result, torch.Tensor):
        raise LNSError(
            f"{type(model).__name__} returns no logits. This diagnostic needs a loss. Open the model with its "
            "language-model head."
        )
    return result


def evaluation_batches(
    model: nn.Module, batches: Batches, device: torch.device | str
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield the ids and the bool mask of real tokens of each batch, with ``model`` in evaluation mode.

    The mode of each module is restored at the end.

    :raises LNSError: if there is no batch, or no batch has a token.
    """
    training = [module for module in model.modules() if module.training]
    model.eval()
    tokens = 0
    try:
        for batch in batches:
            fields = {"input_ids": batch} if isinstance(batch, torch.Tensor) else batch
            ids = fields["input_ids"].to(device)
            mask = fields.get("attention_mask")
            mask = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.to(device).bool()
            tokens += int(mask.sum())
            yield ids, mask
    finally:
        for module in training:
            module.training = True
    if tokens == 0:
        raise LNSError("The data have no tokens. Pass a file or a data set with at least one sequence.")


@torch.no_grad()
def run_observed(
    model: nn.Module, blocks: Sequence[nn.Module], batches: Batches, device: torch.device | str
) -> Iterator[tuple[list[BlockCall], torch.Tensor]]:
    """Run the blocks on each batch. Yield the call of each block, and the mask of real tokens (batch, sequence).

    :raises LNSError: if a block did not run, or the batches have no token.
    """
    for ids, mask in evaluation_batches(model, batches, device):
        calls: dict[int, BlockCall] = {}

        def note(block: int, call: BlockCall, calls: dict[int, BlockCall] = calls) -> None:
            require_first_run(block, calls)
            calls[block] = call

        with observe(blocks, note):
            run_model(model, ids, mask, logits=False)
        require_all_ran(calls, len(blocks))
        yield [calls[index] for index in range(len(blocks))], mask


def require_first_run(index: int, indices: Container[int]) -> None:
    """Check that a block runs once.

    :param indices: 0-based numbers of the blocks that ran.
    :raises LNSError: if the block runs a second time.
    """
    if index in indices:
        raise LNSError(
            f"Block {index + 1} ran twice in one forward pass. Diagnostics do not support models that repeat a block. "
            "Use a model that runs each block once."
        )


def require_all_ran(indices: Container[int], count: int) -> None:
    """Check that every block ran.

    :param indices: 0-based numbers of the blocks that ran.
    :raises LNSError: if a block did not run. The message names all of them.
    """
    if missing := [str(index + 1) for index in range(count) if index not in indices]:
        raise LNSError(
            f"Block {', '.join(missing)} did not run on these data. Every block must run. Pass data that all blocks "
            "read."
        )


def require_finite(losses: torch.Tensor) -> None:
    """Check the losses of the whole model.

    :raises LNSError: if a loss is NaN or infinite.
    """
    if not bool(torch.isfinite(losses).all()):
        raise LNSError(
            "The loss is not finite. Check the checkpoint and the dtype. `olmo-lns analyze variance` names the blocks "
            "whose outputs are not finite."
        )


def sequence_losses(model: nn.Module, ids: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the summed next-token loss of each sequence in nats, and its number of predicted tokens.

    :raises LNSError: if the model predicts masked tokens, as BERT does.
    """
    if type(model).__name__.endswith("MaskedLM"):
        raise LNSError(
            f"{type(model).__name__} predicts masked tokens. This diagnostic needs a next-token loss. Use a causal "
            "language model."
        )
    logits = run_model(model, ids, mask, logits=True)
    has_target = mask[:, 1:] & mask[:, :-1]
    # One sequence at a time, since float32 logits of a whole batch can be larger than the model.
    losses = [
        F.cross_entropy(sequence_logits[:-1][selected].float(), tokens[1:][selected], reduction="sum")
        for sequence_logits, tokens, selected in zip(logits, ids, has_target, strict=True)
    ]
    return torch.stack(losses), has_target.sum(1)
