"""The other schemes on a tiny GPT: the papers' equations, keys, refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import megatron_tiny as tiny

from olmo_lns.errors import LNSConfigError, UpstreamChangedError
from olmo_lns.integrations import norm_sites
from olmo_lns.integrations.megatron import apply
from olmo_lns.integrations.megatron.settings import Settings
from olmo_lns.schemes import names, parse

CONSTANT = ("lnsafterbranch", "lnsafterattn", "lnsafterff")
BUILT = (*CONSTANT, "sandwich", "sandwich_depth", "layerscale", "skipinit")
REFUSED = tuple(name for name in names() if name not in (*BUILT, "lns", "preln"))


def model_of(scheme: str, **changes: Any) -> Any:
    """With gains and gates that are not all one, so that a wrong gradient cannot hide."""
    cfg = tiny.config(init_method_std=0.2, **changes)
    apply(cfg, scheme=scheme)
    model = tiny.build(cfg)
    generator = torch.Generator().manual_seed(3)
    for name, parameter in model.named_parameters():
        if "norm" in name or "gate" in name:
            with torch.no_grad():
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return model


def reference(model: Any, scheme: str, **changes: Any) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of the stock model in fp64 with the equation in hooks."""
    stock = tiny.build(tiny.config(**changes)).double()
    weights = {name: value.detach().double() for name, value in model.named_parameters()}
    learned = {name: value.requires_grad_() for name, value in weights.items() if "_bda." in name}
    own = {name: value for name, value in weights.items() if name not in learned}
    with torch.no_grad():
        for name, parameter in stock.named_parameters():
            parameter.copy_(own.pop(name))
    assert not own
    loss, grads = tiny.gradients(tiny.branch_reference(stock, scheme, learned), tiny.batch())
    return loss, grads | {name: value.grad for name, value in learned.items() if value.grad is not None}


@pytest.mark.parametrize("scheme", BUILT)
def test_loss_and_all_gradients_are_those_of_the_equation(scheme: str) -> None:
    equal(scheme)


@pytest.mark.parametrize(
    ("scheme", "changes"),
    [
        ("lnsafterbranch", {"num_moe_experts": 4}),
        ("sandwich_depth", {"normalization": "LayerNorm", "add_bias_linear": True}),
        ("layerscale", {"add_bias_linear": True, "bias_dropout_fusion": True}),
        ("sandwich_depth", {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}),
    ],
    ids=["MoE", "biases", "fused", "full recompute"],
)
def test_the_same_in_every_kind_of_layer(scheme: str, changes: dict[str, Any]) -> None:
    equal(scheme, **changes)


def equal(scheme: str, **changes: Any) -> None:
    model = model_of(scheme, **changes)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("linear_proj.bias", "linear_fc2.bias")):
                parameter.normal_(generator=torch.Generator().manual_seed(5))
    loss, grads = tiny.gradients(model, tiny.batch())
    right, right_grads = reference(model, scheme, **changes)
    assert loss == pytest.approx(right, rel=1e-6)
    # The one number of a skipinit gate is a sum over all elements, in fp32.
    tiny.assert_same_gradients(grads, right_grads, rtol=1e-4 if scheme == "skipinit" else 2e-5)


def test_dropout_is_drawn_as_stock_draws_it() -> None:
    """On the branch, in front of the addition: with factor 1 and the same random numbers the same model."""
    cfg, stock_cfg = (tiny.config(hidden_dropout=0.3) for _ in "ab")
    apply(cfg, scheme="lnsafterbranch:exponent=0.0", keep_scaled_init=True)
    losses = []
    for model in (tiny.build(cfg), tiny.build(stock_cfg)):
        torch.manual_seed(11)
        losses.append(float(tiny.loss_of(model, tiny.batch()).detach()))
    assert losses[0] == losses[1]


