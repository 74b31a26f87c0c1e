"""Models whose matrices are drawn by the rules of other packages. A rule gives the standard deviation in block l of L."""

import math

import torch
from torch import nn

from support.other_models import WIDTH, Model

HIDDEN = 3 * WIDTH


def nanogpt(name, weight, number, n_layers):
    """Also llm.c, GPT-2 and OLMo's full_megatron."""
    return 0.02 / math.sqrt(2 * n_layers) if name in ("o", "down") else 0.02


def torchtitan(name, weight, number, n_layers):
    """Llama 3; its w3, which does not end a branch, is scaled too."""
    return 0.02 / math.sqrt(2 * number) if name in ("o", "down", "up") else 0.02


def open_lm(name, weight, number, n_layers):
    """Also OLMo's mitchell."""
    return weight.shape[1] ** -0.5 / (math.sqrt(2 * number) if name in ("o", "down") else 1)


def constant(name, weight, number, n_layers):
    return 0.02


def lecun(name, weight, number, n_layers):
    return weight.shape[1] ** -0.5


def zero(name, weight, number, n_layers):
    return 0.0 if name in ("o", "down") else 0.02


def wang(name, weight, number, n_layers):
    """GPT-NeoX's small_init with wang_init."""
    return 2 / (n_layers * WIDTH**0.5) if name in ("o", "down") else (2 / (5 * WIDTH)) ** 0.5


def draw(model, rule):
    torch.manual_seed(1)
    for number, block in enumerate(model.layers.values(), start=1):
        for name, child in block.named_children():
            if isinstance(child, nn.Linear):
                nn.init.normal_(child.weight, std=rule(name, child.weight, number, len(model.layers)))
            elif hasattr(child, "reset_parameters"):
                child.reset_parameters()
    return model


def wide(rule):
    """A model of 8 blocks of which the feed-forward has three times the width."""
    model = Model(keys="01234567")
    for block in model.layers.values():
        block.gate, block.up = (nn.Linear(WIDTH, HIDDEN, bias=False) for _ in range(2))
        block.down = nn.Linear(HIDDEN, WIDTH, bias=False)
    return draw(model, rule)


def stds(model):
    """Standard deviation of the two residual output projections of each block, and of all other matrices of blocks."""
    blocks = list(model.layers.values())
    last = [[getattr(block, name).weight.std().item() for block in blocks] for name in ("o", "down")]
    others = [child.weight.std().item() for block in blocks for child in (block.q, block.gate)]
    return *last, sum(others) / len(others)


def with_a_moved_gain(model):
    """Move one element of a norm's gain away from its start, as training does."""
    with torch.no_grad():
        model.layers["3"].n2.weight[5] += 0.1
    return model
