"""The TE spec: Transformer Engine's own Python over a strict stand-in for its C++ module. test_te.py runs this file.

It tests wiring and gradients; test_gpu.py tests the kernels. A GPT of the TE spec under a scheme is compared with the
stock model of the local spec, which has the same weights and the equation in hooks: they share no norm.
"""

import pytest
from support import te_python

try:
    te_python.install()
except te_python.Unavailable as reason:
    pytest.skip(str(reason), allow_module_level=True)

import torch
from support import megatron_tiny as tiny
from support.hooked import hooked

from olmo_lns import sites
from olmo_lns.errors import LNSConfigError, MeasurementError
from olmo_lns.integrations.megatron.norms import is_fused

BLOCKS = [block for block in range(1, tiny.LAYERS + 1) for _ in "ab"]
SELECTIVE = {"num_moe_experts": 4, "recompute_granularity": "selective", "recompute_modules": ["layernorm"]}
#: Starts of names in the TE spec, and what the local spec has in their place.
NAMES = (
    ("self_attention.linear_qkv.layer_norm_", "input_layernorm."),
    ("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm."),
)


class NoCore(torch.nn.Module):
    """An attention core for models that are built, not run."""

    def __init__(self, *args, **kwargs):
        super().__init__()


def te_spec(cfg, *, core=None, **kwargs):
    """The TE spec with Megatron's own attention core or ``core``, since TE's runs on GPUs only."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    spec = get_gpt_layer_with_transformer_engine_spec(num_experts=cfg.num_moe_experts, moe_grouped_gemm=False, **kwargs)
    spec.submodules.self_attention.submodules.core_attention = core or DotProductAttention
    return spec


def local(name):
    for te, own in NAMES:
        name = name.replace(te, own)
    return name


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"normalization": "LayerNorm"},
        {"layernorm_zero_centered_gamma": True},
        {"add_bias_linear": True, "add_qkv_bias": True},
        {"num_moe_experts": 4},
        SELECTIVE,
    ],
)
def test_loss_and_all_gradients_are_those_of_the_equation(changes):
    model = tiny.perturb(tiny.build(cfg := tiny.under(**changes), te_spec(cfg)))
    plain = {k: v for k, v in changes.items() if not k.startswith("recompute")}
    centered = plain.pop("layernorm_zero_centered_gamma", False)
    stock = tiny.build(tiny.config(**plain))
    own = {local(name): value.detach().clone() for name, value in model.named_parameters()}
    assert set(own) == set(dict(stock.named_parameters()))
    for name in own:
        if centered and name.endswith("layernorm.weight"):  # TE stores these gains minus one
            own[name] += 1
    stock.load_state_dict(own, strict=False)
    tiny.assert_same_step(model, hooked(stock), local)
    found = [(type(m).__name__, type(m).lns_how_applied, site.layer_number) for _, m, site in sites.in_model(model)]
    assert [block for _, _, block in found] == BLOCKS
    assert all(kind == "TELayerNormColumnParallelLinear" and way for kind, way, _ in found[::2])
    assert all(module.lns_backend.name == "te" for _, module, _ in sites.in_model(model))


def test_checkpoint_keys_are_those_of_stock():
    lns, stock = (tiny.build(cfg, te_spec(cfg)) for cfg in (tiny.under(), tiny.config()))
    assert list(lns.state_dict()) == list(stock.state_dict())
    keys = [{k: getattr(v, "key", "") for k, v in model.sharded_state_dict().items()} for model in (lns, stock)]
    assert keys[0] == keys[1]


def test_mla_scales_neither_the_q_nor_the_kv_norm():
    """Both are part of a fused linear with a gain."""
    from megatron.core.transformer import MLATransformerConfig

    cfg = tiny.under(
        kind=MLATransformerConfig, q_lora_rank=16, kv_lora_rank=16, qk_head_dim=8, qk_pos_emb_head_dim=8, v_head_dim=8,
        rope_type="rope", apply_rope_fusion=False, qk_layernorm=True,
    )  # fmt: skip
    model = tiny.build(cfg, te_spec(cfg, core=NoCore, multi_latent_attention=True, qk_layernorm=True))
    scaled = [name.split(".", 3)[-1] for name, m in model.named_modules() if hasattr(m, "lns_scale")]
    assert scaled == ["input_layernorm", "mlp.linear_fc1"] * 4
    fused = {name.split(".")[-1] for name, m in model.named_modules() if is_fused(m)}
    assert fused - {"linear_fc1"} == {"linear_kv_up_proj", "linear_q_up_proj"}


def test_a_norm_whose_forward_is_bypassed_is_refused():
    """Megatron's TEFusedMLP computes with the parameters of linear_fc1 and never calls it."""
    with pytest.raises(LNSConfigError, match="has a TEFusedMLP in its mlp"):
        tiny.build(cfg := tiny.under(), te_spec(cfg, use_te_op_fuser=True))


class Elsewhere:
    def forward(self, x):
        vars(self).pop("layer_norm_weight", None)  # where the scaled gain is, for the length of a forward
        return super().forward(x)


def test_a_fused_linear_whose_bias_would_be_multiplied_too_is_refused():
    """Other forwards of it, which are followed: tests/mutants."""
    spec = te_spec(cfg := tiny.under(add_qkv_bias=True))
    attention = spec.submodules.self_attention.submodules
    attention.linear_qkv = type("Own", (Elsewhere, attention.linear_qkv), {})
    with pytest.raises(MeasurementError, match="block 2, attn .Own"):
        tiny.build(cfg, spec)
