"""LayerNorm Scaling without a plugin, by the start, learning rate, epsilon and decay of the norm gains.

This file needs torch only, so you can copy it. Let s = layer_number ** -exponent. Under AdamW the two sides of this
equation train in the same way (docs/what-lns-is.md):

    LNS, gains from 1, rate lr, decay w, eps    =    Pre-LN, gains from s, rate s*lr, decay w/s, eps/s on those gains

    model = LlamaForCausalLM(config)
    gains = block_gains(model, "layers.{}.input_layernorm.weight", "layers.{}.post_attention_layernorm.weight")
    scale_(model, gains)  # once, on gains that start from 1; a folded checkpoint of LNS has them already
    optimizer = torch.optim.AdamW(param_groups(model, gains, lr=1e-3, weight_decay=0.1), betas=(0.9, 0.95))

A scheduler must multiply the rate of each group, as LambdaLR does. CosineAnnealingLR does not: its ``eta_min`` is the
same for all groups. The biases of norms are treated like their gains. The equality holds for Adam and AdamW. SGD would
need the rate s ** 2 * lr. Clipping by the global norm makes a small difference, because the gradients of the gains
differ.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import nn

__all__ = ["block_gains", "param_groups", "rescale_state_", "scale_", "unscale_"]

_WRAPPER_NAMES = re.compile(r"\b(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")


def block_gains(model: nn.Module, *patterns: str) -> dict[str, int]:
    """Map the name of each norm gain that a pattern matches, and of the bias beside it, to its block number.

    The numbers are 1-based.

    :param patterns: ends of names with ``{}`` in place of the block's 0-based number, such as
        ``layers.{}.input_layernorm.weight``.
    :raises ValueError: if a pattern has no match, if a block has no gain, if the numbers have gaps, if a parameter is
        not a vector, if a gain is zero-centered (1 + g cannot start from s), or if a norm has a factor already.

    Example: ``block_gains(model, "layers.{}.input_layernorm.weight")["layers.0.input_layernorm.weight"]`` is 1.
    """
    names = {_WRAPPER_NAMES.sub("", name): name for name, _ in model.named_parameters()}
    numbers_by_name: dict[str, int] = {}
    for pattern in patterns:
        if pattern.count("{}") != 1:
            raise ValueError(
                f"The pattern {pattern!r} does not have one {{}}. Write {{}} in place of the block's number, once."
            )
        gains = _matches(pattern, names)
        numbers = sorted(gains.values())
        expected = list(range(1, max([*numbers_by_name.values(), *numbers, 1]) + 1))
        if numbers != expected:
            raise ValueError(
                f"The pattern {pattern!r} matched the blocks {[number - 1 for number in numbers]}. Expected one "
                f"parameter in each of blocks 0 to {expected[-1] - 1}. Correct the pattern."
            )
        for name in gains:
            _check_gain(model, name)
        biases = _matches(re.sub(r"weight$", "bias", pattern), names) if pattern.endswith("weight") else {}
        if biases and len(biases) != len(gains):
            raise ValueError(
                f"The pattern {pattern!r} matched {len(gains)} blocks, but {len(biases)} of them with a bias. Expected "
                "a bias in all blocks or in none."
            )
        numbers_by_name |= gains | biases
    if not numbers_by_name:
        raise ValueError("No pattern was passed. Pass at least one pattern, such as layers.{}.input_layernorm.weight.")
    return numbers_by_name


def _matches(pattern: str, names: dict[str, str]) -> dict[str, int]:
    front, back = (re.escape(part) for part in pattern.split("{}"))
    matches = {own: re.fullmatch(rf"(?:.*\.)?{front}(\d+){back}", name) for name, own in names.items()}
    return {own: int(match[1]) + 1 for own, match in matches.items() if match}


@torch.no_grad()
def _check_gain(model: nn.Module, name: str) -> None:
    """Refuse a norm whose output is not of size 1 for a gain of 1: it is 2 for 1 + g, and s for a scaled norm."""
    owner, _, leaf = name.rpartition(".")
    norm, gain = model.get_submodule(owner), model.get_parameter(name)
    if gain.dim() != 1:
        raise ValueError(
            f"{name} has the shape {tuple(gain.shape)}. A gain has one dimension. Pass a pattern that matches gains."
        )
    size = 2.0 if getattr(norm, "zero_centered_gamma", False) else 1.0
    if leaf == "weight":  # other gains are fused into a projection (Transformer Engine's) and cannot be called alone
        options: dict[str, Any] = {"dtype": gain.dtype, "device": "cpu" if gain.is_meta else gain.device}
        parameters = {key: torch.zeros(value.shape, **options) for key, value in norm.named_parameters()}
        parameters[leaf] += 1
        x = torch.linspace(-4, 4, gain.numel(), **options)[None]
        size = torch.func.functional_call(norm, parameters, (x,)).float().pow(2).mean().sqrt().item()
    if abs(size - 1) > 0.05:
        reason = "A zero-centered gain 1 + g cannot start from s" if abs(size - 2) < 0.1 else "It has a factor already"
        raise ValueError(
            f"{name} of {type(norm).__name__}: a gain of 1 makes an output of size {size:.3g}, but 1 was expected. "
            f"{reason}."
        )


@torch.no_grad()
def scale_(model: nn.Module, gains: dict[str, int], exponent: float = 0.5) -> None:
    """Multiply the gains and norm biases of block l by l ** -exponent, in place, at the start of a run or to fold.

    :raises ValueError: if the gains start from their factors already.

    Example: ``scale_(model, block_gains(model, "layers.{}.input_layernorm.weight"))``, once, before training.
    """
    starts = {name: float(number) ** -exponent for name, number in gains.items() if model.get_parameter(name).any()}
    started = [bool((model.get_parameter(name) == start).all()) for name, start in starts.items()]
    if exponent > 0 and max(gains.values(), default=1) > 1 and all(started):
        raise ValueError("The gains start from their factors already. Call scale_ only once.")
    for name, number in gains.items():
        model.get_parameter(name).mul_(float(number) ** -exponent)


def unscale_(model: nn.Module, gains: dict[str, int], exponent: float = 0.5) -> None:
    """Undo :func:`scale_`, so that the gains are those of a model whose norms have the factor."""
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

    :param lr: rate of the matrices. The gains of block l get lr * l ** -exponent. The groups have ``initial_lr`` for
        schedulers.
    :param weight_decay: decay of parameters with two or more dimensions.
    :param vector_decay: decay of all other parameters. It is multiplied by l ** exponent for a gain of block l, because
        AdamW multiplies the decay by the rate.
    :raises ValueError: if a name in ``gains`` is not a trained parameter of ``model``.

    Example: ``torch.optim.AdamW(param_groups(model, gains, lr=1e-3, weight_decay=0.1), betas=(0.9, 0.95))``.
    """
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    if missing := sorted(gains.keys() - trained.keys()):
        raise ValueError(
            f"{missing[0]} is not a trained parameter of this model. Pass the result of block_gains for this model."
        )
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

    :raises ValueError: if the optimizer has no moments for a gain.
    """
    for name, number in gains.items():
        state, s = optimizer.state.get(model.get_parameter(name), {}), float(number) ** -exponent
        if "exp_avg" not in state:
            raise ValueError(f"{name}: the optimizer has no exp_avg for this gain. Load the optimizer's state first.")
        state["exp_avg"].div_(s)
        for key in ("exp_avg_sq", "max_exp_avg_sq"):
            if key in state:
                state[key].div_(s * s)