@pytest.mark.parametrize("fp32_stream", [False, True])
def test_dtypes_are_stocks(fp32_stream: bool) -> None:
    from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add

    cfg = tiny.config(bf16=True, params_dtype=torch.bfloat16)
    apply(cfg, scheme="layerscale")
    addition = tiny.build(cfg).decoder.layers[0].mlp_bda
    assert addition.gate.dtype == torch.bfloat16
    branch = torch.randn(3, 1, tiny.HIDDEN, dtype=torch.bfloat16)
    stream = torch.randn(3, 1, tiny.HIDDEN, dtype=torch.float32 if fp32_stream else torch.bfloat16)
    stock = get_bias_dropout_add(True, False)((branch, None), stream, 0.0)
    assert addition(True, False)((branch, None), stream, 0.0).dtype == stock.dtype


@pytest.mark.parametrize("scheme", ["lnsafterff", "sandwich", "layerscale"])
def test_names_in_a_checkpoint(scheme: str) -> None:
    model, stock = model_of(scheme), tiny.build(tiny.config())
    own = {
        **dict.fromkeys(("sandwich", "sandwich_depth"), "norm.weight"),
        **dict.fromkeys(("layerscale", "skipinit"), "gate"),
    }.get(scheme)
    slots = [f"{slot}.{own}" for slot in ("self_attn_bda", "mlp_bda")] if own else []
    new = {f"decoder.layers.{index}.{name}" for index in range(tiny.LAYERS) for name in slots}
    assert set(dict(model.named_parameters())) - set(dict(stock.named_parameters())) == new
    assert {v.key for v in sharded(model)} - {v.key for v in sharded(stock)} == {f"decoder.layers.{x}" for x in slots}
    for value in sharded(model):
        if "_bda" in value.key:
            assert value.global_shape[0] == tiny.LAYERS and value.prepend_axis_num == 1


def sharded(model: Any) -> list[Any]:
    return [value for value in model.sharded_state_dict().values() if hasattr(value, "global_shape")]


@pytest.mark.parametrize(("scheme", "start"), [("layerscale", 0.1), ("skipinit", 0.5), ("skipinit:start=0.001", 0.001)])
def test_gates_start_as_published(scheme: str, start: float) -> None:
    cfg = tiny.config()
    apply(cfg, scheme=scheme)
    gates = {name: value for name, value in tiny.build(cfg).named_parameters() if name.endswith("gate")}
    assert len(gates) == 2 * tiny.LAYERS
    for value in gates.values():
        assert value.shape == (tiny.HIDDEN if scheme == "layerscale" else 1,)
        torch.testing.assert_close(value.detach(), torch.full_like(value, start))
        assert value.dim() == 1  # Megatron decays no vector


def test_a_parameter_on_the_meta_device_gets_its_start_from_reset_parameters() -> None:
    cfg = tiny.config()
    apply(cfg, scheme="skipinit")
    addition = tiny.build(cfg).decoder.layers[0].mlp_bda.to("meta").to_empty(device="cpu")
    addition.reset_parameters()
    assert float(addition.gate) == 0.5


@pytest.mark.parametrize("name", REFUSED)
def test_what_megatron_has_no_slot_for_is_refused_by_name_with_the_reason(name: str) -> None:
    title = parse(name).definition.title
    with pytest.raises(LNSConfigError) as refusal:
        apply(tiny.config(), scheme=name)
    text = str(refusal.value)
    assert text.startswith(f"{name} ({title}) is not available in Megatron: it")
    assert f"Available are preln, lns, {', '.join(x for x in names() if x in BUILT)}" in text


def test_the_start_up_line_is_read_back(capsys: pytest.CaptureFixture[str]) -> None:
    model_of("sandwich_depth:exponent=1.0")
    assert (
        "olmo-lns: Sandwich-LN with depth factor on: 16 norms (RMSNorm), 16 in this process (blocks 1-4); "
        "branch_scale = 1 (block 1) to 0.25 (block 4); exponent 1; in the residual addition; scaled initialization off"
    ) in capsys.readouterr().out


