"""torchtitan's debug models, built as its trainer builds them: overrides, then the meta device, then weights."""

import importlib
import inspect

import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import AuxOutput, create_block_mask
from torchtitan.config.override import OverrideConfig, apply_overrides
from torchtitan.models.common import attention
from torchtitan.models.common.decoder import Decoder

LNS = "olmo_lns.torchtitan.lns"
PLAIN = "olmo_lns.torchtitan.plain_initialization"
#: Newer versions take one packed sequence of tokens, older ones a batch of sequences.
IS_PACKED = hasattr(Decoder.Config, "max_context_length")


def config(family, flavor="debugmodel"):
    """Return the spec of a model with flex attention, which also builds where there is no GPU."""
    registry = importlib.import_module(f"torchtitan.models.{family}").model_registry
    takes_backend = "attn_backend" in inspect.signature(registry).parameters
    return registry(flavor, **({"attn_backend": "flex"} if takes_backend else {}))


def build(family, *imports, flavor="debugmodel", spec=None):
    """Return a model on the meta device. :param imports: entries of ``--override.imports``."""
    spec = spec or config(family, flavor)
    apply_overrides(OverrideConfig(imports=list(imports)), spec)
    with torch.device("meta"):
        return spec.model.build()


def with_weights(model, *, seed=0):
    """Draw the weights of a model on the CPU with its own initializers."""
    model.to_empty(device="cpu")
    torch.manual_seed(seed)
    with torch.no_grad():
        model.init_weights()
    return model


def eager_attention(monkeypatch):
    """Replace compiled flex attention, which has no backward on a CPU."""

    def attend(q, k, v, *, score_mod, block_mask, scale, enable_gqa, return_aux, kernel_options):
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=enable_gqa)
        return out, AuxOutput(lse=torch.zeros_like(out[..., 0]))

    monkeypatch.setattr(attention.FlexAttention, "_compiled_flex_attn", attend)
    monkeypatch.setattr(attention, "_compiled_create_block_mask", create_block_mask)


def run(model, *, length=16):
    """Return logits and the gradients of all parameters."""
    tokens = torch.arange(length) * 7 % 100
    positions = torch.arange(length)
    if not IS_PACKED:
        tokens, positions = tokens[None], positions[None]
    model.zero_grad()
    logits = model(tokens, positions, model.get_attention_masks(positions))
    logits.float().pow(2).mean().backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return logits.detach(), gradients
