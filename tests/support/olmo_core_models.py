"""Small OLMo-core models for the tests of its integration, on every version that is verified."""

from __future__ import annotations

import copy
import math
import types
from typing import Any

import torch
import torch.nn.functional as F
from olmo_core.nn.feed_forward import FeedForwardConfig
from olmo_core.nn.layer_norm import LayerNormConfig
from olmo_core.nn.transformer import TransformerConfig

from olmo_lns.olmo_core import apply

VOCABULARY, WIDTH, LAYERS, HEADS = 64, 32, 4, 4
#: Block type -> (scheme, the norms that its factor multiplies).
SCHEMES = {
    "default": ("lns", ("attention_norm", "feed_forward_norm")),
    "reordered_norm": ("branchln_depth", ("attention_norm", "feed_forward_norm")),
    "peri_norm": ("sandwich_depth", ("post_attention_norm", "post_feed_forward_norm")),
    "moe": ("lns", ("attention_norm", "feed_forward_norm")),
    "moe_reordered_norm": ("branchln_depth", ("attention_norm", "feed_forward_norm")),
    "moe_hybrid": ("lns", ("attention_norm", "feed_forward_norm", "feed_forward_moe_norm")),
    "moe_hybrid_reordered_norm": ("branchln_depth", ("attention_norm", "feed_forward_norm", "feed_forward_moe_norm")),
}
TOKENS = torch.randint(VOCABULARY, (2, 12), generator=torch.Generator().manual_seed(3))


def config(block: str = "default", norm: dict[str, Any] | None = None, **kwargs: Any) -> TransformerConfig:
    """OLMo-core's own config of a Llama-like model; no scheme in it."""
    common = dict(d_model=WIDTH, vocab_size=VOCABULARY, n_layers=LAYERS, n_heads=HEADS)
    if block.startswith("moe"):
        made = TransformerConfig.llama_like_moe(
            **{**common, **kwargs},
            num_experts=4,
            top_k=2,
            expert_hidden_size=16,
            dropless=True,
            hybrid="hybrid" in block,
            reordered_norm="reordered" in block,
        )
        if "hybrid" in block:  # llama_like_moe forgets it
            made.block.feed_forward = FeedForwardConfig(hidden_size=48, bias=False)
    else:
        made = TransformerConfig.llama_like(**{**common, **kwargs}, block_name=block)
    if norm is not None:
        made.block.layer_norm = LayerNormConfig(**norm)
    return made


def with_scheme(made: TransformerConfig, **fields: Any) -> TransformerConfig:
    """A copy of a config under the scheme that belongs to its block type."""
    return apply(copy.deepcopy(made), **{"scheme": SCHEMES[str(made.block.name)][0], **fields})


def model(made: TransformerConfig, *, seed: int | None = 1) -> Any:
    """Built on meta and drawn, as OLMo-core's train modules do; gains and biases are then moved off 1 and 0."""
    built = made.build(init_device="meta")
    cpu = torch.device("cpu")
    built.init_weights(max_seq_len=TOKENS.shape[1], max_local_microbatch_size=TOKENS.numel(), device=cpu)
    if seed is not None:
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in built.named_parameters():
            if "norm" in name or name.endswith("bias"):
                parameter.data.add_(torch.randn(parameter.shape, generator=generator), alpha=0.2)
    return built


def fold(built: Any, block: str, exponent: float = 0.5) -> Any:
    """The factor multiplied into gain and bias of a stock model's norms, by a formula of its own."""
    for number, each in enumerate(built.blocks.values(), start=1):
        for name in SCHEMES[block][1]:
            for parameter in getattr(each, name).parameters(recurse=False):
                parameter.data.mul_(1 / number**exponent)
    return built


def factor_of(name: str, block: str, exponent: float = 0.5) -> float:
    """What folding multiplied the parameter ``name`` by."""
    parts = name.split(".")
    if parts[0] == "blocks" and len(parts) == 4 and parts[2] in SCHEMES[block][1]:
        return 1 / (int(parts[1]) + 1) ** exponent
    return 1.0


def loss_of(logits: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).double(), TOKENS[:, 1:].flatten())


def dense_experts(self: Any, x: torch.Tensor, weights: torch.Tensor, indices: torch.Tensor, sizes: Any) -> torch.Tensor:
    """``ParallelMLPBase.forward`` in plain torch: OLMo-core has Triton kernels only."""
    mlp = self.mlp
    w1, w2, w3 = (w.view(mlp.num_experts, mlp.hidden_size, mlp.d_model) for w in (mlp.w1, mlp.w2, mlp.w3))
    hidden = F.silu(torch.einsum("...d,ehd->...eh", x, w1)) * torch.einsum("...d,ehd->...eh", x, w3)
    out = torch.einsum("...eh,ehd->...ed", hidden, w2)
    chosen = torch.zeros(*x.shape[:-1], mlp.num_experts, dtype=x.dtype).scatter(
        -1, indices.view(*x.shape[:-1], -1), weights.view(*x.shape[:-1], -1).to(x.dtype)
    )
    return torch.einsum("...e,...ed->...d", chosen, out)


