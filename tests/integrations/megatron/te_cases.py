"""The TE spec: Transformer Engine's own Python over a strict stand-in for its C++ module. test_te.py runs this file.

It tests wiring and gradients; test_gpu.py tests the kernels. A GPT of the TE spec under a scheme is compared with the
stock model of the local spec, which has the same weights and the equation in hooks: they share no norm.
"""

import sys

import pytest
from support import te_python

try:
    te_python.install()
except te_python.Unavailable as reason:
    pytest.skip(str(reason), allow_module_level=True)

import torch
from support import megatron_tiny as tiny

from olmo_lns.errors import LNSConfigError
from olmo_lns.integrations import norm_sites
from olmo_lns.integrations.megatron.norms import is_fused_linear

FUSED = "folded into the fused kernel's gain"
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
    ("scheme", "changes"),
    [
        ("lns", {}),
        ("lns", {"normalization": "LayerNorm"}),
        ("lns", {"layernorm_zero_centered_gamma": True}),
        ("lns", {"num_moe_experts": 4}),
        ("lns", SELECTIVE),
        ("sandwich_depth", {}),
        ("sandwich_depth", {"normalization": "LayerNorm"}),
        ("sandwich_depth", {"layernorm_zero_centered_gamma": True}),
        ("lnsafterbranch", {}),
        ("layerscale", SELECTIVE),
    ],
)
def test_loss_and_all_gradients_are_those_of_the_equation(scheme, changes):
    model = tiny.perturb(tiny.build(cfg := tiny.under(scheme, **changes), te_spec(cfg)))
    plain = {k: v for k, v in changes.items() if not k.startswith("recompute")}
    centered = plain.pop("layernorm_zero_centered_gamma", False)
    # In fp32: under TE the stock model's final norm is TE's, which knows no fp64.
    tiny.assert_equation(model, scheme, rename=local, centered=centered, dtype=torch.float32, **plain)
    own = {type(m).__module__.split(".")[0] for n, m in model.named_modules() if n.endswith("bda.norm")}
    assert own == ({"transformer_engine"} if "sandwich" in scheme else set())
    sites = [(type(m).__name__, site.layer_number, m.lns_method) for _, m, site in norm_sites.sites(model)]
    if scheme == "lns" and "num_moe_experts" not in changes:
        assert sites == [("TELayerNormColumnParallelLinear", block, FUSED) for block in BLOCKS]
    elif scheme == "lns":
        assert [site[1] for site in sites] == BLOCKS
        assert [site[2] for site in sites[:2]] == [FUSED, "olmo_lns.norm (te)"]


def test_checkpoint_keys_are_those_of_stock():
    lns, stock = (tiny.build(cfg, te_spec(cfg)) for cfg in (tiny.under(), tiny.config()))
    assert list(lns.state_dict()) == list(stock.state_dict())
    keys = [{k: getattr(v, "key", "") for k, v in model.sharded_state_dict().items()} for model in (lns, stock)]
    assert keys[0] == keys[1]


def test_mtp_layers_continue_the_numbers_of_the_blocks():
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec

    spec = te_spec(cfg := tiny.under(mtp_num_layers=2))
    model = tiny.build(cfg, spec, mtp_block_spec=get_gpt_mtp_block_spec(cfg, spec, use_transformer_engine=True))
    assert [m.lns_sites[0].layer_number for m in tiny.scaled_norms(model)] == [*BLOCKS, 5, 5, 6, 6]


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
    fused = {name.split(".")[-1] for name, m in model.named_modules() if is_fused_linear(m)}
    assert fused - {"linear_fc1"} == {"linear_kv_up_proj", "linear_q_up_proj"}


def run(spec, scheme="lns"):
    sys.modules["transformer_engine_torch"].swiglu = lambda x, quantizer: (
        torch.nn.functional.silu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1]
    )
    model = tiny.build(cfg := tiny.under(scheme), spec(cfg))
    for _ in range(2):
        tiny.loss_of(model, tiny.batch())


def test_a_norm_whose_forward_is_bypassed_is_refused():
    """Megatron's TEFusedMLP computes with the parameters of linear_fc1 and never calls it."""
    run(lambda cfg: te_spec(cfg, use_te_op_fuser=True), "lnsafterbranch")  # a branch factor is not bypassed
    with pytest.raises(
        LNSConfigError, match=r"TransformerLayer 1 did not call the forward of mlp.linear_fc1 in its own"
    ):
        run(lambda cfg: te_spec(cfg, use_te_op_fuser=True))


def test_a_fused_linear_with_a_forward_of_its_own_is_refused():
    def spec(cfg):
        found = te_spec(cfg)
        attention = found.submodules.self_attention.submodules

        class Own(attention.linear_qkv):
            def forward(self, x):
                return super().forward(x)

        attention.linear_qkv = Own
        return found

    with pytest.raises(LNSConfigError, match="Own overrides the forward of Megatron's TELayerNormColumnParallelLinear"):
        run(spec)
