"""The factor on the layers of a tiny GPT of the local spec, and on one norm at a time: values, gradients, refusals."""

import contextlib
import copy
import io

import pytest
import torch
from support import megatron_tiny as tiny

from olmo_lns.errors import LNSConfigError
from olmo_lns.integrations.megatron import apply
from olmo_lns.integrations.megatron.norms import attach_norm
from olmo_lns.integrations.norm_sites import Site
from olmo_lns.schemes import LNS


def test_mtp_layers_continue_the_numbers_of_the_blocks():
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec

    def model_of(cfg):
        spec = tiny.local_spec(cfg)
        return tiny.build(cfg, spec, mtp_block_spec=get_gpt_mtp_block_spec(cfg, spec, use_transformer_engine=False))

    how = {"mtp_num_layers": 2, "init_method_std": 0.2}
    try:
        stock = tiny.hook_reference(model_of(tiny.config(**how)))
    except TypeError as error:
        pytest.skip(f"this Megatron builds no MTP layers without Transformer Engine: {error}")
    model = model_of(tiny.under(**how))
    stock.load_state_dict(model.state_dict())
    for number, mtp in enumerate(stock.mtp.layers, start=tiny.LAYERS + 1):
        tiny.hook_layer(getattr(mtp, "mtp_model_layer", None) or mtp.transformer_layer, number**-0.5)
    tiny.assert_same_step(model, stock)


def test_under_multi_latent_attention_only_the_two_norms_of_the_layer_are_scaled(monkeypatch):
    """The norms of q and of the compressed keys and values have no factor.

    With or without LNS, Megatron's local attention core does not take MLA's arguments; ``Core`` drops them.
    """
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import MLATransformerConfig, multi_latent_attention
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    class Core(DotProductAttention):
        def __init__(self, *args, k_channels=0, v_channels=0, **kwargs):
            super().__init__(*args, **kwargs)

    if not isinstance(getattr(multi_latent_attention, "TELinear", Core), type):  # 0.16 needs it even without TE
        monkeypatch.setattr(multi_latent_attention, "TELinear", Core)
    how = dict(
        kind=MLATransformerConfig, q_lora_rank=16, kv_lora_rank=16, qk_head_dim=4, qk_pos_emb_head_dim=4, v_head_dim=8,
        kv_channels=8, rope_type="rope", apply_rope_fusion=False, qk_layernorm=True, init_method_std=0.2,
    )  # fmt: skip
    spec = get_gpt_layer_local_spec(multi_latent_attention=True, qk_layernorm=True, normalization="RMSNorm")
    spec.submodules.self_attention.submodules.core_attention = Core
    model, stock = tiny.model_of(spec=spec, **how), tiny.build(tiny.config(**how), spec)
    stock.load_state_dict(model.state_dict())
    assert len(tiny.scaled_norms(model)) == 2 * tiny.LAYERS
    tiny.assert_same_step(model, tiny.hook_reference(stock))


def keys_of(model):
    keys = {k: v.key for k, v in model.sharded_state_dict().items() if hasattr(v, "key")}
    return [list(dict(model.named_parameters())), list(model.state_dict()), keys]


def test_every_layer_has_two_sites_with_its_global_number_and_the_keys_of_stock():
    model, stock = tiny.model_of(), tiny.build(tiny.config())
    sites = [(norm.lns_sites[0].layer_number, norm.lns_scale) for norm in tiny.scaled_norms(model)]
    assert sites == [(block, block**-0.5) for block in (1, 1, 2, 2, 3, 3, 4, 4)]
    assert not tiny.scaled_norms(model.decoder.final_layernorm)
    assert keys_of(model) == keys_of(stock)
    assert isinstance(model.decoder.layers[0].input_layernorm, torch.nn.RMSNorm)
    assert tiny.scaled_norms(stock) == [] and type(stock.decoder.layers[0].input_layernorm) is torch.nn.RMSNorm
    std = 0.02 / (2 * tiny.LAYERS) ** 0.5
    assert stock.decoder.layers[0].mlp.linear_fc2.weight.std().item() == pytest.approx(std, rel=0.1)


