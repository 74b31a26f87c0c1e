"""Every scheme written out in fp64 torch, from the state dict and the papers' formulas, without the package."""

import math
from typing import Callable

import torch
import torch.nn.functional as F

Tensor = torch.Tensor
Function = Callable[[Tensor], Tensor]


def residual(name, x, f, n, m, p, which, number, count, exponent=0.5):
    """The stream after one sub-layer. :param n: its first norm. :param m: its second. :param p: the block's weights."""
    root = number**exponent
    formulas = {
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
        "lnsafterresidual": lambda: (x + f(n(x))) / root,
    }
    return formulas[name]()


def loss_logits_gradients(model, name, base, ids):
    """From an OLMo model's weights, without its own code. :param base: ``rms``, ``default`` or ``low_precision``."""
    weights = {key: value.detach().double().requires_grad_() for key, value in model.state_dict().items()}
    logits = logits_of(weights, model.config, states_of(weights, model.config, name, base, ids)[-1], base)
    loss = loss_of(logits, ids)
    loss.backward()
    return loss.detach(), logits.detach(), {key: value.grad for key, value in weights.items()}


def loss_of(logits, ids):
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def weights_of(model):
    return {key: value.detach().double() for key, value in model.state_dict().items()}


def _norm(p, gain, config, base, groups=1):
    def function(h):
        parts = h.unflatten(-1, (groups, -1))
        if base != "rms":
            parts = parts - parts.mean(-1, keepdim=True)
        parts = parts / torch.sqrt((parts**2).mean(-1, keepdim=True) + config.layer_norm_eps)
        return parts.flatten(-2) * p.get(f"{gain}.weight", 1) + p.get(f"{gain}.bias", 0)

    return function


def states_of(weights, config, name, base, ids, exponent=0.5):
    """The stream before each block and after the last, each of shape (batch, length, width)."""
    states = [weights["transformer.wte.weight"][ids]]
    for number in range(1, config.n_layers + 1):
        p = block_weights(weights, number - 1, config.block_group_size)
        states.append(block_of(states[-1], p, config, name, base, number, exponent))
    return states


def block_of(x, p, config, name, base, number, exponent=0.5):
    """The stream after block ``number`` of the stream before it. :param p: the block's weights."""
    groups = 8 if name == "groupln" else 1
    for which, f in (("attn", lambda h: _attention(h, p, config)), ("ff", lambda h: _feed_forward(h, p))):
        n, m = (_norm(p, f"{which}_norm{second}", config, base, groups) for second in ("", "_out"))
        x = residual(name, x, f, n, m, p, which, number, config.n_layers, exponent)
    return x


def logits_of(weights, config, last, base):
    """The logits of the stream after the last block."""
    head = weights["transformer.wte.weight" if config.weight_tying else "transformer.ff_out.weight"]
    return _norm(weights, "transformer.ln_f", config, base)(last) @ head.T + weights.get("transformer.ff_out.bias", 0)


def block_weights(weights, index, group):
    place = f"blocks.{index}" if group == 1 else f"block_groups.{index // group}.{index % group}"
    prefix = f"transformer.{place}."
    return {key.removeprefix(prefix): value for key, value in weights.items() if key.startswith(prefix)}


def _linear(h, p, *names):
    """The concatenated outputs of projections."""
    return torch.cat([h @ p[f"{name}.weight"].T + p.get(f"{name}.bias", 0) for name in names], -1)


def _feed_forward(h, p):
    up, gate = _linear(h, p, "ff_proj").chunk(2, -1)
    return _linear(gate / (1 + torch.exp(-gate)) * up, p, "ff_out")


def _attention(h, p, config):
    width, heads = config.d_model, config.n_heads
    size, kv = width // heads, config.effective_n_kv_heads
    fused = _linear(h, p, *(["att_proj"] if "att_proj.weight" in p else ["q_proj", "k_proj", "v_proj"]))
    q, k, v = fused.split([width, kv * size, kv * size], -1)
    q, k, v = (t.unflatten(-1, (-1, size)).transpose(1, 2) for t in (q, k, v))
    q, k = _rotated(q, config), _rotated(k, config)
    k, v = (t.repeat_interleave(heads // kv, 1) for t in (k, v))
    scores = q @ k.transpose(-1, -2) / math.sqrt(size)
    length = h.shape[1]
    scores = scores.masked_fill(~torch.ones(length, length, dtype=torch.bool).tril(), -math.inf)
    return _linear((scores.softmax(-1) @ v).transpose(1, 2).flatten(2), p, "attn_out")


def _rotated(t, config):
    size = t.shape[-1]
    frequency = config.rope_theta ** -(torch.arange(0, size, 2, dtype=torch.float64) / size)
    angle = torch.arange(t.shape[-2], dtype=torch.float64)[:, None] * frequency
    first, second = t.chunk(2, -1)
    return torch.cat([first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()], -1)
