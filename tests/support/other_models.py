"""Models that nobody here wrote, from the sources or packages of their projects, and one of our own."""

import importlib
import os
import sys

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from support import olmo_models
from support.hooked import known

WIDTH, IDS = 32, torch.randint(0, 96, (2, 8), generator=torch.Generator().manual_seed(1))


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
    attention = _module("torchtitan.models.common.attention", "").ScaledDotProductAttention
    for layer in config.layers:  # flex attention needs a compiler, or masks
        layer.attention.inner_attention = attention.Config()
    model = config.build()
    torch.manual_seed(0)
    model.init_states(buffer_device=torch.device("cpu"))
    return model, model.layers.values(), ("attention_norm", "ffn_norm")


def olmo(**changes):
    pytest.importorskip("olmo")
    model = olmo_models.build(perturb=False, layer_norm_type="rms", **changes)
    return model, known(model)[0](model), ("attn_norm", "ff_norm")


class Block(nn.Module):
    """A block with two norms, whose ``forward`` a subclass may replace."""

    half = False

    def __init__(self, number, norm=nn.RMSNorm):
        super().__init__()
        self.number, self.n1, self.n2 = number, norm(WIDTH), norm(WIDTH)
        self.q, self.k, self.v, self.o, self.gate, self.up, self.down = (
            nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(7)
        )

    def attn(self, x, y=None):
        if self.half and x.dtype == torch.float32:
            raise RuntimeError("only fp16 and bf16")
        y = x if y is None else y
        return self.o(F.scaled_dot_product_attention(self.q(x), self.k(y), self.v(y), is_causal=True))

    def mlp(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))

    def forward(self, x):
        x = x + self.attn(self.n1(x))
        return x + self.mlp(self.n2(x))


class Model(nn.Module):
    """A model of blocks with one ``forward``. :param tail: makes the last norm."""

    def __init__(self, forward=Block.forward, keys="0123", tail=None, half=False, **options):
        super().__init__()
        torch.manual_seed(0)
        kind = type("Other", (Block,), {"forward": forward, "half": half})
        self.embedding, self.head = nn.Sequential(nn.Embedding(96, WIDTH)), nn.Linear(WIDTH, 96)
        self.layers = nn.ModuleDict({key: kind(number, **options) for number, key in enumerate(keys)})
        self.norm = nn.RMSNorm(WIDTH) if tail is None else tail(self)

    def forward(self, ids):
        x = self.embedding(ids)
        for block in self.layers.values():
            x = block(x)
        return self.head(self.norm(x))


def added_in_place(self, x):
    x = x + self.attn(self.n1(x))
    branch = F.dropout(self.mlp(self.n2(x)), 0.1, self.training)
    branch += x
    return branch


def own(**options):
    """A model of ours: in-place additions, dropout, an output projection that starts at zero."""
    model = Model(added_in_place, **options)
    for block in model.layers.values():
        nn.init.zeros_(block.down.weight)
    return model, list(model.layers.values()), ("n1", "n2")


MODELS = {
    "own": own,
    "litgpt": litgpt,
    "litgpt sequential": lambda: litgpt(parallel_residual=False),
    "litgpt shared norm": lambda: litgpt(shared_attention_norm=True),
    "torchtitan": torchtitan,
    "olmo": olmo,
    "olmo in groups": lambda: olmo(block_group_size=2),
}
