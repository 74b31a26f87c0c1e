"""Copy a module deeply, including what :func:`copy.deepcopy` does not copy."""

from __future__ import annotations

import copy
import functools
import types
from typing import Any

import torch
from torch import nn

from olmo_lns.errors import MeasurementError

#: Attributes in which ``nn.Module`` itself stores tensors, modules and hooks.
OF_MODULES = {"_parameters", "_buffers", "_modules", *(name for name in vars(nn.Module()) if "hook" in name)}


def deep_copy(module: nn.Module, memo: dict[int, Any]) -> Any:
    """Return a deep copy of a module, including what :func:`copy.deepcopy` does not copy.

    An attribute may be a function that refers to a module, such as ``lambda x: m.c_proj(x)``. In the copy it refers to
    the copied module. Attributes that cannot be copied, such as a process group or a lock, are shared.

    :param memo: id of an object -> its copy, as for :func:`copy.deepcopy`.
    :raises MeasurementError: if a module returns itself instead of a copy.
    """
    try:
        copies = dict(memo)
        copied = copy.deepcopy(module, copies)
    except Exception:  # some attribute has no copy; a second failure is raised
        attributes = [
            each
            for part in module.modules()
            for name, value in vars(part).items()
            if name not in OF_MODULES
            for each in (value, *_elements(value))
        ]
        copies = memo | {id(each): each for each in attributes if not _can_be_copied(each)}
        copied = copy.deepcopy(module, copies)
    originals = {each: name for name, each in module.named_modules()}
    if shared := [originals[part] for part in copied.modules() if part in originals]:
        raise MeasurementError(f"{shared[0] or type(module).__name__} gives itself instead of a copy to copy.deepcopy")
    for part in copied.modules():
        for name, value in vars(part).items():
            if isinstance(value, (types.FunctionType, functools.partial)):
                vars(part)[name] = _copy_of(value, copies)
    return copied


def _elements(value: Any) -> list[Any]:
    return [*value.values()] if isinstance(value, dict) else [*value] if isinstance(value, (list, tuple)) else []


def _can_be_copied(value: Any) -> bool:
    if value is None or isinstance(value, (torch.Tensor, nn.Module, str, int, float, bool, type, types.FunctionType)):
        return True
    if isinstance(value, (dict, list, tuple, types.MethodType)):
        return True  # its elements are tried one by one
    try:
        copy.deepcopy(value)
    except Exception:  # a class may raise anything; the attribute is shared then
        return False
    return True


def _copy_of(value: Any, memo: dict[int, Any]) -> Any:
    """Return the copy of an object that a function refers to, or the object itself if it was not copied."""
    if id(value) in memo:
        return memo[id(value)]
    if isinstance(value, types.MethodType) and id(value.__self__) in memo:
        return types.MethodType(value.__func__, memo[id(value.__self__)])
    if isinstance(value, functools.partial):
        function, arguments = _copy_of(value.func, memo), [_copy_of(each, memo) for each in value.args]
        return functools.partial(function, *arguments, **{k: _copy_of(v, memo) for k, v in value.keywords.items()})
    return _rebound(value, memo) if isinstance(value, types.FunctionType) else value


def _rebound(function: Any, memo: dict[int, Any]) -> Any:
    """Return a function whose closure refers to copies of the objects in the closure of ``function``."""
    cells = function.__closure__ or ()
    contents = [getattr(cell, "cell_contents", None) for cell in cells]  # an empty cell has none
    copies = [_copy_of(value, memo) for value in contents]
    if all(a is b for a, b in zip(contents, copies, strict=True)):
        return function
    closure = tuple(types.CellType(value) for value in copies)
    rebound = types.FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__, closure
    )
    rebound.__kwdefaults__ = function.__kwdefaults__
    return rebound
