"""The Transformer Engine cases, in a process of their own; prints one JSON object.

    PYTHONOPTIMIZE=1 python -m support.te_worker      (TE asserts that there is a GPU)

Each case builds a GPT of the TE spec with LayerNorm Scaling and compares it with the hooked stock
model of the local spec that has the same weights: two implementations that share no norm.
"""

from __future__ import annotations

import json
import sys
import traceback
from typing import Any, Callable

from support import te_python
from support.megatron_cpu import single_process

te_python.install()

import torch  # noqa: E402

from support import megatron_tiny as tiny  # noqa: E402

#: Where the TE spec keeps what the local spec calls by the second name.
NAMES = (
    ("self_attention.linear_qkv.layer_norm_", "input_layernorm."),
    ("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm."),
)


class NoCore(torch.nn.Module):
    """An attention core for models that are built, not run."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()


def te_spec(cfg: Any, *, core: type | None = None, **kwargs: Any) -> Any:
    """The TE spec; the attention core, which runs on GPUs only, is Megatron's own or ``core``."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    spec = get_gpt_layer_with_transformer_engine_spec(num_experts=cfg.num_moe_experts, moe_grouped_gemm=False, **kwargs)
    spec.submodules.self_attention.submodules.core_attention = core or DotProductAttention
    return spec


def local_name(name: str) -> str:
    for te, local in NAMES:
        name = name.replace(te, local)
    return name


def perturbed(model: Any, seed: int = 3) -> Any:
    """Gains that are not all one, so that a wrong gradient cannot hide."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            with torch.no_grad():
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return model


def compare(normalization: str = "RMSNorm", scheme: str = "lns", **changes: Any) -> dict[str, Any]:
    """Largest relative error of any gradient, and both losses."""
    from olmo_lns.integrations import norm_sites
    from olmo_lns.integrations.megatron import apply

    reference_changes = {k: v for k, v in changes.items() if k not in ("recompute_modules", "recompute_granularity")}
    cfg = tiny.config(normalization=normalization, **changes)
    apply(cfg, scheme=scheme)
    model = perturbed(tiny.build(cfg, te_spec(cfg)))
    centered = reference_changes.pop("layernorm_zero_centered_gamma", False)
    plain = tiny.config(normalization=normalization, **reference_changes)
    stock = tiny.build(plain, tiny.local_spec(plain))
    values = {local_name(k): v for k, v in model.state_dict().items() if v is not None}
    block_gains = [k for k in values if "layernorm.weight" in k or "bda.norm.weight" in k]
    if centered:
        values |= {k: values[k] + 1 for k in block_gains}
    stock.load_state_dict({k: v for k, v in values.items() if not k.endswith("_extra_state")}, strict=False)
    loss, grads = tiny.gradients(model, tiny.batch())
    learned = {
        k: v.detach().clone().requires_grad_() for k, v in values.items() if "_bda." in k and v.is_floating_point()
    }
    expected = tiny.hook_reference(stock) if scheme == "lns" else tiny.branch_reference(stock, scheme, learned)
    right, right_grads = tiny.gradients(expected, tiny.batch())
    right_grads |= {k: v.grad for k, v in learned.items() if v.grad is not None}
    grads = {local_name(k): v for k, v in grads.items()}
    errors = {k: _error(grads[k], v) for k, v in right_grads.items()}
    worst = max(errors, key=lambda name: errors[name])
    return {
        "loss": loss,
        "reference": right,
        "same_parameters": set(grads) == set(right_grads),
        "worst": worst,
        "error": errors[worst],
        "norms": sorted({type(m).__module__.split(".")[0] for n, m in model.named_modules() if n.endswith("bda.norm")}),
        "sites": [(type(m).__name__, site.layer_number, m.lns_method) for _, m, site in norm_sites.sites(model)],
    }


def _error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected.double()).abs().max() / expected.double().abs().max().clamp_min(1e-12))


def keys() -> dict[str, Any]:
    """Checkpoint keys without and with LNS, and the initialization."""
    from olmo_lns.integrations.megatron import apply

    stock_cfg, cfg = tiny.config(), tiny.config()
    apply(cfg)
    models = [tiny.build(each, te_spec(each)) for each in (stock_cfg, cfg)]
    return {
        "state_dict": [list(m.state_dict()) for m in models],
        "sharded": [sorted(f"{k}: {getattr(v, 'key', '')}" for k, v in m.sharded_state_dict().items()) for m in models],
        "std": [float(torch.cat([x.mlp.linear_fc2.weight.flatten() for x in m.decoder.layers]).std()) for m in models],
    }


def mtp() -> list[Any]:
    """Depths in a model with two MTP modules."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec

    from olmo_lns.integrations.megatron import apply

    cfg = tiny.config(mtp_num_layers=2)
    apply(cfg)
    spec = te_spec(cfg)
    model = tiny.build(cfg, spec, mtp_block_spec=get_gpt_mtp_block_spec(cfg, spec, use_transformer_engine=True))
    return [m.lns_sites[0].layer_number for m in tiny.scaled_norms(model)]


