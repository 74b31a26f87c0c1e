"""Run a model on the example, and leave no trace of the forward in the model."""

from __future__ import annotations

import copy
import sys
from contextlib import contextmanager, nullcontext
from typing import Any, Callable, Iterator, Mapping

import torch
from torch import nn

from olmo_lns import probe, shadow
from olmo_lns.errors import LNSConfigError


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
                f"{type(model).__name__} does not take the example ({type(error).__name__}: {error}). Give example= a "
                "tensor, a tuple of arguments, a dict of keywords, or a function of the model that runs its forward."
            ) from error

    return run


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Put the model into eval mode without gradients and compilers, and restore its state afterwards.

    The modes, buffers and attributes of all modules and the states of the random generators are restored. The mode of
    each module is set directly, since its method ``train`` may do more, such as merging adapters.
    """
    training = {module: module.training for module in model.modules()}
    plain = [module for module in training if not isinstance(module, torch.jit.ScriptModule)]
    attributes = {module: (_members(module), _attributes(module)) for module in plain}
    buffers = [(module, dict(module._buffers)) for module in training]
    values = {
        buffer: buffer.detach().clone()
        for _, owned in buffers
        for buffer in owned.values()
        if buffer is not None and not buffer.is_meta and buffer.layout == torch.strided
    }
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
        for module, (members, saved) in attributes.items():
            if members == _members(module):  # otherwise the forward has built parts of the module
                _restore_attributes(module, saved)
        for module, owned in buffers:
            for name in module._buffers.keys() - owned.keys():
                del module._buffers[name]
            module._buffers.update(owned)
        with torch.no_grad():
            for buffer, value in values.items():
                if buffer.shape == value.shape and not torch.equal(buffer, value):
                    buffer.copy_(value)


def _without_compilers() -> Any:
    """Run compiled functions without their compiled code.

    Dynamo does not check whether hooks were added, so it would run code that it compiled without them.
    """
    compiler = getattr(torch, "compiler", None)
    is_used = "torch._dynamo" in sys.modules and hasattr(compiler, "set_stance")
    return compiler.set_stance("force_eager") if is_used else nullcontext()  # type: ignore[union-attr]


def _members(module: nn.Module) -> tuple[set[str], set[str]]:
    return set(module._modules), set(module._parameters)


#: Attributes of a module that a forward does not use as state, or that are restored in another way. ``_old_forward`` is
#: the forward that accelerate's hooks call.
_KEPT = ("_parameters", "_modules", "_buffers", "training", "forward", "_old_forward")


def _attributes(module: nn.Module) -> dict[str, tuple[Any, Any]]:
    """Return the attributes in which a forward may keep state: name -> the value, and a copy of it if a container."""
    containers = (list, dict, set)
    return {
        name: (value, copy.copy(value) if type(value) in containers else None)
        for name, value in vars(module).items()
        if _is_state(name)
    }


def _is_state(name: str) -> bool:
    return name not in _KEPT and not name.startswith("lns_") and "hook" not in name


def _contents(container: Any) -> list[Any]:
    return [*container, *(container.values() if isinstance(container, dict) else ())]


def _restore_attributes(module: nn.Module, saved: Mapping[str, tuple[Any, Any]]) -> None:
    """Restore the attributes that a module had before a forward."""
    for name in [name for name in vars(module) if name not in saved and _is_state(name)]:
        del vars(module)[name]
    for name, (value, content) in saved.items():
        if vars(module).get(name) is not value:
            vars(module)[name] = value
        if content is not None and [*map(id, _contents(value))] != [*map(id, _contents(content))]:
            value.clear()
            value.extend(content) if isinstance(value, list) else value.update(content)