def test_apply_to_a_built_model_or_layer_equals_apply_to_its_config():
    model, other, stock = tiny.build(tiny.config()), tiny.model_of(), tiny.build(tiny.config())
    other.load_state_dict(model.state_dict())
    assert apply(model) == 2 * tiny.LAYERS
    assert [apply(layer) for layer in stock.decoder.layers] == [2] * tiny.LAYERS
    losses = {tiny.gradients(each, tiny.batch())[0] for each in (model, other, stock)}
    assert len(losses) == 1


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("use_transformer_engine_op_fuser", True),
        ("inference_fuse_tp_communication", True),
        ("enable_mhc_connections", True),
        ("transformer_impl", "inference_optimized"),
        ("heterogeneous_block_specs", True),
        ("batch_invariant_mode", True),
    ],
)
def test_a_setting_that_lns_does_not_support_is_refused(name, value):
    setattr(cfg := tiny.under(), name, value)  # set late: not every version knows each of them
    for refuses in (apply, tiny.build)[: 1 if "batch" in name else 2]:  # main builds batch_invariant_mode with TE only
        with pytest.raises(LNSConfigError, match=f"{name}={value!r}"):
            refuses(cfg)


def test_a_layer_without_a_norm_or_with_a_third_sub_layer_is_refused():
    from megatron.core.transformer.identity_op import IdentityOp

    spec = copy.deepcopy(tiny.local_spec(cfg := tiny.under()))
    spec.submodules.pre_mlp_layernorm = IdentityOp
    with pytest.raises(LNSConfigError, match=r"TransformerLayer 1 has 0 norms in front of its MLP \(none\)"):
        tiny.build(cfg, spec)
    layer = tiny.build(tiny.config()).decoder.layers[0]
    layer.cross_attention = torch.nn.Identity()
    with pytest.raises(LNSConfigError, match="cross attention"):
        apply(layer)


def test_the_output_of_an_unknown_norm_is_multiplied():
    class Doubling(torch.nn.Module):
        def forward(self, x):
            return 2 * x, x

    layer = tiny.build(tiny.config()).decoder.layers[3]
    layer.input_layernorm = Doubling()
    apply(layer)
    assert all(torch.equal(y, torch.ones(3)) for y in layer.input_layernorm(torch.ones(3)))  # the residual is kept
    assert "output multiplied" in layer.input_layernorm.lns_method


def test_a_layer_that_does_not_run_its_norm_is_refused():
    """The first forward finds it. te_cases.py has Megatron's own case, the op fuser."""
    model = tiny.model_of()
    model.decoder.layers[1].pre_mlp_layernorm = torch.nn.RMSNorm(tiny.HIDDEN)
    with pytest.raises(LNSConfigError, match=r"TransformerLayer 2 did not call the forward of pre_mlp_layernorm"):
        tiny.loss_of(model, tiny.batch())


WIDTH, SCALE, EPS = 24, 3**-0.5, 1e-5
SITE = Site(LNS, 3, 4, "attn")


class PythonLayerNorm(torch.autograd.Function):
    """Apex's function in Python: backward uses the gain that forward was given, and returns its gradient."""

    @staticmethod
    def forward(ctx, x, weight, bias, shape, eps, memory_efficient=False):
        rsigma = torch.rsqrt(x.var(-1, keepdim=True, unbiased=False) + eps)
        unit = (x - x.mean(-1, keepdim=True)) * rsigma
        ctx.save_for_backward(unit, weight, rsigma)
        return unit * weight + bias

    @staticmethod
    def backward(ctx, upstream):
        unit, weight, rsigma = ctx.saved_tensors
        g = upstream * weight
        dx = rsigma * (g - g.mean(-1, keepdim=True) - unit * (g * unit).mean(-1, keepdim=True))
        return dx, (upstream * unit).flatten(0, -2).sum(0), upstream.flatten(0, -2).sum(0), None, None, None


