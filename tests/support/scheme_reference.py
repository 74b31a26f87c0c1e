"""Every scheme written out in fp64 torch, from the state dict and the papers' formulas; nothing of ours is used."""

from __future__ import annotations

import math
from typing import Any, Callable

import torch
import torch.nn.functional as F

Tensor = torch.Tensor
Function = Callable[[Tensor], Tensor]

#: The schemes that have a formula here.
NAMES = (
    *("lns", "postln", "mixln", "deepnorm", "sandwich", "sandwich_depth", "branchln", "branchln_depth", "admin"),
    *("groupln", "layerscale", "skipinit", "lnsbefore", "lnsafterbranch", "lnsafterattn", "lnsafterff"),
    *("lnsafterresidual", "lnsvalue", "lnsrate", "lnsstart", "lnsuniform", "lnsreversed"),
)


def residual(
    name: str,
    x: Tensor,
    f: Function,
    n: Function,
    m: Function,
    p: dict[str, Tensor],
    which: str,
    number: int,
    count: int,
) -> Tensor:
    """The stream after one sub-layer. :param n: its first norm. :param m: its second. :param p: the block's weights."""
    root = math.sqrt(number)
    formulas: dict[str, Callable[[], Tensor]] = {
        "preln": lambda: x + f(n(x)),
        "lns": lambda: x + f(n(x) / root),
        "postln": lambda: n(x + f(x)),
        "mixln": lambda: n(x + f(x)) if number <= 0.25 * count else x + f(n(x)),
        "deepnorm": lambda: n((2 * count) ** 0.25 * x + f(x)),
        "sandwich": lambda: x + m(f(n(x))),
        "sandwich_depth": lambda: x + m(f(n(x))) / root,
        "branchln": lambda: x + n(f(x)),
        "branchln_depth": lambda: x + n(f(x)) / root,
        "admin": lambda: n(p[f"{which}_omega.weight"] * x + f(x)),
        "groupln": lambda: x + f(n(x)),
        "layerscale": lambda: x + p[f"{which}_gate.weight"] * f(n(x)),
        "skipinit": lambda: x + p[f"{which}_gate.weight"] * f(n(x)),
        "lnsbefore": lambda: x + f(n(x / root)),
        "lnsafterbranch": lambda: x + f(n(x)) / root,
        "lnsafterattn": lambda: x + f(n(x)) / (root if which == "attn" else 1),
        "lnsafterff": lambda: x + f(n(x)) / (root if which == "ff" else 1),
        "lnsvalue": lambda: x + f(n(x)) / root if which == "attn" else x + f(n(x) / root),
        "lnsrate": lambda: x + f(n(x) / root),
        "lnsstart": lambda: x + f(n(x)),
        "lnsuniform": lambda: x + f(0.35 * n(x)),
        "lnsreversed": lambda: x + f(n(x) / math.sqrt(count + 1 - number)),
        "lnsafterresidual": lambda: (x + f(n(x))) / root,
    }
    return formulas[name]()


def loss_logits_gradients(model: Any, name: str, base: str, ids: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Of an OLMo model's weights, whose own code is not run. :param base: ``rms``, ``default`` or ``low_precision``."""
    weights = {key: value.detach().double().requires_grad_() for key, value in model.state_dict().items()}
    logits = _logits(weights, model.config, name, base, ids)
    loss = loss_of(logits, ids)
    loss.backward()
    return loss.detach(), logits.detach(), {key: value.grad for key, value in weights.items()}


def loss_of(logits: Tensor, ids: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def _logits(weights: dict[str, Tensor], config: Any, name: str, base: str, ids: Tensor) -> Tensor:
    x, count = weights["transformer.wte.weight"][ids], config.n_layers

    def norm(gain: str, p: dict[str, Tensor], groups: int = 1) -> Function:
        def function(h: Tensor) -> Tensor:
            parts = h.unflatten(-1, (groups, -1))
            if base != "rms":
                parts = parts - parts.mean(-1, keepdim=True)
            parts = parts / torch.sqrt((parts**2).mean(-1, keepdim=True) + config.layer_norm_eps)
            return parts.flatten(-2) * p.get(f"{gain}.weight", 1) + p.get(f"{gain}.bias", 0)

        return function

    for number in range(1, count + 1):
        p = _of_block(weights, number - 1, config.block_group_size)
        groups = 8 if name == "groupln" else 1
        for which, f in (("attn", lambda h, p=p: _attention(h, p, config)), ("ff", lambda h, p=p: _feed_forward(h, p))):
            n, m = norm(f"{which}_norm", p, groups), norm(f"{which}_norm_out", p)
            x = residual(name, x, f, n, m, p, which, number, count)
    return norm("transformer.ln_f", weights)(x) @ weights["transformer.ff_out.weight"].T


def _of_block(weights: dict[str, Tensor], index: int, group: int) -> dict[str, Tensor]:
    place = f"blocks.{index}" if group == 1 else f"block_groups.{index // group}.{index % group}"
    prefix = f"transformer.{place}."
    return {key.removeprefix(prefix): value for key, value in weights.items() if key.startswith(prefix)}


def _feed_forward(h: Tensor, p: dict[str, Tensor]) -> Tensor:
    up, gate = (h @ p["ff_proj.weight"].T).chunk(2, -1)
    return (gate / (1 + torch.exp(-gate)) * up) @ p["ff_out.weight"].T


def _attention(h: Tensor, p: dict[str, Tensor], config: Any) -> Tensor:
    width, heads = config.d_model, config.n_heads
    size, kv = width // heads, config.effective_n_kv_heads
    fused = p.get("att_proj.weight")
    if fused is None:
        fused = torch.cat([p["q_proj.weight"], p["k_proj.weight"], p["v_proj.weight"]])
    q, k, v = (h @ fused.T).split([width, kv * size, kv * size], -1)
    q, k, v = (t.unflatten(-1, (-1, size)).transpose(1, 2) for t in (q, k, v))
    q, k = _rotated(q, config), _rotated(k, config)
    k, v = (t.repeat_interleave(heads // kv, 1) for t in (k, v))
    scores = q @ k.transpose(-1, -2) / math.sqrt(size)
    length = h.shape[1]
    scores = scores.masked_fill(~torch.ones(length, length, dtype=torch.bool).tril(), -math.inf)
    return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2) @ p["attn_out.weight"].T


def _rotated(t: Tensor, config: Any) -> Tensor:
    size = t.shape[-1]
    frequency = config.rope_theta ** -(torch.arange(0, size, 2, dtype=torch.float64) / size)
    angle = torch.arange(t.shape[-2], dtype=torch.float64)[:, None] * frequency
    first, second = t.chunk(2, -1)
    return torch.cat([first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()], -1)
