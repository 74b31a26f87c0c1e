"""Save what a forward may change in a model, and restore it afterwards."""

from __future__ import annotations

import contextlib
import functools
import operator
import random
import sys
import types
from collections import deque
from typing import Any, Callable, Iterable, Iterator

import torch
from torch import nn

#: Attributes of a module that a forward does not use as state, or that are restored in another way. ``_old_forward`` is
#: the forward that accelerate's hooks call.
_KEPT = ("_parameters", "_modules", "_buffers", "training", "forward", "_old_forward")
_NOT_FOLLOWED = (nn.Module, type, types.ModuleType, types.FunctionType, types.MethodType, functools.partial)
#: A tensor with more elements is tested for being constant, as a new cache of keys is. A constant needs no copy.
_LARGE = 1_000_000
#: A container with more elements, such as a vocabulary, is restored, and what is in its elements is not.
_LONG = 20_000


class SavedState:
    """The buffers and attributes of all modules of a model.

    Attributes may be containers and other objects. What is in them is saved as well, down to the tensors, arrays and
    random generators, except that an object inside of another object is not followed. The weights are not saved.
    """

    def __init__(self, model: nn.Module) -> None:
        modules = list(model.modules())
        self._plain = [module for module in modules if not isinstance(module, torch.jit.ScriptModule)]
        self._members = {module: _members(module) for module in self._plain}
        self._attributes = {module: _attributes(module) for module in self._plain}
        self._buffers = {module: dict(module._buffers) for module in self._plain}
        self._contents: dict[int, tuple[Any, list[Any]]] = {}  # id of a container -> the container and its contents
        self._values: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # id of a tensor -> the tensor and a copy
        self._others: dict[int, Callable[[], Any]] = {}  # id of an array or a generator -> a function that restores it
        for module in modules:
            self._save(list(module.buffers(recurse=False)), follows=False)
        for attributes in self._attributes.values():
            self._save(list(attributes.values()), follows=True)
        self._contents = {key: saved for key, saved in self._contents.items() if not isinstance(saved[0], tuple)}

    def _save(self, values: Iterable[Any], *, follows: bool) -> None:
        """Save what is inside of these values.

        :param follows: also save the attributes of objects that are neither containers nor tensors.
        """
        rest = [(value, follows) for value in values]
        while rest:
            value, follows = rest.pop()
            if isinstance(value, (str, int, float, type(None))):
                continue
            if isinstance(value, torch.Tensor):
                if id(value) not in self._values and _has_own_values(value):
                    self._values[id(value)] = value, _copy(value)
                continue
            if id(value) not in self._others and (restore := _restorer(value)) is not None:
                self._others[id(value)] = restore
            if isinstance(value, (list, dict, set, deque, tuple)):
                container, inner = value, follows
            elif follows and _is_object(value):
                container, inner = vars(value), False
            else:
                continue
            if id(container) not in self._contents:
                self._contents[id(container)] = container, (contents := _contents(container))
                if len(contents) < _LONG:
                    rest += [(each, inner) for each in contents]

    def restore(self) -> None:
        """Restore everything that has changed. A module in which the forward has built parts keeps its attributes."""
        for module, attributes in self._attributes.items():
            if self._members[module] == _members(module):
                _restore_attributes(module, attributes)
        for container, contents in self._contents.values():
            if [*map(id, _contents(container))] != [*map(id, contents)]:
                container.clear()
                if isinstance(container, dict):
                    container.update(zip(contents[::2], contents[1::2], strict=True))
                else:
                    (container.update if isinstance(container, set) else container.extend)(contents)
        for module, buffers in self._buffers.items():
            for name in module._buffers.keys() - buffers.keys():
                del module._buffers[name]
            module._buffers.update(buffers)
        for restore in self._others.values():
            restore()
        with torch.no_grad():
            for tensor, value in self._values.values():
                if tensor.shape == value.shape and not torch.equal(tensor, value):
                    tensor.copy_(value)


@contextlib.contextmanager
def restored(module: nn.Module) -> Iterator[None]:
    """Restore the buffers and attributes of a module when the context ends (:class:`SavedState`)."""
    state = SavedState(module)
    try:
        yield
    finally:
        state.restore()


def _members(module: nn.Module) -> tuple[set[str], set[str]]:
    return set(module._modules), set(module._parameters)


def _is_state(name: str) -> bool:
    return name not in _KEPT and not name.startswith("lns_") and "hook" not in name


def _attributes(module: nn.Module) -> dict[str, Any]:
    """Return the attributes in which a forward may keep state."""
    return {name: value for name, value in vars(module).items() if _is_state(name)}


def _restore_attributes(module: nn.Module, saved: dict[str, Any]) -> None:
    for name in _attributes(module).keys() - saved.keys():
        del vars(module)[name]
    for name, value in saved.items():
        if vars(module).get(name) is not value:
            vars(module)[name] = value


def _contents(container: Any) -> list[Any]:
    """Return the elements of a container. Those of a dict are keys and values in turn."""
    return [each for item in container.items() for each in item] if isinstance(container, dict) else [*container]


def _is_object(value: Any) -> bool:
    """Return true for an object of a class of Python whose attributes may be state."""
    return (
        isinstance(getattr(value, "__dict__", None), dict)
        and not isinstance(value, _NOT_FOLLOWED)
        and type(value).__module__.partition(".")[0] != "torch"
    )


def _restorer(value: Any) -> Callable[[], Any] | None:
    """Return a function that restores an array or a random generator, or None for anything else."""
    numpy: Any = sys.modules.get("numpy")
    if isinstance(value, torch.Generator):
        return functools.partial(value.set_state, value.get_state())
    if isinstance(value, random.Random):
        return functools.partial(value.setstate, value.getstate())
    if numpy is not None and isinstance(value, numpy.random.Generator):
        return functools.partial(setattr, value.bit_generator, "state", value.bit_generator.state)
    if numpy is not None and type(value) is numpy.ndarray and value.flags.writeable:
        return functools.partial(operator.setitem, value, ..., value.copy())
    return None


def _has_own_values(tensor: torch.Tensor) -> bool:
    """Return true for a tensor to which a forward may write: neither a weight, nor expanded, nor without values."""
    return (
        not isinstance(tensor, nn.Parameter)
        and not tensor.is_meta
        and not tensor.is_inference()
        and tensor.layout == torch.strided
        and not any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))
    )


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of a tensor, which takes no memory if all elements of a large tensor are equal."""
    tensor = tensor.detach()
    if tensor.numel() > _LARGE and (tensor.is_floating_point() or tensor.dtype in (torch.int32, torch.int64)):
        smallest, largest = tensor.aminmax()
        if bool(smallest == largest):
            return smallest.expand(tensor.shape)
    return tensor.clone()
