"""The factor on the layers of a tiny GPT of the local spec: values, gradients, refusals."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from support import megatron_tiny as tiny

from olmo_lns.errors import LNSConfigError
from olmo_lns.integrations.megatron import apply


def lns_model(spec: Any = None, *, exponent: float = 0.5, **changes: Any) -> Any:
    cfg = tiny.config(**changes)
    apply(cfg, exponent=exponent)
    return tiny.build(cfg, spec)


def reference(model: Any, *, exponent: float = 0.5, **changes: Any) -> Any:
    """A stock model with the weights of ``model`` and a hook on each of its block norms."""
    stock = tiny.build(tiny.config(**changes))
    stock.load_state_dict(model.state_dict())
    return tiny.hook_reference(stock, exponent)


@pytest.mark.parametrize(
    ("exponent", "changes"),
    [
        (0.5, {}),
        (1.0, {"normalization": "LayerNorm"}),
        (0.5, {"num_moe_experts": 4}),
        (0.5, {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}),
    ],
    ids=["RMSNorm", "LayerNorm", "MoE", "full recompute"],
)
def test_loss_and_all_gradients_are_those_of_the_hooked_model(exponent: float, changes: dict[str, Any]) -> None:
    model = lns_model(exponent=exponent, **changes)
    assert len(tiny.scaled_norms(model)) == 2 * tiny.LAYERS
    expected = reference(model, exponent=exponent, **{k: v for k, v in changes.items() if "recompute" not in k})
    loss, grads = tiny.gradients(model, tiny.batch())
    right, right_grads = tiny.gradients(expected, tiny.batch())
    stock, _ = tiny.gradients(tiny.build(tiny.config(**changes)), tiny.batch())
    assert loss == pytest.approx(right, rel=1e-6)
    assert abs(loss - stock) > 1e-4  # the factor is felt
    tiny.assert_same_gradients(grads, right_grads, rtol=2e-5)


def test_multi_token_prediction_goes_on_after_the_last_block() -> None:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec

    def model_of(cfg: Any) -> Any:
        spec = tiny.local_spec(cfg)
        return tiny.build(cfg, spec, mtp_block_spec=get_gpt_mtp_block_spec(cfg, spec, use_transformer_engine=False))

    cfg, plain = (tiny.config(mtp_num_layers=2, init_method_std=0.2) for _ in "ab")
    try:
        stock = tiny.hook_reference(model_of(plain))
    except TypeError as error:
        pytest.skip(f"this Megatron builds no MTP layers without Transformer Engine: {error}")
    apply(cfg)
    model = model_of(cfg)
    stock.load_state_dict(model.state_dict())
    for number, mtp in enumerate(stock.mtp.layers, start=tiny.LAYERS + 1):
        inner = getattr(mtp, "mtp_model_layer", None) or mtp.transformer_layer
        tiny.hook_layer(inner, number**-0.5)
    loss, grads = tiny.gradients(model, tiny.batch())
    right, right_grads = tiny.gradients(stock, tiny.batch())
    assert loss == pytest.approx(right, rel=1e-6)
    tiny.assert_same_gradients(grads, right_grads, rtol=2e-5)


def test_multi_latent_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the layer's own two norms, not those of q and of the compressed keys and values.

    Megatron's local attention core does not take the arguments that MLA gives it, with or without LNS: ours drops them.
    """
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import MLATransformerConfig, multi_latent_attention
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    class Core(DotProductAttention):
        def __init__(self, *args: Any, k_channels: int = 0, v_channels: int = 0, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)

    if not isinstance(
        getattr(multi_latent_attention, "TELinear", Core), type
    ):  # 0.16 asks for instances of what TE lacks
        monkeypatch.setattr(multi_latent_attention, "TELinear", Core)
    heads = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_head_dim": 4, "qk_pos_emb_head_dim": 4, "v_head_dim": 8}
    cfg, plain = (
        tiny.config(kind=MLATransformerConfig, **heads, kv_channels=8, rope_type="rope", apply_rope_fusion=False,
                    qk_layernorm=True, init_method_std=0.2)
        for _ in "ab"
    )  # fmt: skip
    spec = get_gpt_layer_local_spec(multi_latent_attention=True, qk_layernorm=True, normalization="RMSNorm")
    spec.submodules.self_attention.submodules.core_attention = Core
    apply(cfg)
    model, stock = tiny.build(cfg, spec), tiny.build(plain, spec)
    stock.load_state_dict(model.state_dict())
    assert len(tiny.scaled_norms(model)) == 2 * tiny.LAYERS
    loss, grads = tiny.gradients(model, tiny.batch())
    right, right_grads = tiny.gradients(tiny.hook_reference(stock), tiny.batch())
    assert loss == pytest.approx(right, rel=1e-6)
    tiny.assert_same_gradients(grads, right_grads, rtol=2e-5)


def test_two_sites_a_layer_with_the_global_number() -> None:
    model = lns_model()
    sites = [(norm.lns_sites[0].layer_number, norm.lns_scale) for norm in tiny.scaled_norms(model)]
    assert sites == [(block, block**-0.5) for block in (1, 1, 2, 2, 3, 3, 4, 4)]
    assert not tiny.scaled_norms(model.decoder.final_layernorm)


def test_parameter_names_and_checkpoint_keys_are_those_of_stock() -> None:
    model, stock = lns_model(), tiny.build(tiny.config())
    assert list(dict(model.named_parameters())) == list(dict(stock.named_parameters()))
    assert list(model.state_dict()) == list(stock.state_dict())
    assert {k: v.key for k, v in _tensors(model)} == {k: v.key for k, v in _tensors(stock)}
    assert isinstance(model.decoder.layers[0].input_layernorm, torch.nn.RMSNorm)


