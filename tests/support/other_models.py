"""Models that nobody here wrote, from the sources or packages of their projects, and one of our own."""

import importlib
import os
import sys

import pytest
import torch
from torch import nn

from support import olmo_models
from support.hooked import known

IDS = torch.randint(0, 96, (2, 8), generator=torch.Generator().manual_seed(1))


def _module(name, variable):
    """A module of a checkout that ``variable`` names, or of the installed package; the test is skipped without one."""
    if (folder := os.environ.get(variable)) and folder not in sys.path:
        sys.path[:0] = folder.split(os.pathsep)
    try:
        return importlib.import_module(name)
    except ImportError as error:
        pytest.skip(f"{variable} names no checkout of {name.split('.')[0]} that can be imported: {error}")


def litgpt(**changes):
    config = _module("litgpt.config", "LITGPT_SRC").Config
    sizes = dict(n_layer=3, n_embd=32, n_head=4, padded_vocab_size=96, block_size=32, intermediate_size=64)
    torch.manual_seed(0)
    model = _module("litgpt.model", "LITGPT_SRC").GPT(config.from_name("pythia-14m", **{**sizes, **changes}))
    names = ("norm_1",) if changes.get("shared_attention_norm") else ("norm_1", "norm_2")
    return model, model.transformer.h, names


def torchtitan():
    llama3 = _module("torchtitan.models.llama3", "TORCHTITAN_SRC")
    config = llama3.llama3_configs["debugmodel"]("flex")
    for layer in config.layers:  # flex attention needs a compiler, or masks
        layer.attention.inner_attention = _module(
            "torchtitan.models.common.attention", ""
        ).ScaledDotProductAttention.Config()
    model = config.build()
    torch.manual_seed(0)
    model.init_states(buffer_device=torch.device("cpu"))
    return model, model.layers.values(), ("attention_norm", "ffn_norm")


def olmo(**changes):
    pytest.importorskip("olmo")
    model = olmo_models.build(perturb=False, layer_norm_type="rms", **changes)
    return model, known(model)[0](model), ("attn_norm", "ff_norm")


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norms = nn.ModuleDict({"a": nn.RMSNorm(width), "b": nn.LayerNorm(width)})
        self.mix, self.up, self.down = nn.Linear(width, width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        nn.init.zeros_(self.down.weight)
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        x = x + self.mix(self.norms["a"](x)).cumsum(1)
        branch = self.drop(self.down(self.up(self.norms["b"](x)).relu()))
        branch += x
        return branch


class Own(nn.Module):
    """In-place additions, dropout, an output projection that starts at zero."""

    def __init__(self, depth=3, width=32):
        super().__init__()
        self.embedding = nn.Embedding(96, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(depth)))
        self.head = nn.Linear(width, 96)

    def forward(self, ids):
        return self.head(self.blocks(self.embedding(ids)))


def own():
    torch.manual_seed(0)
    model = Own()
    return model, list(model.blocks), ("norms.a", "norms.b")


MODELS = {
    "own": own,
    "litgpt": litgpt,
    "litgpt sequential": lambda: litgpt(parallel_residual=False),
    "litgpt shared norm": lambda: litgpt(shared_attention_norm=True),
    "torchtitan": torchtitan,
    "olmo": olmo,
    "olmo in groups": lambda: olmo(block_group_size=2),
}
