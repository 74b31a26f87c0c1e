"""A tiny GPT of Megatron Core, and references for LayerNorm Scaling and other schemes that share no code with them.

The reference is the stock model with a forward hook on each norm before attention and MLP. The hook
multiplies the norm's output. That is slow, and right because autograd differentiates the product.
"""

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


def under(scheme="lns", *, kind=None, keep_scaled_init=False, **changes):
    """A config with ``scheme`` applied to it."""
    from olmo_lns.integrations.megatron import apply

    cfg = config(kind, **changes)
    apply(cfg, scheme=scheme, keep_scaled_init=keep_scaled_init)
    return cfg


def model_of(scheme="lns", spec=None, **changes):
    return build(under(scheme, **changes), spec)


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


def spec_with(cfg, norm=ParallelRMSNorm):
    """The local spec of a block with another norm; by default one that allows sequence parallelism."""
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

    layer = local_spec(cfg)
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = norm
    return TransformerBlockSubmodules(layer_specs=[layer] * cfg.num_layers, layer_norm=norm)


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


def hook_reference(model, exponent=0.5):
    """Turn a stock model with standalone norms into the reference."""
    for layer in model.decoder.layers:
        hook_layer(layer, float(layer.layer_number) ** -exponent)
    return model


def hook_layer(layer, factor):
    for norm in (layer.input_layernorm, layer.pre_mlp_layernorm):
        norm.register_forward_hook(lambda module, inputs, output: output * factor)


def equation(model, scheme, learned):
    """Turn a stock model into one whose sub-layers follow ``scheme``'s equation, in the model's dtype.

    :param learned: parameters of the scheme by name (``decoder.layers.0.self_attn_bda.gate``), leaves of the graph.
    """
    name, _, exponent = scheme.partition(":exponent=")
    if name == "lns":
        return hook_reference(model, float(exponent or 0.5))
    for layer in model.decoder.layers:
        for holder, slot, of_sub_layer in (
            ("self_attention", "self_attn_bda", "lnsafterattn"),
            ("mlp", "mlp_bda", "lnsafterff"),
        ):
            prefix = f"decoder.layers.{layer.layer_number - 1}.{slot}."
            p = {k.removeprefix(prefix): v for k, v in learned.items() if k.startswith(prefix)}
            scaled = name in ("lnsafterbranch", "sandwich_depth", of_sub_layer)
            factor = layer.layer_number**-0.5 if scaled else 1.0

            def hook(module, inputs, output, p=p, factor=factor):
                h, bias = output
                h = h if bias is None else h + bias
                if "norm.weight" in p:
                    h = h - h.mean(-1, keepdim=True) if "norm.bias" in p else h
                    h = h / torch.sqrt((h**2).mean(-1, keepdim=True) + 1e-6)
                    h = h * p["norm.weight"] + p.get("norm.bias", 0)
                return factor * p.get("gate", 1.0) * h, None

            getattr(layer, holder).register_forward_hook(hook)
    return model


def gradients(model, tokens):
    """Loss, and the gradient of every parameter."""
    model.zero_grad(set_to_none=True)
    loss = loss_of(model, tokens)
    loss.backward()
    missing = [name for name, p in model.named_parameters() if p.grad is None]
    if missing:
        raise AssertionError(f"no gradient for {missing}")
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


def assert_same_step(model, expected, learned=(), rename=str):
    """Loss and gradients are the same; each error is relative to the tensor's largest element, so small tensors count.

    :param learned: parameters of ``expected`` that its hooks hold. :param rename: name -> name in ``expected``.
    """
    loss, grads = gradients(model, batch())
    right, right_grads = gradients(expected, batch())
    right_grads |= {name: value.grad for name, value in dict(learned).items()}
    if not abs(loss - right) < 1e-6 * abs(right):
        raise AssertionError(f"loss {loss!r}, expected {right!r}")
    # The gradient of a skipinit gate is one number: a sum over all elements, in fp32.
    rtol = 1e-4 if any(value.numel() == 1 for value in right_grads.values()) else 2e-5
    found = {rename(name): value.double() for name, value in grads.items()}
    if set(found) != set(right_grads):
        raise AssertionError(f"gradients of {sorted(set(found) ^ set(right_grads))} on one side only")
    for name, value in right_grads.items():
        error = (found[name] - value.double()).abs().max() / value.double().abs().max()
        if not error < rtol:  # no assert: some callers run under PYTHONOPTIMIZE
            raise AssertionError(f"{name}: gradient off by {error:.2e} of its largest element, expected < {rtol:g}")


def assert_equation(model, scheme, *, rename=str, centered=False, dtype=torch.float64, **changes):
    """``model`` equals the stock model of the local spec in ``dtype``, with the scheme's equation in hooks.

    :param rename: name -> name in the local spec. :param centered: gains of ``model`` are stored minus one.
    :param changes: of the stock model's config.
    """
    stock = build(config(**changes)).to(dtype)
    own = {rename(name): value.detach().to(dtype) for name, value in model.named_parameters()}
    gains = [name for name in own if name.endswith(("layernorm.weight", "bda.norm.weight"))]
    own |= {name: own[name] + 1 for name in gains if centered}
    learned = {name: own.pop(name).requires_grad_() for name in list(own) if "_bda." in name}
    stock.load_state_dict(own, strict=False)
    if missing := set(own) ^ set(dict(stock.named_parameters())):
        raise AssertionError(f"parameters of one side only: {sorted(missing)}")
    assert_same_step(model, equation(stock, scheme, learned), learned, rename)
