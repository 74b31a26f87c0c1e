"""Run a copy of a model whose weights do not exist yet.

Large models are built on the meta device, or with parameters that DeepSpeed has partitioned. When their weights exist,
the models are already sharded and compiled, and their blocks can no longer be run alone. They are therefore probed
before, on a *shadow*. A shadow is a deep copy of the model with random parameters, which needs little memory because
all parameters are views of a few tensors, each as large as the largest parameter that uses it. The norms through which
a branch reads its stream do not depend on the values of the weights, so the names that are found on the shadow are
also right for the model.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import math
import types
from typing import Any, Iterable, Iterator, Mapping

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from olmo_lns.errors import LNSConfigError, MeasurementError

__all__ = ["RandomWeights", "device_of", "is_absent", "real_default_device", "same_modules", "shadow", "to_device"]

#: How many random numbers are drawn. Longer tensors repeat them. The number is prime, so that the rows of a matrix
#: differ.
_DRAWN = 1_000_003
#: Each parameter's view starts this many elements after the one before, within the first ``_STARTS`` elements.
_STEP, _STARTS = 7919, 99_991


#: Attributes in which ``nn.Module`` itself stores tensors, modules and hooks.
_OF_MODULES = {"_parameters", "_buffers", "_modules", *(name for name in vars(nn.Module()) if "hook" in name)}


def is_absent(parameter: torch.Tensor) -> bool:
    """Return true for a parameter that is on the meta device or partitioned by DeepSpeed ZeRO-3."""
    return parameter.is_meta or (parameter.numel() == 0 and hasattr(parameter, "ds_shape"))


def is_quantized(parameter: torch.Tensor) -> bool:
    """Return true for a parameter of integers or bytes. A vector of integers does not count, as it may be positions."""
    return parameter.dtype.itemsize < 2 or (not _is_number(parameter) and parameter.dim() > 1)


def _is_number(parameter: torch.Tensor) -> bool:
    return parameter.is_floating_point() or parameter.is_complex()


def device_of(model: nn.Module) -> torch.device:
    """Return the device on which ``model`` runs.

    Before its weights exist, this is the CUDA device of ``torch.cuda.set_device``, or the CPU if there is no CUDA.
    """
    first = next(model.parameters(), None)
    if first is not None and not any(map(is_absent, model.parameters())):
        return first.device
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


@contextlib.contextmanager
def real_default_device(model: nn.Module) -> Iterator[None]:
    """Use the model's device as torch's default device if the default is the meta device."""
    with device_of(model) if torch.get_default_device().type == "meta" else contextlib.nullcontext():
        yield


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
    except Exception:
        attributes = [
            each
            for part in module.modules()
            for name, value in vars(part).items()
            if name not in _OF_MODULES
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
    except Exception:
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


@contextlib.contextmanager
def read_only(model: nn.Module) -> Iterator[None]:
    """Raise a RuntimeError before an operation writes to a parameter.

    Some models do this in a forward in training mode, for example to update the weights of a teacher.
    """
    saved = [(parameter, parameter.data) for parameter in model.parameters()]
    memory = {parameter.untyped_storage().data_ptr() for parameter, _ in saved if not is_absent(parameter)}
    try:
        with _NoWrites(memory):
            yield
    finally:
        for parameter, data in saved:
            if parameter.data_ptr() != data.data_ptr():
                parameter.data = data


class _NoWrites(TorchDispatchMode):
    """Raise before an operation writes to one of these storages."""

    def __init__(self, memory: set[int]) -> None:
        super().__init__()
        self.memory = memory

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func._schema.is_mutable:
            for argument, value in zip(func._schema.arguments, args, strict=False):
                self._check(argument, value)
            for argument in func._schema.arguments:
                self._check(argument, kwargs.get(argument.name))
        return func(*args, **kwargs)

    def _check(self, argument: Any, value: Any) -> None:
        if argument.alias_info is None or not argument.alias_info.is_write:
            return
        for leaf in tree_leaves(value):
            if (
                torch.is_tensor(leaf)
                and leaf.layout == torch.strided
                and leaf.untyped_storage().data_ptr() in self.memory
            ):
                raise RuntimeError("a forward writes to a parameter")


class RandomWeights:
    """Random parameters that are views of a few tensors: one for each dtype, device and size of the weights.

    A matrix is drawn at about ``fan_in ** -0.5``, a vector at 1 ± 0.2. Two parameters of one module start at
    different elements. The same sequence of shapes gives the same values in every process. Do not write to the
    parameters: another parameter holds the same elements.

    Example: ``RandomWeights().copy(model, device=torch.device("cuda"))``.
    """

    def __init__(self) -> None:
        self._drawn = torch.randn(_DRAWN, generator=torch.Generator().manual_seed(1), device="cpu")
        self._pools: dict[tuple[torch.dtype, torch.device, int | None], torch.Tensor] = {}

    def copy(self, module: nn.Module, *, dtype: torch.dtype | None = None, device: torch.device | None = None) -> Any:
        """Return a deep copy of ``module`` with random parameters, and with values in the place of meta tensors.

        The memory of the copy is that of the largest parameter, and of buffers that are not on the meta device.

        :param dtype: dtype of the parameters; None keeps theirs.
        :param device: device of parameters and buffers; None keeps theirs.
        """
        values: dict[int, Any] = {}
        # Largest first: a pool that is replaced by a larger one would stay in memory.
        parameters = list(module.parameters())
        for parameter in sorted(filter(_is_number, parameters), key=lambda p: -math.prod(_shape(p))):
            self._pool(parameter, dtype, device)
        for number, parameter in enumerate(parameters):
            if not _is_number(parameter):
                continue  # positions, which are copied
            values[id(parameter)] = self._parameter(parameter, number, dtype, device)
        for part in module.modules():
            # Some models keep tables as plain attributes.
            attributes = tree_leaves([value for name, value in vars(part).items() if name not in _OF_MODULES])
            for tensor in (*part._buffers.values(), *attributes):
                if torch.is_tensor(tensor) and tensor.is_meta:
                    values.setdefault(id(tensor), _filled(tensor, device))
        copied = deep_copy(module, values)
        for part in copied.modules() if device is not None else ():
            for name, buffer in part._buffers.items():
                part._buffers[name] = None if buffer is None else buffer.to(device)
        return copied

    def _pool(self, like: torch.Tensor, dtype: torch.dtype | None, device: torch.device | None) -> torch.Tensor:
        shape = _shape(like)
        fan_in = math.prod(shape[1:]) if len(shape) > 3 else shape[-1] if shape else 1  # of convolutions, and others
        exponent = round(math.log2(max(1, fan_in)) / 2) if len(shape) > 1 else None  # of 2: few sizes, few pools
        key = (like.dtype if like.is_complex() else dtype or like.dtype, device or like.device, exponent)
        length = math.prod(shape) + _STARTS
        if key not in self._pools or len(self._pools[key]) < length:
            drawn = self._drawn[:length]
            drawn = 1 + 0.2 * drawn if exponent is None else drawn * 2.0**-exponent
            self._pools[key] = pool = torch.empty(length, dtype=key[0], device=key[1])
            for part in pool.split(len(drawn)):
                part.copy_(drawn[: len(part)])
        return self._pools[key]

    def _parameter(
        self, like: torch.Tensor, number: int, dtype: torch.dtype | None, device: torch.device | None
    ) -> nn.Parameter:
        pool, shape, start = self._pool(like, dtype, device), _shape(like), number * _STEP % _STARTS
        return nn.Parameter(pool[start : start + math.prod(shape)].view(shape), requires_grad=like.requires_grad)


def _shape(parameter: torch.Tensor) -> torch.Size:
    return torch.Size(getattr(parameter, "ds_shape", parameter.shape))


def _filled(like: torch.Tensor, device: torch.device | None) -> torch.Tensor:
    """Return a tensor with values for a tensor on the meta device.

    The values are ones, or zeros for integers, which may be indices. In masks, true and false alternate. True may mean
    "use" in one model and "hide" in another, and with this pattern each row has something to read in both.
    """
    filled = torch.ones(like.shape, dtype=like.dtype, device=device or "cpu")
    if not like.dim():
        return filled if like.is_floating_point() or like.is_complex() else filled.zero_()
    if like.dtype == torch.bool or (like.dim() > 1 and like.shape[-1] == like.shape[-2] > 1):
        filled[..., 1::2] = 0
    return filled if like.is_floating_point() or like.is_complex() or like.dtype == torch.bool else filled.zero_()


def shadow(model: nn.Module, weights: RandomWeights | None = None) -> nn.Module:
    """Return a copy of ``model`` that can be run although the weights of the model do not exist.

    The copy is on the device :func:`device_of` of the model, and has the dtypes of its parameters.

    :param weights: memory of the random parameters, which other copies may share.
    :raises LNSConfigError: if the weights are quantized.
    :raises MeasurementError: if the model cannot be copied.

    Example: ``shadow(model)(torch.zeros(1, 8, dtype=torch.long))``.
    """
    if any(map(is_quantized, model.parameters())):
        raise LNSConfigError(
            f"The weights of {type(model).__name__} are quantized. Expected floating weights. "
            "Apply the scheme before quantization."
        )
    try:
        copied: nn.Module = (weights or RandomWeights()).copy(model, device=device_of(model))
    except Exception as error:
        raise MeasurementError(
            f"{type(model).__name__} could not be copied before its weights exist ({type(error).__name__}: {error}). "
            "Expected a model that copy.deepcopy takes. Apply the scheme once the weights exist, before the model is "
            "sharded."
        ) from error
    return copied


def same_modules(modules: Iterable[nn.Module], of: nn.Module, to: nn.Module) -> list[nn.Module]:
    """Return the modules of ``to`` that have the names of these modules of ``of``.

    :raises LNSConfigError: a module is not part of ``of``.
    """
    names = {module: name for name, module in of.named_modules()}
    if strangers := [type(module).__name__ for module in modules if module not in names]:
        raise LNSConfigError(
            f"{strangers[0]} is not a module of {type(of).__name__}. Expected modules of the model itself. "
            "Take them from the model, such as model.layers."
        )
    return [to.get_submodule(names[module]) for module in modules]


def to_device(value: Any, device: torch.device) -> Any:
    """Move the tensors of an example to ``device``. Tensors on the meta device become ones, or zeros for integers."""
    if torch.is_tensor(value):
        return _filled(value, device) if value.is_meta else value.to(device)
    if isinstance(value, Mapping):
        return {key: to_device(each, device) for key, each in value.items()}
    if isinstance(value, (tuple, list)) and not hasattr(value, "_fields"):
        return type(value)(to_device(each, device) for each in value)
    return value
