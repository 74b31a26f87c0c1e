"""A tiny GPT of Megatron Core, and its comparison with another."""

import torch

VOCAB, SEQUENCE, BATCH, LAYERS, HIDDEN = 128, 16, 2, 4, 32


def config(kind=None, **changes):
    """A ``TransformerConfig``, or one of another ``kind``."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    values = {
        "num_layers": LAYERS,
        "hidden_size": HIDDEN,
        "num_attention_heads": 4,
        "ffn_hidden_size": 64,
        "use_cpu_initialization": True,
        "normalization": "RMSNorm",
        "layernorm_epsilon": 1e-6,
        "add_bias_linear": False,
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "pipeline_dtype": torch.float32,
    }
    if changes.get("num_moe_experts"):
        values |= {"moe_router_topk": 2, "moe_ffn_hidden_size": 64}
    return (kind or TransformerConfig)(**(values | changes))


def under(*, kind=None, exponent=0.5, keep_scaled_init=False, **changes):
    """A config with LayerNorm Scaling applied to it."""
    from olmo_lns.integrations.megatron import apply

    cfg = config(kind, **changes)
    apply(cfg, exponent=exponent, keep_scaled_init=keep_scaled_init)
    return cfg


def model_of(spec=None, **changes):
    return build(under(**changes), spec)


def local_spec(cfg, **kwargs):
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    return get_gpt_layer_local_spec(num_experts=cfg.num_moe_experts, normalization=cfg.normalization, **kwargs)


def parts_of_mlp(spec):
    """The submodules of a layer's MLP; newer specs name a function with them bound."""
    mlp = spec.submodules.mlp
    return mlp.submodules if hasattr(mlp, "submodules") else mlp.keywords["submodules"]


class ParallelRMSNorm:
    """torch's RMSNorm with the mark that TE sets, which Megatron's own wrapper of torch refuses to set."""

    def __new__(cls, config, hidden_size, eps=1e-5, **kwargs):
        norm = torch.nn.RMSNorm(hidden_size, eps)
        norm.weight.sequence_parallel = config.sequence_parallel
        return norm


def sequence_parallel_spec(cfg):
    """The local spec with norms that allow sequence parallelism."""
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

    layer = local_spec(cfg)
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = ParallelRMSNorm
    return TransformerBlockSubmodules(layer_specs=[layer] * cfg.num_layers, layer_norm=ParallelRMSNorm)


def build(cfg, spec=None, *, vp_stage=None, seed=1234, **kwargs):
    """A GPTModel of this rank's (and chunk's) layers."""
    from megatron.core import parallel_state as ps
    from megatron.core.enums import ModelType
    from megatron.core.models.gpt.gpt_model import GPTModel

    torch.manual_seed(seed)
    where = {} if vp_stage is None else {"vp_stage": vp_stage}
    model = GPTModel(
        config=cfg,
        transformer_layer_spec=local_spec(cfg) if spec is None else spec,
        vocab_size=VOCAB,
        max_sequence_length=SEQUENCE,
        position_embedding_type="rope",
        pre_process=ps.is_pipeline_first_stage(ignore_virtual=vp_stage is None, **where),
        post_process=ps.is_pipeline_last_stage(ignore_virtual=vp_stage is None, **where),
        share_embeddings_and_output_weights=False,
        **where,
        **kwargs,
    )
    model.model_type = ModelType.encoder_or_decoder
    return model


def batch(seed=7, size=BATCH):
    return torch.randint(0, VOCAB, (size, SEQUENCE + 1), generator=torch.Generator().manual_seed(seed))


def inputs(tokens):
    """Tokens, positions and mask for a batch of :func:`batch`."""
    positions = torch.arange(SEQUENCE).expand(len(tokens), -1)
    return tokens[:, :-1], positions, torch.triu(torch.ones(1, 1, SEQUENCE, SEQUENCE, dtype=torch.bool), 1)


def loss_of(model, tokens):
    return model(*inputs(tokens), labels=tokens[:, 1:]).float().mean()


def gradients(model, tokens):
    """Loss, and the gradient of every parameter."""
    model.zero_grad(set_to_none=True)
    loss = loss_of(model, tokens)
    loss.backward()
    return float(loss.detach()), {name: p.grad.detach().clone() for name, p in model.named_parameters()}


def perturb(model, seed=3):
    """Gains, gates and biases that are not all one or zero, so that a wrong gradient cannot hide."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or "gate" in name or name.endswith("bias"):
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return model


def scaled_norms(model):
    """All modules that carry a factor, in order."""
    return [module for module in model.modules() if hasattr(module, "lns_scale")]


def assert_same_step(model, expected, rename=str):
    """Loss and gradients are the same; each error is relative to the tensor's largest element, so small tensors count.

    :param rename: name -> name in ``expected``.
    """
    close = torch.testing.assert_close  # some callers run under PYTHONOPTIMIZE, which removes assert
    loss, grads = gradients(model, batch())
    right, right_grads = gradients(expected, batch())
    close(loss, right, rtol=1e-6, atol=0)
    found = {rename(name): value.double() for name, value in grads.items()}
    if set(found) != set(right_grads):
        raise AssertionError(f"gradients of {sorted(set(found) ^ set(right_grads))} on one side only")
    for name, value in right_grads.items():
        limit = 2e-5 * float(value.abs().max())
        close(found[name], value.double(), rtol=0, atol=limit, msg=lambda text, name=name: f"{name}: {text}")
