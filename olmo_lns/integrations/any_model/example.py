"""Run a model on the example, and leave no trace of the forward in the model."""

from __future__ import annotations

import sys
from contextlib import contextmanager, nullcontext
from typing import Any, Callable, Iterator, Mapping

import torch
from torch import nn

from olmo_lns import probe, shadow
from olmo_lns.errors import LNSConfigError
from olmo_lns.integrations.any_model.state import SavedState


def forward(model: nn.Module, example: Any = None) -> Callable[[], Any]:
    """Return a function that runs one forward of ``model`` on ``example``.

    :param example: as for :func:`olmo_lns.apply`. By default it is eight random token ids.
    :raises LNSConfigError: if there is no example and the model has no token embedding. The returned function raises it
        if the model does not accept the example.
    """
    if example is None:
        rows = [module.num_embeddings for module in model.modules() if isinstance(module, nn.Embedding)]
        if not rows:
            raise LNSConfigError(
                f"{type(model).__name__} has no token embedding. Pass the input of a forward as example=."
            )
        ids = torch.randint(min(rows), (1, 8), generator=torch.Generator().manual_seed(0), device="cpu")
        example = ids.to(shadow.device_of(model))

    device = shadow.device_of(model)

    def run() -> Any:
        with probe.same_randomness(device):
            return once()

    def once() -> Any:
        try:
            if callable(example) and not torch.is_tensor(example):
                return example(model)
            if isinstance(example, Mapping):
                return model(**example)
            return model(*example) if isinstance(example, (tuple, list)) else model(example)
        except Exception as error:
            raise LNSConfigError(
                f"{type(model).__name__} does not take the example ({type(error).__name__}: {error}). Pass as example= "
                "a tensor, a tuple of arguments, a dict of keywords, or a function of the model that runs its forward."
            ) from error

    return run


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Put the model into eval mode without gradients and compilers, and restore its state afterwards.

    The modes, buffers and attributes of all modules and the states of the random generators are restored
    (:class:`~olmo_lns.integrations.any_model.state.SavedState`). The mode of each module is set directly, since its
    method ``train`` may do more, such as merging adapters.
    """
    training = {module: module.training for module in model.modules()}
    state = SavedState(model)
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() and torch.cuda.is_initialized() else []
    for module in training:
        module.training = False
    try:
        without_autocast = torch.autocast(shadow.device_of(model).type, enabled=False)
        with torch.random.fork_rng(devices), torch.no_grad(), without_autocast, _without_compilers():
            yield
    finally:
        for module, mode in training.items():
            module.training = mode
        state.restore()


def _without_compilers() -> Any:
    """Run compiled functions without their compiled code.

    Dynamo does not check whether hooks were added, so it would run code that it compiled without them.
    """
    compiler = getattr(torch, "compiler", None)
    is_used = "torch._dynamo" in sys.modules and hasattr(compiler, "set_stance")
    return compiler.set_stance("force_eager") if is_used else nullcontext()  # type: ignore[union-attr]