def _tensors(model: Any) -> list[tuple[str, Any]]:
    return [(k, v) for k, v in model.sharded_state_dict().items() if hasattr(v, "key")]


def test_a_norm_survives_deepcopy_and_another_dtype() -> None:
    norm = copy.deepcopy(lns_model().decoder.layers[3].input_layernorm).to(torch.bfloat16)
    x = torch.randn(8, 1, tiny.HIDDEN, dtype=torch.bfloat16)
    stock = torch.nn.RMSNorm(tiny.HIDDEN, eps=1e-6, dtype=torch.bfloat16)
    y = norm(x)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.float(), stock(x.float()) * 0.5, rtol=1e-2, atol=1e-2)


def test_without_the_flag_the_model_is_stock_bit_for_bit() -> None:
    model = tiny.build(tiny.config())
    assert tiny.scaled_norms(model) == []
    assert type(model.decoder.layers[0].input_layernorm) is torch.nn.RMSNorm
    std = 0.02 / (2 * tiny.LAYERS) ** 0.5
    assert model.decoder.layers[0].mlp.linear_fc2.weight.std().item() == pytest.approx(std, rel=0.1)


def test_apply_to_a_built_model_equals_apply_to_its_config() -> None:
    model = tiny.build(tiny.config())
    other = lns_model()
    other.load_state_dict(model.state_dict())
    assert apply(model) == 2 * tiny.LAYERS
    assert tiny.gradients(model, tiny.batch())[0] == tiny.gradients(other, tiny.batch())[0]


def test_apply_to_one_layer() -> None:
    layer = tiny.build(tiny.config()).decoder.layers[2]
    assert apply(layer) == 2
    assert {norm.lns_scale for norm in tiny.scaled_norms(layer)} == {3**-0.5}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"use_transformer_engine_op_fuser": True}, "use_transformer_engine_op_fuser"),
        ({"inference_fuse_tp_communication": True}, "inference_fuse_tp_communication"),
        ({"enable_mhc_connections": True}, "enable_mhc_connections"),
        ({"transformer_impl": "inference_optimized"}, "transformer_impl='inference_optimized'"),
        ({"heterogeneous_block_specs": True}, "heterogeneous_block_specs"),
        ({"batch_invariant_mode": True}, "batch_invariant_mode"),
    ],
)
def test_settings_that_are_refused(change: dict[str, Any], words: str) -> None:
    cfg = tiny.config()
    apply(cfg)
    for name, value in change.items():  # set late: not every version knows each of them
        setattr(cfg, name, value)
    for refuses in (apply, tiny.build)[: 1 if "batch" in words else 2]:  # which main builds with TE only
        with pytest.raises(LNSConfigError, match=words):
            refuses(cfg)


def test_a_layer_without_a_norm_is_refused() -> None:
    from megatron.core.transformer.identity_op import IdentityOp

    cfg = tiny.config()
    spec = copy.deepcopy(tiny.local_spec(cfg))
    spec.submodules.pre_mlp_layernorm = IdentityOp
    apply(cfg)
    with pytest.raises(LNSConfigError, match=r"TransformerLayer 1 has 0 norms in front of its MLP \(none\)"):
        tiny.build(cfg, spec)


def test_cross_attention_is_refused() -> None:
    layer = tiny.build(tiny.config()).decoder.layers[0]
    layer.cross_attention = torch.nn.Identity()
    with pytest.raises(LNSConfigError, match="cross attention"):
        apply(layer)


def test_an_unknown_norm_is_multiplied() -> None:
    class Doubling(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return 2 * x, x

    layer = tiny.build(tiny.config()).decoder.layers[3]
    layer.input_layernorm = Doubling()
    apply(layer)
    assert all(torch.equal(y, torch.ones(3)) for y in layer.input_layernorm(torch.ones(3)))  # not the residual
    assert "output multiplied" in layer.input_layernorm.lns_method


def test_a_target_that_is_none_is_refused() -> None:
    with pytest.raises(LNSConfigError, match="cannot apply LayerNorm Scaling to dict"):
        apply({})
    with pytest.raises(LNSConfigError, match="holds no TransformerLayer"):
        apply(torch.nn.Linear(2, 2))


def test_after_the_first_forward_nothing_stands_in_a_modules_way() -> None:
    model = lns_model()
    copied = copy.deepcopy(model.decoder.layers[0].input_layernorm)
    for each, waiting in ((copied, 1), (model, 3 * tiny.LAYERS), (model, 0)):
        assert len([m for m in each.modules() if "forward" in m.__dict__]) == waiting
        each(torch.ones(tiny.HIDDEN)) if each is copied else tiny.loss_of(each, tiny.batch())
        assert not [m for m in each.modules() if "forward" in m.__dict__]


def test_a_layer_that_does_not_run_its_norm_is_refused() -> None:
    """With the message at the first forward; Megatron's own case, the op fuser, is in test_te.py."""
    model = lns_model()
    model.decoder.layers[1].pre_mlp_layernorm = torch.nn.RMSNorm(tiny.HIDDEN)
    with pytest.raises(LNSConfigError, match=r"TransformerLayer 2 did not call the forward of pre_mlp_layernorm"):
        tiny.loss_of(model, tiny.batch())


def test_the_start_up_line(capsys: pytest.CaptureFixture[str]) -> None:
    lns_model()
    out = capsys.readouterr().out
    assert out.count("LayerNorm Scaling on") == 1
    assert "8 norms (RMSNorm), 8 in this process (blocks 1-4); s = 1 (block 1) to 0.5 (block 4); exponent 0.5" in out
    assert "scaled initialization off" in out
