"""Every scheme on a tiny GPT: the papers' equations, keys, refusals."""

import pytest
import torch
from support import megatron_tiny as tiny

from olmo_lns.errors import LNSConfigError, UpstreamChangedError
from olmo_lns.integrations import norm_sites
from olmo_lns.integrations.megatron import apply, upstream
from olmo_lns.schemes import names, parse

BUILT = ("lnsafterbranch", "lnsafterattn", "lnsafterff", "sandwich", "sandwich_depth", "layerscale", "skipinit")
REFUSED = tuple(name for name in names() if name not in (*BUILT, "lns", "preln"))
#: The parameter that a scheme adds to a slot of each layer, and its start.
ADDED = {"sandwich": "norm.weight", "sandwich_depth": "norm.weight", "layerscale": "gate", "skipinit": "gate"}
STARTS = {"layerscale": 0.1, "skipinit": 0.5, "skipinit:start=0.001": 0.001}
MOE = {"num_moe_experts": 4}
RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


@pytest.mark.parametrize(
    ("scheme", "changes"),
    [
        *((scheme, {}) for scheme in ("lns", *BUILT)),
        ("lns:exponent=1", {"normalization": "LayerNorm"}),
        ("lns", MOE),
        ("lns", RECOMPUTE),
        ("lnsafterbranch", MOE),
        ("sandwich_depth", {"normalization": "LayerNorm", "add_bias_linear": True}),
        ("layerscale", {"add_bias_linear": True, "bias_dropout_fusion": True}),
        ("sandwich_depth", RECOMPUTE),
    ],
)
def test_loss_and_all_gradients_are_those_of_the_equation(scheme, changes):
    model = tiny.perturb(tiny.model_of(scheme, init_method_std=0.2, **changes))
    tiny.assert_equation(model, scheme, **{k: v for k, v in changes.items() if "recompute" not in k})


def test_dropout_is_drawn_as_stock_draws_it():
    """It is drawn on the branch, in front of the addition. With factor 1 and one seed the loss is that of stock."""
    losses = []
    for cfg in (
        tiny.under("lnsafterbranch:exponent=0.0", keep_scaled_init=True, hidden_dropout=0.3),
        tiny.config(hidden_dropout=0.3),
    ):
        model = tiny.build(cfg)
        torch.manual_seed(11)
        losses.append(float(tiny.loss_of(model, tiny.batch()).detach()))
    assert losses[0] == losses[1]


@pytest.mark.parametrize("fp32_stream", [False, True])
def test_the_addition_returns_the_dtype_of_megatrons_own(fp32_stream):
    """Up to 0.16 a bf16 branch makes an fp32 stream bf16; newer ones keep the stream's dtype."""
    from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add

    addition = tiny.model_of("layerscale", bf16=True, params_dtype=torch.bfloat16).decoder.layers[0].mlp_bda
    assert addition.gate.dtype == torch.bfloat16
    branch = torch.randn(3, 1, tiny.HIDDEN, dtype=torch.bfloat16)
    stream = torch.randn(3, 1, tiny.HIDDEN, dtype=torch.float32 if fp32_stream else torch.bfloat16)
    stock = get_bias_dropout_add(True, False)((branch, None), stream, 0.0)
    assert addition(True, False)((branch, None), stream, 0.0).dtype == stock.dtype


def sharded(model):
    return {value.key: value for value in model.sharded_state_dict().values() if hasattr(value, "global_shape")}


@pytest.mark.parametrize("scheme", [*BUILT, "skipinit:start=0.001"])
def test_a_built_model_has_the_keys_the_starts_and_the_plan_of_its_scheme(scheme):
    model, stock = tiny.model_of(scheme), tiny.build(tiny.config())
    norm_sites.check(model, parse(scheme), tiny.LAYERS)
    own = ADDED.get(scheme.split(":")[0])
    slots = [f"{slot}.{own}" for slot in ("self_attn_bda", "mlp_bda") if own]
    parameters, keys = dict(model.named_parameters()), sharded(model)
    added = parameters.keys() - dict(stock.named_parameters()).keys()
    assert added == {f"decoder.layers.{index}.{name}" for index in range(tiny.LAYERS) for name in slots}
    assert keys.keys() - sharded(stock).keys() == {f"decoder.layers.{name}" for name in slots}
    for value in (keys[f"decoder.layers.{name}"] for name in slots):
        assert value.global_shape[0] == tiny.LAYERS and value.prepend_axis_num == 1
    for value in map(parameters.get, added):
        assert value.shape == ((1,) if "skipinit" in scheme else (tiny.HIDDEN,))  # Megatron decays no vector
        assert torch.equal(value, torch.full_like(value, STARTS.get(scheme, 1.0)))
    addition = model.decoder.layers[2].mlp_bda
    if own == "gate":
        addition = addition.to("meta").to_empty(device="cpu")
        addition.reset_parameters()
        assert torch.equal(addition.gate, torch.full_like(addition.gate, STARTS[scheme]))
    addition.factor *= 2
    with pytest.raises(UpstreamChangedError, match=r"layers\.2\.mlp_bda \(block 3, ff\) has branch_scale="):
        norm_sites.read_back(model)


@pytest.mark.parametrize("name", REFUSED)
def test_a_scheme_that_megatron_has_no_slot_for_is_refused_with_the_reason(name):
    with pytest.raises(LNSConfigError) as refusal:
        apply(tiny.config(), scheme=name)
    text = str(refusal.value)
    assert text.startswith(f"{name} ({parse(name).definition.title}) is not available in Megatron: it")
    assert f"Available are preln, lns, {', '.join(x for x in names() if x in BUILT)}" in text


def test_apply_to_a_model_that_has_a_scheme_is_refused():
    model = tiny.build(tiny.config())
    assert apply(model, scheme="lnsafterff") == 2 * tiny.LAYERS
    with pytest.raises(LNSConfigError, match="LNS after feed-forward is on in this GPTModel already"):
        apply(model)


def test_an_exponent_beside_another_scheme_is_refused():
    with pytest.raises(LNSConfigError, match="write it in the scheme"):
        apply(tiny.config(), scheme="sandwich_depth", exponent=0.25)


def test_a_slot_with_another_module_or_an_unverified_caller_is_refused(monkeypatch):
    from megatron.core.transformer.identity_op import IdentityFuncOp
    from megatron.core.transformer.transformer_layer import TransformerLayer

    layer = tiny.build(tiny.config()).decoder.layers[1]
    layer.mlp_bda = IdentityFuncOp()
    with pytest.raises(LNSConfigError, match="TransformerLayer 2 has IdentityFuncOp as its mlp_bda"):
        apply(layer, scheme="skipinit")
    monkeypatch.setattr(TransformerLayer, "_forward_mlp", lambda self, hidden_states: hidden_states)
    upstream.check_readings.cache_clear()
    with pytest.raises(UpstreamChangedError, match=r"TransformerLayer._forward_mlp .*none of those verified"):
        apply(tiny.build(tiny.config()), scheme="skipinit")


def test_a_cuda_graph_of_half_a_layer_is_refused_where_the_addition_has_parameters():
    cfg = tiny.config()
    cfg.cuda_graph_modules = ["attn"]  # set late: not every version has it
    with pytest.raises(LNSConfigError, match=r"Sandwich-LN does not support cuda_graph_modules=\['attn'\]"):
        apply(cfg, scheme="sandwich")
    assert apply(cfg, scheme="lnsafterbranch") == 0
