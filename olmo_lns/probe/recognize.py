"""Recognize a module that is a norm, by what it computes.

A norm ignores the size of its input. For an input x, it returns the same output for 64·x and for 128·x, and a linear
layer does not. Most norms could also be recognized by the name of their class, such as ``LlamaRMSNorm``, but many
packages have norms whose names do not contain "norm".
"""

from __future__ import annotations

from typing import Any, Mapping

import torch
from torch import nn
from torch.utils._pytree import tree_map

from olmo_lns.response import first_output

#: Two outputs of a norm are the same, up to its eps and the rounding of half precision, if their relative difference is
#: below this value.
_SAME_OUTPUT = 1e-3
#: If the output of a module has fewer different values than this, the module is no norm. A sign function, for example,
#: ignores the size of its input too, but it only returns -1, 0 and 1.
_FEWEST_VALUES = 17
#: Modules of PyTorch that are no norms. They are not run, to save time, since most models have one beside each norm.
_NO_NORMS = (nn.Identity, nn.Dropout, nn.GELU, nn.SiLU, nn.ReLU)


def looks_like_norm(module: nn.Module) -> bool:
    """Return true for a module that may be a norm, judged by the name of its class and the shapes of its weights."""
    name = type(module).__name__.lower()
    return is_leaf(module) and ("norm" in name or name.startswith("ln")) and has_vectors_only(module)


def is_leaf(module: nn.Module) -> bool:
    """Return true for a module that has no children with parameters. A dropout inside of it does not matter."""
    children = [child for name, child in module.named_children() if name != "parametrizations"]
    return all(next(child.parameters(), None) is None for child in children)


def has_vectors_only(module: nn.Module) -> bool:
    """Return true if at most one dimension of each weight is larger than 1, as in the gain of a norm."""
    return all(p.numel() == max(p.shape, default=1) for p in module.parameters())


def is_norm(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Return true if a module computes a norm.

    A norm returns the same output for 64 and for 128 times an input, and a different output for a different input.

    :param args: positional arguments of a call of the module. Its input is replaced by random numbers.
    :param kwargs: keyword arguments of that call.
    """
    example = norm_input(args, kwargs)
    if not example.is_floating_point() or type(module) in _NO_NORMS:
        return False

    def run(value: torch.Tensor) -> torch.Tensor:
        normalized = {id(tensor) for tensor in _inputs_of_one_shape(example, args, kwargs)}
        arguments = tree_map(lambda leaf: value if id(leaf) in normalized else leaf, (args, dict(kwargs)))
        return torch.as_tensor(first_output(module(*arguments[0], **arguments[1]))).double()

    generator = torch.Generator().manual_seed(3)
    x = torch.randn(example.shape, generator=generator, device="cpu").to(example)
    small, large = run(64.0 * x), run(128.0 * x)
    size = float(small.norm())
    if not float((large - small).norm()) < _SAME_OUTPUT * size:
        return False
    another = torch.randn(example.shape, generator=generator, device="cpu").to(example)
    if not float((run(64.0 * another) - small).norm()) > _SAME_OUTPUT * size:
        return False
    return small.unique().numel() >= min(_FEWEST_VALUES, small.numel())


def norm_input(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Return the input of a norm, which is its first argument, positional or keyword."""
    return next(iter((*args, *kwargs.values())), None)


def normalized_input(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.Tensor:
    """Return what a norm normalizes, in fp64.

    This is the input of the norm. Some norms have the form ``norm(x, residual)`` and normalize ``x + residual``. If the
    norm has several inputs of one shape, the result is therefore their sum.
    """
    first = norm_input(args, kwargs)
    return torch.stack([value.detach().double() for value in _inputs_of_one_shape(first, args, kwargs)]).sum(0)


def _inputs_of_one_shape(first: torch.Tensor, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """Return the floating tensors among the arguments that have the shape of the first."""
    tensors = [value for value in (*args, *kwargs.values()) if torch.is_tensor(value) and value.is_floating_point()]
    return [value for value in tensors if value.shape == first.shape] if first.dim() > 1 else [first]
