"""LayerNorm Scaling without a plugin: the gains' start, learning rate, epsilon and decay. Torch only; copy this file.

Let s = layer_number ** -exponent. Under AdamW these two train alike (docs/what-lns-is.md):

    LNS, gains from 1, rate lr, decay w, eps    =    Pre-LN, gains from s, rate s*lr, decay w/s, eps/s on those gains

    model = LlamaForCausalLM(config)
    gains = block_gains(model, "layers.{}.input_layernorm.weight", "layers.{}.post_attention_layernorm.weight")
    scale_(model, gains)  # once, on gains that start from 1; a folded checkpoint of LNS has them already
    optimizer = torch.optim.AdamW(param_groups(model, gains, lr=1e-3, weight_decay=0.1), betas=(0.9, 0.95))

A scheduler must multiply each group's own rate, as LambdaLR does; ``eta_min`` of CosineAnnealingLR is one floor for all
groups. Norm biases go with their gains. The equality holds for Adam and AdamW; SGD would need s ** 2 * lr. Clipping by
the global norm makes a small difference, because the gains' gradients differ.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import nn

__all__ = ["block_gains", "param_groups", "rescale_state_", "scale_", "unscale_"]

_WRAPPERS = re.compile(r"\b(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")


def block_gains(model: nn.Module, *patterns: str) -> dict[str, int]:
    """Map each norm gain that ``patterns`` match, and the bias beside it, to its 1-based block number.

    :param patterns: ends of names, ``{}`` for the 0-based block: ``layers.{}.input_layernorm.weight``.
    Example: ``block_gains(model, "layers.{}.input_layernorm.weight")["layers.0.input_layernorm.weight"]`` is 1.

    :raises ValueError: a pattern without a match, a block without a gain, gaps in the numbers, a parameter that is
        not a vector, a zero-centred gain (1 + g cannot start from s), or a norm that has a factor already.
    """
    names = {_WRAPPERS.sub("", name): name for name, _ in model.named_parameters()}
    numbers_by_name: dict[str, int] = {}
    for pattern in patterns:
        if pattern.count("{}") != 1:
            raise ValueError(f"pattern {pattern!r}: expected one {{}} in place of the block's number")
        gains = _matches(pattern, names)
        numbers = sorted(gains.values())
        expected = list(range(1, max([*numbers_by_name.values(), *numbers, 1]) + 1))
        if numbers != expected:
            raise ValueError(
                f"pattern {pattern!r}: expected one parameter in each of blocks 0 to {expected[-1] - 1}, "
                f"found {[number - 1 for number in numbers]}"
            )
        for name in gains:
            _check_gain(model, name)
        biases = _matches(re.sub(r"weight$", "bias", pattern), names) if pattern.endswith("weight") else {}
        if biases and len(biases) != len(gains):
            raise ValueError(f"pattern {pattern!r}: {len(gains)} blocks, but {len(biases)} of them with a bias")
        numbers_by_name |= gains | biases
    if not numbers_by_name:
        raise ValueError("expected at least one pattern")
    return numbers_by_name


def _matches(pattern: str, names: dict[str, str]) -> dict[str, int]:
    front, back = (re.escape(part) for part in pattern.split("{}"))
    matches = {own: re.fullmatch(rf"(?:.*\.)?{front}(\d+){back}", name) for name, own in names.items()}
    return {own: int(match[1]) + 1 for own, match in matches.items() if match}


@torch.no_grad()
def _check_gain(model: nn.Module, name: str) -> None:
    """Refuse a norm whose output for a gain of 1 is not of size 1: 1 + g gives 2, a factor gives the factor."""
    owner, _, leaf = name.rpartition(".")
    norm, gain = model.get_submodule(owner), model.get_parameter(name)
    if gain.dim() != 1:
        raise ValueError(f"{name}: expected a gain of one dimension, found shape {tuple(gain.shape)}")
    size = 2.0 if getattr(norm, "zero_centered_gamma", False) else 1.0
    if leaf == "weight":  # other gains are fused into a projection (Transformer Engine's) and cannot be called alone
        options: dict[str, Any] = {"dtype": gain.dtype, "device": "cpu" if gain.is_meta else gain.device}
        parameters = {key: torch.zeros(value.shape, **options) for key, value in norm.named_parameters()}
        parameters[leaf] += 1
        x = torch.linspace(-4, 4, gain.numel(), **options)[None]
        size = torch.func.functional_call(norm, parameters, (x,)).float().pow(2).mean().sqrt().item()
    if abs(size - 1) > 0.05:
        reason = "a zero-centred gain, 1 + g, cannot start from s" if abs(size - 2) < 0.1 else "it has a factor already"
        raise ValueError(f"{name} of {type(norm).__name__}: a gain of 1 gives an output of size {size:.3g}: {reason}")


@torch.no_grad()
def scale_(model: nn.Module, gains: dict[str, int], exponent: float = 0.5) -> None:
    """Multiply the gains (and norm biases) of block l by l ** -exponent, in place, to start a run or to fold.

    :raises ValueError: the gains start from their factors already.

    Example: ``scale_(model, block_gains(model, "layers.{}.input_layernorm.weight"))``, once, before training.
    """
    starts = {name: float(number) ** -exponent for name, number in gains.items() if model.get_parameter(name).any()}
    started = [bool((model.get_parameter(name) == start).all()) for name, start in starts.items()]
    if exponent > 0 and max(gains.values(), default=1) > 1 and all(started):
        raise ValueError("the gains start from their factors already: scale them once")
    for name, number in gains.items():
        model.get_parameter(name).mul_(float(number) ** -exponent)


def unscale_(model: nn.Module, gains: dict[str, int], exponent: float = 0.5) -> None:
    """Undo :func:`scale_`: the gains become those of a model with LNS's factor."""
    scale_(model, gains, -exponent)


