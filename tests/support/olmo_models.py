"""Small OLMo models, and an independent fp64 re-computation of them from the state dict."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

TINY = dict(
    d_model=32,
    n_heads=4,
    n_layers=4,
    mlp_hidden_size=96,
    activation_type="swiglu",
    rope=True,
    vocab_size=64,
    embedding_size=128,
    max_sequence_length=16,
    include_bias=False,
    bias_for_layer_norm=False,
    layer_norm_eps=1e-6,
    attention_dropout=0.0,
    residual_dropout=0.0,
    embedding_dropout=0.0,
    weight_tying=False,
    init_device="cpu",
    init_fn="normal",
    init_std=0.02,
)


def model_config(**changes: Any) -> Any:
    from olmo.config import ModelConfig

    return ModelConfig.new(**{**TINY, **changes})


def build(seed: int = 0, perturb: bool = True, **changes: Any) -> Any:
    """An OLMo model with reproducible weights; ``perturb`` moves gains and biases off 1 and 0."""
    import torch
    from olmo.model import OLMo

    torch.manual_seed(seed)
    model = OLMo(model_config(**changes))
    if perturb:
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 1:
                    parameter.add_(0.1 * torch.randn_like(parameter))
                else:
                    parameter.mul_(4.0)  # away from the near-identity of the initial state
    return model.eval()


def tokens(batch: int = 2, length: int = 12, vocabulary: int = 64, seed: int = 1) -> Any:
    import torch

    return torch.randint(0, vocabulary, (batch, length), generator=torch.Generator().manual_seed(seed))


def reference_logits(model: Any, ids: Any, *, lns: bool = True, exponent: float = 0.5) -> np.ndarray:
    """fp64 logits of shape (batch, length, vocabulary), from the state dict and the paper's formulas only."""
    config = model.config
    state = {k: v.detach().double().numpy() for k, v in model.state_dict().items()}
    kind = str(config.layer_norm_type).removeprefix("lns_")
    norm = _rms if kind in ("rms", "lns") else _layer
    x = state["transformer.wte.weight"][ids.numpy()]
    for index in range(config.n_layers):
        scale = float(index + 1) ** -exponent if lns else 1.0
        x = _block(x, _block_state(state, index, config.block_group_size), config, norm, scale)
    x = norm(x, state.get("transformer.ln_f.weight"), state.get("transformer.ln_f.bias"), config.layer_norm_eps)
    head = state["transformer.wte.weight"] if config.weight_tying else state["transformer.ff_out.weight"]
    return x @ head.T + state.get("transformer.ff_out.bias", 0)


def _block_state(state: dict[str, np.ndarray], index: int, group: int) -> dict[str, np.ndarray]:
    place = f"blocks.{index}" if group == 1 else f"block_groups.{index // group}.{index % group}"
    prefix = f"transformer.{place}."
    return {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}


def _rms(x: np.ndarray, weight: Any, bias: Any, eps: float) -> np.ndarray:
    y = x / np.sqrt((x * x).mean(-1, keepdims=True) + eps)
    return y * (1 if weight is None else weight) + (0 if bias is None else bias)


def _layer(x: np.ndarray, weight: Any, bias: Any, eps: float) -> np.ndarray:
    y = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + eps)
    return y * (1 if weight is None else weight) + (0 if bias is None else bias)


def _linear(x: np.ndarray, p: dict[str, np.ndarray], name: str) -> np.ndarray:
    return x @ p[f"{name}.weight"].T + p.get(f"{name}.bias", 0)


def _block(x: np.ndarray, p: dict[str, np.ndarray], config: Any, norm: Any, scale: float) -> np.ndarray:
    h = scale * norm(x, p.get("attn_norm.weight"), p.get("attn_norm.bias"), config.layer_norm_eps)
    if "att_proj.weight" in p:
        q, k, v = np.split(_linear(h, p, "att_proj"), [config.d_model, 2 * config.d_model], axis=-1)
    else:
        q, k, v = (_linear(h, p, f"{name}_proj") for name in "qkv")
    x = x + _linear(_attention(q, k, v, config), p, "attn_out")
    h = scale * norm(x, p.get("ff_norm.weight"), p.get("ff_norm.bias"), config.layer_norm_eps)
    up, gate = np.split(_linear(h, p, "ff_proj"), 2, axis=-1)
    return x + _linear(gate / (1 + np.exp(-gate)) * up, p, "ff_out")


def _attention(q: np.ndarray, k: np.ndarray, v: np.ndarray, config: Any) -> np.ndarray:
    batch, length, width = q.shape
    size = width // config.n_heads
    q, k, v = (t.reshape(batch, length, config.n_heads, size).transpose(0, 2, 1, 3) for t in (q, k, v))
    q, k = _rope(q), _rope(k)
    scores = q @ k.transpose(0, 1, 3, 2) / math.sqrt(size)
    scores = np.where(np.tril(np.ones((length, length), bool)), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return (weights @ v).transpose(0, 2, 1, 3).reshape(batch, length, width)


def _rope(t: np.ndarray) -> np.ndarray:
    size = t.shape[-1]
    angle = np.arange(t.shape[-2])[:, None] / 10000.0 ** (np.arange(0, size, 2) / size)
    sin, cos = (np.concatenate([f(angle)] * 2, -1) for f in (np.sin, np.cos))
    first, second = np.split(t, 2, -1)
    return t * cos + np.concatenate([-second, first], -1) * sin