@pytest.mark.parametrize("scheme", BUILT)
def test_the_built_model_says_which_scheme_it_has(scheme: str) -> None:
    model = model_of(scheme)
    norm_sites.check(model, parse(scheme), tiny.LAYERS)
    addition = model.decoder.layers[2].mlp_bda
    addition.factor *= 2
    with pytest.raises(UpstreamChangedError, match=r"layers\.2\.mlp_bda \(block 3, ff\) has branch_scale="):
        norm_sites.read_back(model)


def test_apply_to_a_model_that_has_a_scheme_is_refused() -> None:
    for first, second, title in (
        ("lnsafterff", "lns", "LNS after feed-forward"),
        ("lns", "sandwich", "LayerNorm Scaling"),
    ):
        model = tiny.build(tiny.config())
        assert apply(model, scheme=first) == 2 * tiny.LAYERS
        with pytest.raises(LNSConfigError, match=f"{title} is on in this GPTModel already"):
            apply(model, scheme=second)


def test_lns_by_either_name() -> None:
    one, other = tiny.config(), tiny.config()
    apply(one)
    apply(other, scheme="lns:exponent=0.5")
    assert Settings.of(one) == Settings.of(other)
    for words, message in (
        ({"scheme": "sandwich_depth", "exponent": 0.25}, "write it in the scheme"),
        ({"scheme": "preln"}, "leave apply out"),
        ({"scheme": "sandwhich"}, r"unknown scheme 'sandwhich' \(did you mean 'sandwich'"),
    ):
        with pytest.raises(LNSConfigError, match=message):
            apply(tiny.config(), **words)  # type: ignore[arg-type]


def test_a_slot_that_holds_something_else_is_refused() -> None:
    from megatron.core.transformer.identity_op import IdentityFuncOp

    layer = tiny.build(tiny.config()).decoder.layers[1]
    layer.mlp_bda = IdentityFuncOp()
    with pytest.raises(LNSConfigError, match="TransformerLayer 2 has IdentityFuncOp as its mlp_bda"):
        apply(layer, scheme="skipinit")


def test_a_layer_that_calls_its_slots_in_another_way_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.core.transformer.transformer_layer import TransformerLayer

    from olmo_lns.integrations.megatron import upstream

    layer = tiny.build(tiny.config()).decoder.layers[1]
    monkeypatch.setattr(TransformerLayer, "_forward_mlp", lambda self, hidden_states: hidden_states)
    upstream.check_readings.cache_clear()
    with pytest.raises(UpstreamChangedError, match=r"TransformerLayer._forward_mlp .*none of those verified"):
        apply(layer, scheme="skipinit")


def test_a_layer_that_names_no_norm_is_refused_without_te() -> None:
    """As in the stacks of hybrid models, whose norms are inside the linear layers behind them."""
    from megatron.core.tensor_parallel import ColumnParallelLinear
    from megatron.core.transformer.identity_op import IdentityOp

    class Fused(ColumnParallelLinear):
        layer_norm_weight = torch.ones(tiny.HIDDEN)

    cfg = tiny.config()
    apply(cfg, scheme="sandwich")
    spec = tiny.local_spec(cfg)
    spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = IdentityOp
    spec.submodules.self_attention.submodules.linear_qkv = tiny.parts_of_mlp(spec).linear_fc1 = Fused
    with pytest.raises(LNSConfigError, match="TransformerLayer 1 has both norms of its spec inside other modules"):
        tiny.build(cfg, spec)


def test_a_graph_of_half_a_layer_is_refused_where_the_addition_has_parameters() -> None:
    cfg = tiny.config()
    cfg.cuda_graph_modules = ["attn"]  # set late: not every version has it
    with pytest.raises(LNSConfigError, match=r"Sandwich-LN does not support cuda_graph_modules=\['attn'\]"):
        apply(cfg, scheme="sandwich")
    assert apply(cfg, scheme="lnsafterbranch") == 0