def param_groups(
    model: nn.Module,
    gains: dict[str, int],
    *,
    lr: float,
    weight_decay: float,
    eps: float = 1e-8,
    exponent: float = 0.5,
    vector_decay: float = 0.0,
) -> list[dict[str, Any]]:
    """Return groups for AdamW: matrices, other vectors (the final norm, biases), and the gains of each block.

    :param lr: rate of the matrices; the gains of block l get lr * l ** -exponent. ``initial_lr`` is set for schedulers.
    :param weight_decay: decay of parameters with two dimensions or more. :param vector_decay: decay of the others,
        for a gain of block l times l ** exponent, since AdamW multiplies decay by the rate.
    :raises ValueError: a name in ``gains`` is not a trained parameter of ``model``.

    Example: ``torch.optim.AdamW(param_groups(model, gains, lr=1e-3, weight_decay=0.1), betas=(0.9, 0.95))``.
    """
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    if missing := sorted(gains.keys() - trained.keys()):
        raise ValueError(f"gains that are not trained parameters of this model: {missing[:3]}")
    members: dict[tuple[float, float], list[nn.Parameter]] = {}
    for name, parameter in trained.items():
        decay = weight_decay if parameter.dim() > 1 else vector_decay
        members.setdefault((float(gains.get(name, 1)) ** -exponent, decay), []).append(parameter)
    return [
        {"params": params, "lr": s * lr, "initial_lr": s * lr, "weight_decay": decay / s, "eps": eps / s}
        for (s, decay), params in members.items()
    ]


@torch.no_grad()
def rescale_state_(
    optimizer: torch.optim.Optimizer, model: nn.Module, gains: dict[str, int], exponent: float = 0.5
) -> None:
    """Divide Adam's moments of the gains by their factor, after :func:`scale_` in the middle of a run.

    After :func:`unscale_`, pass ``-exponent``.

    Example: ``scale_(model, gains)``, then ``rescale_state_(optimizer, model, gains)``.

    :raises ValueError: the optimizer has no moments for a gain.
    """
    for name, number in gains.items():
        state, s = optimizer.state.get(model.get_parameter(name), {}), float(number) ** -exponent
        if "exp_avg" not in state:
            raise ValueError(f"{name}: the optimizer has no exp_avg for this gain; load the optimizer's state first")
        state["exp_avg"].div_(s)
        for key in ("exp_avg_sq", "max_exp_avg_sq"):
            if key in state:
                state[key].div_(s * s)
