"""A tiny GPT of Megatron Core, and references for LayerNorm Scaling and other schemes that share no code with them.

The reference is the stock model with a forward hook on each norm in front of attention and MLP
that multiplies its output: slow, and right because autograd differentiates the product.
"""

from __future__ import annotations

from typing import Any

import torch

VOCAB, SEQUENCE, BATCH, LAYERS, HIDDEN = 128, 16, 2, 4, 32


def config(kind: Any = None, **changes: Any) -> Any:
    """A ``TransformerConfig``, or one of another ``kind``."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    values: dict[str, Any] = {
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


def local_spec(cfg: Any, **kwargs: Any) -> Any:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    return get_gpt_layer_local_spec(num_experts=cfg.num_moe_experts, normalization=cfg.normalization, **kwargs)


def parts_of_mlp(spec: Any) -> Any:
    """The submodules of a layer's MLP; newer specs name a function with them bound."""
    mlp = spec.submodules.mlp
    return mlp.submodules if hasattr(mlp, "submodules") else mlp.keywords["submodules"]


class ParallelRMSNorm:
    """torch's RMSNorm with the mark that TE sets, which Megatron's own wrapper of torch refuses to set."""

    def __new__(cls, config: Any, hidden_size: int, eps: float = 1e-5, **kwargs: Any) -> Any:
        norm = torch.nn.RMSNorm(hidden_size, eps)
        norm.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        return norm


def sequence_parallel_spec(cfg: Any) -> Any:
    """The local spec with norms that allow sequence parallelism."""
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

    layer = local_spec(cfg)
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = ParallelRMSNorm
    return TransformerBlockSubmodules(layer_specs=[layer] * cfg.num_layers, layer_norm=ParallelRMSNorm)


def build(cfg: Any, spec: Any = None, *, vp_stage: int | None = None, seed: int = 1234, **kwargs: Any) -> Any:
    """A GPTModel of this rank's (and chunk's) layers."""
    from megatron.core import parallel_state as ps
    from megatron.core.enums import ModelType
    from megatron.core.models.gpt.gpt_model import GPTModel

    torch.manual_seed(seed)
    where: dict[str, Any] = {} if vp_stage is None else {"vp_stage": vp_stage}
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


def batch(seed: int = 7, size: int = BATCH) -> torch.Tensor:
    return torch.randint(0, VOCAB, (size, SEQUENCE + 1), generator=torch.Generator().manual_seed(seed))


def loss_of(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    positions = torch.arange(SEQUENCE).expand(len(tokens), -1)
    mask = torch.triu(torch.ones(1, 1, SEQUENCE, SEQUENCE, dtype=torch.bool), 1)
    return model(tokens[:, :-1], positions, mask, labels=tokens[:, 1:]).float().mean()


def hook_reference(model: Any, exponent: float = 0.5) -> Any:
    """Turn a stock model with standalone norms into the reference."""
    for layer in model.decoder.layers:
        hook_layer(layer, float(layer.layer_number) ** -exponent)
    return model


def hook_layer(layer: Any, factor: float) -> None:
    for norm in (layer.input_layernorm, layer.pre_mlp_layernorm):
        norm.register_forward_hook(lambda module, inputs, output: output * factor)


def branch_reference(model: Any, scheme: str, learned: dict[str, torch.Tensor]) -> Any:
    """Turn a stock model into one whose branches are what ``scheme``'s equation says, in the model's dtype.

    :param learned: parameters of the scheme by name (``decoder.layers.0.self_attn_bda.gate``), leaves of the graph.
    """
    for layer in model.decoder.layers:
        for holder, slot in (("self_attention", "self_attn_bda"), ("mlp", "mlp_bda")):
            prefix = f"decoder.layers.{layer.layer_number - 1}.{slot}."
            p = {k.removeprefix(prefix): v for k, v in learned.items() if k.startswith(prefix)}
            root = layer.layer_number**0.5
            attention = holder == "self_attention"

            def norm(h: torch.Tensor, p: dict[str, torch.Tensor] = p) -> torch.Tensor:
                if "norm.bias" in p:
                    h = h - h.mean(-1, keepdim=True)
                h = h / torch.sqrt((h**2).mean(-1, keepdim=True) + 1e-6)
                return h * p["norm.weight"] + p.get("norm.bias", 0)

            branches: dict[str, Any] = {
                "lnsafterbranch": lambda h, root=root: h / root,
                "lnsafterattn": lambda h, root=root, attention=attention: h / root if attention else h,
                "lnsafterff": lambda h, root=root, attention=attention: h if attention else h / root,
                "sandwich": norm,
                "sandwich_depth": lambda h, norm=norm, root=root: norm(h) / root,
                "layerscale": lambda h, p=p: p["gate"] * h,
                "skipinit": lambda h, p=p: p["gate"] * h,
            }

            def hook(module: Any, inputs: Any, output: Any, branch: Any = branches[scheme]) -> Any:
                h, bias = output
                return branch(h if bias is None else h + bias), None

            getattr(layer, holder).register_forward_hook(hook)
    return model


def gradients(model: Any, tokens: torch.Tensor) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss, and the gradient of every parameter."""
    model.zero_grad(set_to_none=True)
    loss = loss_of(model, tokens)
    loss.backward()
    missing = [name for name, p in model.named_parameters() if p.grad is None]
    if missing:
        raise AssertionError(f"no gradient for {missing}")
    return float(loss.detach()), {name: p.grad.detach().clone() for name, p in model.named_parameters()}


def perturb(model: Any, seed: int = 3) -> Any:
    """Gains and gates that are not all one, so that a wrong gradient cannot hide."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or "gate" in name:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return model


def scaled_norms(model: torch.nn.Module) -> list[Any]:
    """All modules that carry a factor, in order."""
    return [module for module in model.modules() if hasattr(module, "lns_scale")]


def assert_same_gradients(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], rtol: float) -> None:
    """Relative to the largest element of each gradient, so that no small tensor is lost among others."""
    if set(found) != set(expected):
        raise AssertionError(f"gradients of {sorted(set(found) ^ set(expected))} on one side only")
    for name, reference in expected.items():
        error = (found[name].double() - reference.double()).abs().max() / reference.double().abs().max()
        if not error < rtol:  # no assert: some callers run under PYTHONOPTIMIZE
            raise AssertionError(f"{name}: gradient off by {error:.2e} of its largest element, expected < {rtol:g}")