def mla() -> dict[str, Any]:
    """Sites of an MLA layer: neither the q nor the kv norm, though both are fused linears with a gain."""
    from megatron.core.transformer import MLATransformerConfig

    from olmo_lns.integrations.megatron import apply
    from olmo_lns.integrations.megatron.norms import is_fused_linear

    cfg = tiny.config(
        kind=MLATransformerConfig, q_lora_rank=16, kv_lora_rank=16, qk_head_dim=8, qk_pos_emb_head_dim=8, v_head_dim=8,
        rope_type="rope", apply_rope_fusion=False, qk_layernorm=True,
    )  # fmt: skip
    apply(cfg)
    model = tiny.build(cfg, te_spec(cfg, core=NoCore, multi_latent_attention=True, qk_layernorm=True))
    fused = {name.split(".")[-1] for name, m in model.named_modules() if is_fused_linear(m)}
    scaled = [name.split(".", 3)[-1] for name, m in model.named_modules() if hasattr(m, "lns_scale")]
    return {"sites": scaled, "others": sorted(fused - {name.split(".")[-1] for name in scaled})}


def refused(*, spec: Any = te_spec, scheme: str = "lns", **kwargs: Any) -> str:
    """What a model of this spec says, built and run."""
    from olmo_lns.errors import LNSConfigError
    from olmo_lns.integrations.megatron import apply

    tex: Any = sys.modules["transformer_engine_torch"]
    tex.swiglu = lambda x, quantizer: torch.nn.functional.silu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1]
    cfg = tiny.config()
    apply(cfg, scheme=scheme)
    try:
        model = tiny.build(cfg, spec(cfg, **kwargs))
        for _ in range(2):
            tiny.loss_of(model, tiny.batch())
    except LNSConfigError as error:
        return str(error)
    return "runs"


def subclassed_spec(cfg: Any) -> Any:
    """A fused linear with a forward of its own, which nobody verified."""
    spec = te_spec(cfg)
    base = spec.submodules.self_attention.submodules.linear_qkv

    class Own(base):  # type: ignore[misc, valid-type]
        def forward(self, x: torch.Tensor) -> Any:
            return super().forward(x)

    spec.submodules.self_attention.submodules.linear_qkv = Own
    return spec


CASES: dict[str, Callable[[], Any]] = {
    "RMSNorm": compare,
    "LayerNorm": lambda: compare("LayerNorm"),
    "zero-centred gain": lambda: compare(layernorm_zero_centered_gamma=True),
    "MoE": lambda: compare(num_moe_experts=4),
    "selective recompute": lambda: compare(
        num_moe_experts=4, recompute_granularity="selective", recompute_modules=["layernorm"]
    ),
    "sandwich_depth": lambda: compare(scheme="sandwich_depth"),
    "sandwich_depth, LayerNorm": lambda: compare("LayerNorm", scheme="sandwich_depth"),
    "sandwich_depth, zero-centred gain": lambda: compare(scheme="sandwich_depth", layernorm_zero_centered_gamma=True),
    "layerscale, MoE, selective recompute": lambda: compare(
        scheme="layerscale", num_moe_experts=4, recompute_granularity="selective", recompute_modules=["layernorm"]
    ),
    "lnsafterbranch": lambda: compare(scheme="lnsafterbranch"),
    "keys": keys,
    "MTP": mtp,
    "MLA": mla,
    "op fuser": lambda: refused(use_te_op_fuser=True),
    "op fuser, branch": lambda: refused(use_te_op_fuser=True, scheme="lnsafterbranch"),
    "subclass": lambda: refused(spec=subclassed_spec),
}


def main() -> int:
    from olmo_lns.integrations.megatron import register

    results: dict[str, Any] = {}
    register()
    with single_process():
        for name in sys.argv[1:] or CASES:
            try:
                results[name] = CASES[name]()
            except Exception:  # one broken case must not hide the others; its test shows this
                results[name] = {"failed": traceback.format_exc()}
    print("RESULTS " + json.dumps(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