@pytest.fixture
def apex(monkeypatch):
    """Megatron's wrapper of Apex, with its CUDA function replaced, and the settings that it needs."""
    from megatron.core.fusions import fused_layer_norm

    monkeypatch.setattr(fused_layer_norm, "HAVE_FUSED_LAYER_NORM", True)
    monkeypatch.setattr(fused_layer_norm, "FusedLayerNormAffineFunction", PythonLayerNorm, raising=False)
    return fused_layer_norm.FusedLayerNorm, {"normalization": "LayerNorm", "persist_layer_norm": False}


@pytest.mark.parametrize("centered", [False, True])
def test_megatrons_wrapper_of_apex_computes_the_equation(centered, apex):
    kind, how = apex
    cfg = tiny.under(layernorm_zero_centered_gamma=centered, init_method_std=0.2, **how)
    model = tiny.perturb(tiny.build(cfg, tiny.spec_with(cfg, kind)))
    assert {norm.lns_method for norm in tiny.scaled_norms(model)} == {"folded into the norm's gain"}
    tiny.assert_equation(model, "lns", centered=centered, normalization="LayerNorm")
    norm = model.decoder.layers[2].input_layernorm
    for wrong in (False, True):  # the parameters are back after a forward, even one that fails
        with pytest.raises(Exception, match="must match") if wrong else contextlib.nullcontext():
            norm(torch.randn(2, tiny.HIDDEN + wrong))
        assert norm.weight is norm._parameters["weight"] and norm.zero_centered_gamma is centered


def test_a_norm_that_also_returns_the_residual_leaves_it_unscaled():
    class TEFusedResidualRMSNorm(torch.nn.RMSNorm):
        def forward(self, x):
            return super().forward(x), x

    norm = TEFusedResidualRMSNorm(WIDTH, eps=EPS)
    x = torch.randn(4, WIDTH)
    plain = torch.nn.functional.rms_norm(x, (WIDTH,), None, EPS)
    attach_norm(norm, SITE)
    y, residual = norm(x)
    assert residual is x
    torch.testing.assert_close(y, plain * SCALE)


def test_a_fused_linear_that_is_not_megatrons_is_refused():
    class LayerNormLinear(torch.nn.Linear):
        layer_norm_weight = torch.ones(WIDTH)

    with pytest.raises(LNSConfigError, match="is not Megatron's TELayerNormColumnParallelLinear"):
        attach_norm(LayerNormLinear(WIDTH, 2), SITE)


@pytest.mark.parametrize("kind", ["RMSNorm", "Apex"])
def test_a_scaled_norm_keeps_its_factor_when_saved_or_copied(kind, apex):
    norm = apex[0](tiny.config(**apex[1]), WIDTH) if kind == "Apex" else torch.nn.RMSNorm(WIDTH, eps=EPS)
    attach_norm(norm, SITE)
    file = io.BytesIO()
    torch.save(torch.nn.Sequential(norm), file)
    file.seek(0)
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(2))
    for copied in (torch.load(file, weights_only=False)[0], copy.deepcopy(norm)):
        assert type(copied) is type(norm) and (copied.lns_scale, copied.lns_sites) == (SCALE, (SITE,))
        assert torch.equal(copied(x), norm(x))
        y = copied.to(torch.bfloat16)(x.bfloat16())
        assert y.dtype == torch.bfloat16
        torch.testing.assert_close(y.float(), norm(x), rtol=1e-2, atol=1e-2)


def test_a_norm_refuses_a_second_factor():
    attach_norm(norm := torch.nn.RMSNorm(WIDTH), SITE)
    with pytest.raises(LNSConfigError, match="scheme lns already"):
        attach_norm(norm, SITE)
