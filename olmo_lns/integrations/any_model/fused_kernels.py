"""Find kernels that read the weights of a norm and do not call it.

Such a kernel skips the factor of the norm. PyTorch does not use it for a norm with a hook, so outputs with and without
hooks are compared.
"""

from __future__ import annotations

import itertools
from typing import Any, Callable, Mapping

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from olmo_lns import probe, shadow, sites
from olmo_lns.errors import MeasurementError
from olmo_lns.integrations.any_model.example import forward, undisturbed
from olmo_lns.integrations.any_model.located import Located
from olmo_lns.norm import NormArithmetic
from olmo_lns.processes import is_first_process
from olmo_lns.response import first_output, replace_first
from olmo_lns.scaled import forbid_fused_kernels, scale

#: A function that returns the arithmetic of a norm, or None if it is unknown.
ArithmeticOf = Callable[[nn.Module], NormArithmetic | None]


def norms_to_hook(block: nn.Module, found: probe.BlockSites, arithmetic_of: ArithmeticOf) -> tuple[str, ...]:
    """Return the names of the norms that need a hook, so that PyTorch does not replace them by a fused kernel.

    They need one if a copy of the block with scaled norms computes something else than a copy whose norms are
    multiplied by hooks.

    :raises MeasurementError: if the copy with scaled norms still differs when it has such a hook.
    """
    if not _differences(block, found, arithmetic_of, hooked=False):
        return ()
    if modes := _differences(block, found, arithmetic_of, hooked=True):
        raise MeasurementError(
            f"{type(block).__name__} does not use the outputs of its norms {' and '.join(found.names)} {modes[0]}. "
            "A fused kernel in it reads the weights of the norms and does not call the norms, so a factor would be "
            "lost. Switch that kernel off."
        )
    return found.names


def _differences(
    block: nn.Module, found: probe.BlockSites, arithmetic_of: ArithmeticOf, *, hooked: bool, in_step: bool = False
) -> list[str]:
    """Return the modes in which a copy of the block with scaled norms differs from a copy with multiplying hooks.

    :param hooked: register a hook that changes nothing on each scaled norm.
    :param in_step: run both copies in every mode, so that statistics which training moves are the same in both.
    """
    replay, factor, differing = found.replay, 0.5, []
    reference, scaled_copy = (probe.random_copy(block, replay.block, dtype=replay.dtype) for _ in range(2))
    for each in (reference, scaled_copy):
        sites.remove_scheme(each)
    for name in found.names:
        reference.get_submodule(name).register_forward_hook(
            lambda module, args, output: replace_first(output, factor * first_output(output))
        )
        norm = scaled_copy.get_submodule(name)
        shape = replay.shapes[name]
        scale(norm, factor, where=name, width=shape[-1], shape=shape, arithmetic=arithmetic_of(norm))
        if hooked:
            forbid_fused_kernels(norm)

    def output(of: nn.Module, trains: bool, grad: bool) -> torch.Tensor:
        of.train(trains)
        with torch.set_grad_enabled(grad):
            # A kernel may depend on whether gradients are computed for its input.
            return replay.call.replay(of, replay.x.detach().requires_grad_(grad)).detach().double()

    def is_same(some: torch.Tensor, other: torch.Tensor) -> bool:
        return some.shape == other.shape and float((some - other).norm()) < replay.tolerance * float(other.norm())

    # Most blocks compute the same in all modes, and the reference need not run in each of them.
    in_eval = None if in_step else output(reference, trains=False, grad=False)
    for mode in itertools.product((False, True), (False, True)):
        scaled = output(scaled_copy, *mode)
        if in_eval is not None and is_same(scaled, in_eval):
            continue
        if not is_same(scaled, output(reference, *mode)):
            trains, grad = mode
            differing.append(f"in {'training' if trains else 'eval'} mode {'with' if grad else 'without'} gradients")
    if differing and not in_step:
        return _differences(block, found, arithmetic_of, hooked=hooked, in_step=True)
    return differing


def check_without_hooks(model: nn.Module, located: Located, example: Any = None) -> None:
    """Check that the whole model calls its scaled norms, and does not replace them by a fused kernel.

    Such a kernel is not used for a norm with a hook. The output of the model without hooks is therefore compared with
    its output with hooks that change nothing. A model without weights cannot be run and is not checked.

    :raises MeasurementError: if the two outputs differ.
    """
    if not is_first_process() or any(map(shadow.has_no_values, model.parameters())):
        return
    run = forward(model, example)
    norms = [model.get_submodule(name) for names in located.norms for name in names]
    is_single = all(parameter.dtype in (torch.float32, torch.float64) for parameter in model.parameters())
    tolerance = probe.SAME if is_single else probe.SAME_HALF

    def output(*, hooked: bool) -> list[torch.Tensor]:
        handles = [norm.register_forward_hook(_change_nothing) for norm in norms if hooked]
        with probe.hooks(handles), undisturbed(model):
            torch.manual_seed(0)
            leaves = tree_leaves(_plain(run()))
        return [leaf.detach().double() for leaf in leaves if torch.is_tensor(leaf) and leaf.is_floating_point()]

    def same(some: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
        pairs = zip(some, others, strict=False)
        return all(a.shape == b.shape and float((a - b).norm()) <= tolerance * float(b.norm()) for a, b in pairs)

    without, hooked = output(hooked=False), output(hooked=True)
    # If two forwards with hooks differ as well, the model has a state that each forward changes. It is not compared.
    if not same(without, hooked) and same(hooked, output(hooked=True)):
        raise MeasurementError(
            f"{type(model).__name__} computes something else if hooks are registered on its norms. Expected the same "
            "result. Probably a fused kernel outside of its blocks reads the weights of the norms and does not call "
            "them. Switch that kernel off."
        )


def _change_nothing(module: nn.Module, args: Any, output: Any) -> None:
    """Do nothing, as a forward hook."""


def _plain(output: Any) -> Any:
    """Convert an output class of transformers, which is a mapping, to a dict, which PyTorch can traverse."""
    return dict(output) if isinstance(output, Mapping) else output
