"""Run a copy of a model whose weights do not exist yet.

Large models are built on the meta device, or with parameters that DeepSpeed has partitioned. When their weights exist,
the models are already sharded and compiled, and their blocks can no longer be run alone. They are therefore probed
before, on a *shadow*. A shadow is a deep copy of the model with random parameters. It needs little memory, because all
parameters are views of a few tensors. Each of these tensors is as large as the largest parameter that uses it. The
norms through which a branch reads its stream do not depend on the values of the weights. The names that are found on
the shadow are therefore also right for the model.
"""

from __future__ import annotations

import contextlib
import math
from typing import Any, Iterator, Mapping

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from olmo_lns.copying import OF_MODULES, deep_copy
from olmo_lns.errors import LNSConfigError, MeasurementError

__all__ = ["RandomWeights", "device_of", "has_no_values", "real_default_device", "runnable_copy", "to_device"]

#: How many random numbers are drawn. Longer tensors repeat them. The number is prime, so that the rows of a matrix
#: differ.
_DRAWN = 1_000_003
#: The view of each parameter starts ``_STEP`` elements after the view of the parameter before it. After ``_STARTS``
#: elements the starts begin again from 0.
_STEP, _STARTS = 7919, 99_991


def has_no_values(parameter: torch.Tensor) -> bool:
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
    if first is not None and not any(map(has_no_values, model.parameters())):
        return first.device
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


@contextlib.contextmanager
def real_default_device(model: nn.Module) -> Iterator[None]:
    """Use the model's device as torch's default device if the default is the meta device."""
    with device_of(model) if torch.get_default_device().type == "meta" else contextlib.nullcontext():
        yield


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
        """Return a deep copy of ``module`` with random parameters, and with values instead of meta tensors.

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
            attributes = tree_leaves([value for name, value in vars(part).items() if name not in OF_MODULES])
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


def runnable_copy(model: nn.Module, weights: RandomWeights | None = None) -> nn.Module:
    """Return a copy of ``model`` that can be run although the weights of the model do not exist.

    The copy is on the device :func:`device_of` of the model, and has the dtypes of its parameters.

    :param weights: memory of the random parameters, which other copies may share.
    :raises LNSConfigError: if the weights are quantized.
    :raises MeasurementError: if the model cannot be copied.

    Example: ``runnable_copy(model)(torch.zeros(1, 8, dtype=torch.long))``.
    """
    if any(map(is_quantized, model.parameters())):
        raise LNSConfigError(
            f"The weights of {type(model).__name__} are quantized. Expected floating-point weights. Apply the scheme "
            "before the quantization."
        )
    try:
        copied: nn.Module = (weights or RandomWeights()).copy(model, device=device_of(model))
    except Exception as error:
        raise MeasurementError(
            f"{type(model).__name__} has no weights yet, and could not be copied ({type(error).__name__}: {error}). "
            "Expected a model that copy.deepcopy can copy. Apply the scheme when the weights exist, and before the "
            "model is sharded."
        ) from error
    return copied


def to_device(value: Any, device: torch.device) -> Any:
    """Move the tensors of an example to ``device``. Tensors on the meta device become ones, or zeros for integers."""
    if torch.is_tensor(value):
        return _filled(value, device) if value.is_meta else value.to(device)
    if isinstance(value, Mapping):
        return {key: to_device(each, device) for key, each in value.items()}
    if isinstance(value, (tuple, list)) and not hasattr(value, "_fields"):
        return type(value)(to_device(each, device) for each in value)
    return value
