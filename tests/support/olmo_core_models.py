"""Small OLMo-core models for the tests of its integration, in every verified version."""

import copy

import torch
import torch.nn.functional as F
from olmo_core.nn.feed_forward import FeedForwardConfig
from olmo_core.nn.layer_norm import LayerNormConfig
from olmo_core.nn.transformer import TransformerConfig

VOCABULARY, WIDTH, LAYERS, HEADS = 64, 32, 4, 4
_TWO = ("attention_norm", "feed_forward_norm")
_THREE = (*_TWO, "feed_forward_moe_norm")
#: Block type -> (scheme, the norms that its factor multiplies).
SCHEMES = {
    "default": ("lns", _TWO),
    "reordered_norm": ("branchln_depth", _TWO),
    "moe": ("lns", _TWO),
    "moe_reordered_norm": ("branchln_depth", _TWO),
    "moe_hybrid": ("lns", _THREE),
    "moe_hybrid_reordered_norm": ("branchln_depth", _THREE),
}
TOKENS = torch.randint(VOCABULARY, (2, 12), generator=torch.Generator().manual_seed(3))


def config(block="default", norm=None, **kwargs):
    """OLMo-core's own config of a Llama-like model, without a scheme."""
    common = dict(d_model=WIDTH, vocab_size=VOCABULARY, n_layers=LAYERS, n_heads=HEADS)
    if block.startswith("moe"):
        common |= dict(num_experts=4, top_k=2, expert_hidden_size=16, dropless=True)
        common |= dict(hybrid="hybrid" in block, reordered_norm="reordered" in block)
        model_config = TransformerConfig.llama_like_moe(**{**common, **kwargs})
        if "hybrid" in block:  # llama_like_moe forgets it
            model_config.block.feed_forward = FeedForwardConfig(hidden_size=48, bias=False)
    else:
        model_config = TransformerConfig.llama_like(**{**common, **kwargs}, block_name=block)
    if norm is not None:
        model_config.block.layer_norm = LayerNormConfig(**norm)
    return model_config


def with_scheme(model_config, **fields):
    """A copy of a config under the scheme that belongs to its block type."""
    from olmo_lns.olmo_core import apply  # a program without this package uses the configs

    return apply(copy.deepcopy(model_config), **{"scheme": SCHEMES[str(model_config.block.name)][0], **fields})


def model(model_config, *, seed=1):
    """Build on meta and draw, as OLMo-core's train modules do; then move gains and biases off 1 and 0."""
    built = model_config.build(init_device="meta")
    cpu = torch.device("cpu")
    built.init_weights(max_seq_len=TOKENS.shape[1], max_local_microbatch_size=TOKENS.numel(), device=cpu)
    if seed is not None:
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in built.named_parameters():
            if "norm" in name or name.endswith("bias"):
                parameter.data.add_(torch.randn(parameter.shape, generator=generator), alpha=0.2)
    return built


def loss_of(logits):
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).double(), TOKENS[:, 1:].flatten())


def dense_experts(self, x, weights, indices, sizes):
    """``ParallelMLPBase.forward`` in plain torch: OLMo-core has Triton kernels only."""
    mlp = self.mlp
    w1, w2, w3 = (w.view(mlp.num_experts, mlp.hidden_size, mlp.d_model) for w in (mlp.w1, mlp.w2, mlp.w3))
    hidden = F.silu(torch.einsum("...d,ehd->...eh", x, w1)) * torch.einsum("...d,ehd->...eh", x, w3)
    out = torch.einsum("...eh,ehd->...ed", hidden, w2)
    chosen = torch.zeros(*x.shape[:-1], mlp.num_experts, dtype=x.dtype).scatter(
        -1, indices.view(*x.shape[:-1], -1), weights.view(*x.shape[:-1], -1).to(x.dtype)
    )
    return torch.einsum("...e,...ed->...d", chosen, out)
