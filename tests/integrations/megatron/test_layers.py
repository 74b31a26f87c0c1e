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


@pytest.mark.parametrize("normalization", ["RMSNorm", "LayerNorm"])
@pytest.mark.parametrize("exponent", [0.5, 1.0])
def test_loss_and_all_gradients_are_those_of_the_hooked_model(normalization: str, exponent: float) -> None:
    model = lns_model(normalization=normalization, exponent=exponent)
    expected = reference(model, normalization=normalization, exponent=exponent)
    for one, other in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.equal(one, other)
    loss, grads = tiny.gradients(model, tiny.batch())
    right, right_grads = tiny.gradients(expected, tiny.batch())
    stock, _ = tiny.gradients(tiny.build(tiny.config(normalization=normalization)), tiny.batch())
    assert loss == pytest.approx(right, rel=1e-6)
    assert abs(loss - stock) > 1e-4  # the factor is felt
    tiny.assert_same_gradients(grads, right_grads, rtol=2e-5)


def test_steps_of_an_optimizer_follow_the_hooked_model() -> None:
    model = lns_model()
    expected = reference(model)
    losses = tiny.train(model)
    assert losses == pytest.approx(tiny.train(expected), rel=1e-5)
    assert losses != pytest.approx(tiny.train(tiny.build(tiny.config())), rel=1e-4)


def test_moe_layers() -> None:
    model = lns_model(num_moe_experts=4)
    assert len(tiny.scaled_norms(model)) == 2 * tiny.LAYERS
    loss, grads = tiny.gradients(model, tiny.batch())
    right, right_grads = tiny.gradients(reference(model, num_moe_experts=4), tiny.batch())
    assert loss == pytest.approx(right, rel=1e-6)
    tiny.assert_same_gradients(grads, right_grads, rtol=2e-5)


def test_full_recompute_changes_nothing() -> None:
    model = lns_model(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
    loss, grads = tiny.gradients(model, tiny.batch())
    right, right_grads = tiny.gradients(lns_model(), tiny.batch())
    assert loss == right
    tiny.assert_same_gradients(grads, right_grads, rtol=1e-6)


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


def test_applied_twice_is_refused() -> None:
    model = lns_model()
    with pytest.raises(LNSConfigError, match="on in this GPTModel already"):
        apply(model)


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
    ],
)
def test_settings_that_are_refused(change: dict[str, Any], words: str) -> None:
    cfg = tiny.config()
    apply(cfg)
    for name, value in change.items():  # set late: not every version knows each of them
        setattr(cfg, name, value)
    with pytest.raises(LNSConfigError, match=words):
        tiny.build(cfg)
    with pytest.raises(LNSConfigError, match=words):
        apply(cfg)


def _layer_spec(cfg: Any) -> Any:
    return copy.deepcopy(tiny.local_spec(cfg))


def test_a_layer_without_a_norm_is_refused() -> None:
    from megatron.core.transformer.identity_op import IdentityOp

    cfg = tiny.config()
    spec = _layer_spec(cfg)
    spec.submodules.pre_mlp_layernorm = IdentityOp
    apply(cfg)
    with pytest.raises(LNSConfigError, match=r"TransformerLayer 1 has 0 norms in front of its MLP \(none\)"):
        tiny.build(cfg, spec)


def test_cross_attention_is_refused() -> None:
    cfg = tiny.config()
    spec = _layer_spec(cfg)
    spec.submodules.cross_attention = torch.nn.Identity
    layer = tiny.build(cfg).decoder.layers[0]
    layer.cross_attention = torch.nn.Identity()
    with pytest.raises(LNSConfigError, match="cross attention"):
        apply(layer)


@pytest.mark.parametrize(("number", "halves"), [(2, "attention"), (1, "MLP")])
def test_a_hybrid_pattern_that_is_no_transformer_is_refused(number: int, halves: str) -> None:
    from megatron.core.transformer.identity_op import IdentityOp

    layer = tiny.build(tiny.config()).decoder.layers[0]
    layer.layer_number = number
    setattr(layer, "mlp" if halves == "attention" else "self_attention", IdentityOp())
    with pytest.raises(LNSConfigError, match=f"is layer {number} of a hybrid pattern and holds only {halves}"):
        apply(layer)


@pytest.mark.parametrize(("number", "halves", "block"), [(1, "attention", 1), (2, "MLP", 1), (7, "attention", 4)])
def test_halves_of_a_hybrid_block_share_its_number(number: int, halves: str, block: int) -> None:
    from megatron.core.transformer.identity_op import IdentityOp

    layer = tiny.build(tiny.config()).decoder.layers[0]
    layer.layer_number = number
    setattr(layer, "mlp" if halves == "attention" else "self_attention", IdentityOp())
    assert apply(layer) == 1
    assert [norm.lns_sites[0].layer_number for norm in tiny.scaled_norms(layer)] == [block]


def test_an_unknown_norm_is_multiplied() -> None:
    class Doubling(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * x

    layer = tiny.build(tiny.config()).decoder.layers[3]
    layer.input_layernorm = Doubling()
    apply(layer)
    assert torch.equal(layer.input_layernorm(torch.ones(3)), torch.ones(3))
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