def kernel_modules() -> dict[str, types.ModuleType]:
    """Stand-ins for flash-attn's and QuACK's RMSNorm kernels, with their signatures."""

    def rms_norm(x: Any, weight: Any, bias: Any = None, residual: Any = None, *, eps: float = 1e-6) -> torch.Tensor:
        y = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps) * weight.float()
        return (y if bias is None else y + bias.float()).to(x.dtype)

    names = ("flash_attn", "flash_attn.ops", "flash_attn.ops.triton", "flash_attn.ops.triton.layer_norm", "quack")
    modules = {name: types.ModuleType(name) for name in names}
    modules["flash_attn.ops.triton.layer_norm"].rms_norm_fn = rms_norm  # type: ignore[attr-defined]
    modules["quack"].rmsnorm = rms_norm  # type: ignore[attr-defined]
    return modules


class FlashAttention:
    """A stand-in for the flash-attn package in plain torch: the two functions that generation calls."""

    cached = 0

    @staticmethod
    def flash_attn_func(q: Any, k: Any, v: Any, **kwargs: Any) -> torch.Tensor:
        return _attend(q, k, v, first=0)

    @classmethod
    def flash_attn_with_kvcache(cls, q: Any, k_cache: Any, v_cache: Any, k: Any, v: Any, **kwargs: Any) -> torch.Tensor:
        """Writes ``k`` and ``v`` into the caches from ``cache_seqlens`` on, as flash-attn does."""
        cls.cached += 1
        first = int(kwargs["cache_seqlens"][0])
        last = first + q.shape[1]
        k_cache[:, first:last], v_cache[:, first:last] = k, v
        return _attend(q, k_cache[:, :last], v_cache[:, :last], first=first)


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, first: int) -> torch.Tensor:
    """Causal attention of queries that begin at position ``first``; (batch, length, heads, width)."""
    future = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).triu(first + 1)
    q, k, v = (t.transpose(1, 2).to(q.dtype) for t in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=~future).transpose(1, 2)


def reference_logits(weights: dict[str, torch.Tensor], made: TransformerConfig, exponent: float) -> torch.Tensor:
    """The model written out: RMSNorm, rotary attention, SwiGLU, the factor; in the dtype of ``weights`` (fp64)."""
    block, eps = made.block, made.block.layer_norm.eps or 1e-5
    branch = block.name in ("reordered_norm", "peri_norm")

    def rms(x: torch.Tensor, name: str) -> torch.Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weights[f"{name}.weight"]

    def rotate(x: torch.Tensor) -> torch.Tensor:
        half, length = x.shape[-1] // 2, x.shape[-2]
        frequency = block.sequence_mixer.rope.theta ** -(torch.arange(half, dtype=x.dtype) / half)
        angle = torch.arange(length, dtype=x.dtype)[:, None] * frequency
        cos, sin = (t.repeat(1, 2) for t in (angle.cos(), angle.sin()))
        return x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin

    def attention(x: torch.Tensor, at: str) -> torch.Tensor:
        q, k, v = (
            (x @ weights[f"{at}.w_{n}.weight"].T).unflatten(-1, (HEADS, -1)).transpose(1, 2) for n in ("q", "k", "v")
        )
        scores = rotate(q) @ rotate(k).transpose(-1, -2) / math.sqrt(q.shape[-1])
        future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        mixed = scores.masked_fill(future, -math.inf).softmax(-1) @ v
        return mixed.transpose(1, 2).flatten(2) @ weights[f"{at}.w_out.weight"].T

    def feed_forward(x: torch.Tensor, at: str) -> torch.Tensor:
        w1, w2, w3 = (weights[f"{at}.{n}.weight"].T for n in ("w1", "w2", "w3"))
        return (F.silu(x @ w1) * (x @ w3)) @ w2

    h = weights["embeddings.weight"][TOKENS]
    for number in range(1, made.n_layers + 1):
        s, at = number**-exponent, f"blocks.{number - 1}"
        for name, function in (("attention", attention), ("feed_forward", feed_forward)):
            if block.name == "default":
                h = h + function(s * rms(h, f"{at}.{name}_norm"), f"{at}.{name}")
            elif block.name == "reordered_norm":
                h = h + s * rms(function(h, f"{at}.{name}"), f"{at}.{name}_norm")
            else:
                inner = function(rms(h, f"{at}.{name}_norm"), f"{at}.{name}")
                h = h + s * rms(inner, f"{at}.post_{name}_norm")
    assert branch or block.name == "default"
    return rms(h, "lm_head.norm") @ weights["lm_head.w_out.weight"].T
