"""Check that the norms of all blocks compute norms, and are not multiplied by LNS already.

The probe runs one block of each structure. The other blocks are compared with it while the outputs of their norms are
frozen, so this comparison does not show what their norms compute. Here each norm runs alone on the same random rows,
with the same random parameters.
"""

from __future__ import annotations

import contextlib
import logging
import math
from typing import Any, Callable, Collection, Mapping, Sequence

import torch
from torch import nn

from olmo_lns import probe
from olmo_lns.errors import LNSConfigError
from olmo_lns.response import first_output

log = logging.getLogger("olmo_lns")

_Run = Callable[[torch.Tensor], torch.Tensor]


def check_norms(
    names: Mapping[nn.Module, str],
    norms: Sequence[tuple[nn.Module, ...]],
    shapes: Mapping[nn.Module, tuple[int, ...]],
    device: torch.device,
    probed: Collection[int],
) -> None:
    """Check the norms of all blocks in eval mode and in training mode. They are in eval mode afterwards.

    The first norm of each kind must ignore the size of its input. If its block was probed, the probe has shown this in
    eval mode. Each other norm is compared with the first. If it computes the same, it passes. Otherwise it passes only
    if it ignores the size of its input too. For example, a norm with a different eps passes, and a module that only
    multiplies by a constant does not. A norm that cannot run alone, such as one with two inputs, is not checked, and
    the log names it.

    :param names: name of each norm.
    :param norms: the norms of each block, from block 1.
    :param shapes: shape of the input of each norm in the forward of the model.
    :param device: the device of norms without weights.
    :param probed: numbers of the blocks that the probe has run.
    :raises LNSConfigError: if a norm computes no norm, or if the norms multiply their outputs by a power of the
        number of the block.
    """
    firsts: dict[Any, tuple[int, torch.Tensor]] = {}  # kind of a norm -> number of the first block with it, its output
    exponents: list[float] = []  # of the number of a block, in the factor of its norm to that of the first block
    for number, pair in enumerate(norms, start=1):
        for place, norm in enumerate(pair):
            for trains in (False, True):
                probe.set_training(norm, trains)
                found = _output(norm, shapes.get(norm, ()), device)
                probe.set_training(norm, False)
                if found is None:
                    log.info("%s does not run alone, so it was not checked that it is a norm", names[norm])
                    break
                run, x, output = found
                key = place, type(norm), tuple((name, p.shape) for name, p in norm.named_parameters()), x.shape
                first_number, first = firsts.setdefault(key, (number, output))
                factor, is_first = _factor(output, first), output is first
                if is_first and number in probed:
                    continue
                if number != first_number and not trains:
                    exponents.append(math.log(factor) / math.log(first_number / number) if factor > 0 else 0.0)
                if (is_first or factor != 1.0) and not _ignores_sizes(norm, run, x, trains=trains):
                    raise LNSConfigError(
                        f"{names[norm]} ({type(norm).__name__}) of block {number} computes no norm in "
                        f"{'training' if trains else 'eval'} mode, since its output is constant or depends on the size "
                        "of its input. Expected a norm in each block and in both modes. Use the same norm in all "
                        "blocks."
                    )
    is_factor = bool(exponents) and min(exponents) > 0.01 and max(exponents) < min(exponents) + 0.01
    if is_factor and (len(norms) > 2 or abs(exponents[0] - 0.5) < 0.01):  # of two blocks, any ratio is some exponent
        raise LNSConfigError(
            f"The norms of block l multiply their outputs by l^-{exponents[0]:.3g}. This model therefore has LayerNorm "
            "Scaling inside of its norms, and apply() would multiply twice. Remove the model's own factor, or do not "
            "call apply()."
        )


def _output(
    norm: nn.Module, shape: tuple[int, ...], device: torch.device
) -> tuple[_Run, torch.Tensor, torch.Tensor] | None:
    """Run a norm with random parameters, and without the factor of a scheme.

    :param shape: an input that the norm takes if it does not take rows.
    :returns: a function that runs the norm in its present mode, its input and its output, or None if it cannot be run.
    """
    parameters = dict(norm.named_parameters())
    device = next((parameter.device for parameter in parameters.values()), device)
    generator = torch.Generator().manual_seed(4)

    def drawn(shape: Sequence[int]) -> torch.Tensor:
        return torch.randn(tuple(shape), generator=generator, device="cpu").to(device)

    values = {name: 1 + 0.25 * drawn(parameter.shape) for name, parameter in parameters.items()}

    def run(x: torch.Tensor) -> torch.Tensor:
        buffers = {name: b.float() if b.is_floating_point() else b for name, b in norm.named_buffers()}
        buffers |= {name: torch.ones_like(b) for name, b in buffers.items() if b.numel() == 1 and not b.any()}  # gates
        tensors = values | {name: b.clone() for name, b in buffers.items()}  # the norm may write to them
        with probe.same_randomness(device):
            output: torch.Tensor = first_output(torch.func.functional_call(norm, tensors, (x,)))
        return output.double() / getattr(norm, "lns_scale", 1.0)

    for each in ((2, 3, *shape[-1:]), (2, *shape[1:])) if shape else ():
        with contextlib.suppress(Exception):  # it does not take rows, or more than one input, or no fp32
            x = 64.0 * drawn(each)
            if bool((output := run(x)).isfinite().all()):
                return run, x, output
    return None


def _factor(output: torch.Tensor, first: torch.Tensor, tolerance: float = probe.SAME) -> float:
    """Return by what number ``first`` was multiplied. It is exactly 1 up to the tolerance, and NaN for none."""
    size = float((first * first).sum())
    factor = float((output * first).sum()) / size if output.shape == first.shape and size else math.nan
    if not float((output - factor * first).norm()) < tolerance * float(output.norm()):
        return math.nan
    return 1.0 if abs(factor - 1.0) < tolerance else factor


def _ignores_sizes(norm: nn.Module, run: _Run, x: torch.Tensor, *, trains: bool) -> bool:
    """Return true if each example of an input may have another size, and the output stays the same.

    In training mode the whole output may be larger, as that of a norm which also divides by a running mean.
    """
    sizes = 2.0 ** torch.arange(len(x), device=x.device)  # powers of 2 are exact in every dtype
    probe.set_training(norm, trains)
    factor = _factor(run(x * sizes.view(-1, *[1] * (x.dim() - 1))), run(x), tolerance=1e-3)
    probe.set_training(norm, False)
    return factor > 0 if trains else factor == 1.0
