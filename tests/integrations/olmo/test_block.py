"""OLMo's blocks under every scheme: values, gradients, initial weights, sites, the scheme read back, refusals."""

import copy
import pickle

import pytest
import torch
from olmo.config import ActivationCheckpointingStrategy, TrainConfig
from olmo.exceptions import OLMoConfigurationError
from olmo.model import OLMo
from olmo.optim import get_param_groups
from support.marks import EXHAUSTIVE
from support.olmo_models import build, model_config, tokens
from support.scheme_reference import loss_logits_gradients, loss_of

from olmo_lns import schemes, sites
from olmo_lns.errors import MeasurementError
from olmo_lns.integrations.olmo import block as blocks
from olmo_lns.integrations.olmo import norm_types, register
from olmo_lns.integrations.olmo.model import blocks_of
from olmo_lns.schemes import LNS, PRE_LN, Definition, Plan, names, parse, registry
from olmo_lns.sites import Site

register()

#: Name -> block, base norm, and other settings of the norm.
MODELS = {
    "rms": ("sequential", "rms", {}),
    "llama": ("llama", "default", {"layer_norm_with_affine": False}),
    "low_precision": ("sequential", "low_precision", {"bias_for_layer_norm": True}),
}
NAMES = [name for name in names() if name != "preln"]


def each_scheme_with_one_of(others):
    """Every scheme with one of ``others`` in turn. The other pairs, where the same code meets again, are exhaustive."""
    return [
        pytest.param(name, each, marks=[] if (index + number) % len(others) == 0 else EXHAUSTIVE)
        for number, each in enumerate(others)
        for index, name in enumerate(NAMES)
    ]


#: The keys that a scheme adds to a block; the other schemes add none.
KEYS = {
    **dict.fromkeys(("sandwich", "sandwich_depth"), "norm_out"),
    **dict.fromkeys(("layerscale", "skipinit"), "gate"),
    "admin": "omega",
}


def gradients(model, ids):
    model.zero_grad()
    loss_of(model(ids).logits, ids).backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def assert_close(found, expected, tolerance):
    assert set(found) == set(expected)
    for name, value in expected.items():
        scale = float(value.abs().max()) or 1.0
        error = float((found[name].double() - value).abs().max()) / scale
        assert error < tolerance, f"{name}: relative error {error:.2g}"


@pytest.mark.parametrize(("name", "model"), each_scheme_with_one_of(MODELS))
def test_logits_and_gradients_equal_the_formula(name, model):
    block, base, changes = MODELS[model]
    model, ids = build(layer_norm_type=f"{name}_{base}", block_type=block, **changes), tokens()
    _, logits, expected = loss_logits_gradients(model, name, base, ids)
    assert_close({"logits": model(ids).logits}, {"logits": logits}, 2e-5)
    assert_close(gradients(model, ids), expected, 2e-4)


@pytest.mark.parametrize("name", NAMES)
def test_a_scheme_adds_only_its_own_keys_and_starts_and_never_decays_them(name):
    stock, model = set(OLMo(model_config()).state_dict()), build(layer_norm_type=f"{name}_rms", perturb=False)
    ours, plan = model.state_dict(), parse(name).plan(1, 4, "attn")
    new = {f"transformer.blocks.{n}.{s}_{KEYS[name]}.weight" for n in range(4) for s in ("attn", "ff") if name in KEYS}
    assert set(ours) - stock == new and stock <= set(ours)
    start = (plan.gate or plan.omega).start if plan.gate or plan.omega else 1.0
    assert all(ours[key].unique().tolist() == [pytest.approx(start)] for key in new)
    decayed, kept = (set(group["param_names"]) for group in get_param_groups(TrainConfig.new(), model))
    assert not new & decayed and len(kept) == 2 + 2 * 4 * (2 if name in KEYS else 1)  # ln_f, wte


@pytest.mark.parametrize("name", NAMES)
def test_a_cache_block_groups_and_checkpointing_change_nothing(name):
    model, ids = build(layer_norm_type=f"{name}_rms"), tokens(2, 6)
    full, expected = model(ids).logits, gradients(model, ids)
    first = model(ids[:, :4], use_cache=True)
    rest = model(ids[:, 4:], past_key_values=first.attn_key_values, use_cache=True)
    torch.testing.assert_close(torch.cat([first.logits, rest.logits], 1), full, rtol=1e-4, atol=2e-5)
    grouped = build(layer_norm_type=f"{name}_rms", block_group_size=2)
    with torch.no_grad():
        for one, other in zip(grouped.parameters(), model.parameters(), strict=True):
            one.copy_(other)
    assert torch.equal(grouped(ids).logits, full)
    # OLMo's strategies differ in the parts that they run again, not in how. LNS has OLMo's own forward, admin has ours.
    every, whole = ActivationCheckpointingStrategy, ActivationCheckpointingStrategy.whole_layer
    for strategy in every if name in ("lns", "admin") else [whole, every.fine_grained]:
        model.train().set_activation_checkpointing(strategy)
        found = gradients(model, ids)
        assert all(torch.equal(found[key], expected[key]) for key in expected), strategy


@pytest.mark.parametrize(("name", "block"), each_scheme_with_one_of(["sequential", "llama"]))
def test_a_model_from_the_meta_device_has_the_same_weights_after_a_reset(name, block):
    changes = dict(layer_norm_type=f"{name}_rms", block_type=block, init_fn="normal_scaled", embedding_layer_norm=True)
    changes["n_layers"] = 2
    on_meta = OLMo(model_config(init_device="meta", **changes))
    assert all(parameter.is_meta for parameter in on_meta.parameters())
    on_meta.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in on_meta.parameters():
            parameter.fill_(7.0)
    direct = OLMo(model_config(**changes))
    for model in (on_meta, direct):
        torch.manual_seed(3)
        model.reset_parameters()
    state = on_meta.state_dict()
    assert all(torch.equal(state[key], value) for key, value in direct.state_dict().items())
    assert not (direct.state_dict()["transformer.emb_norm.weight"] != 1).any()


def draw(**changes):
    torch.manual_seed(5)
    return OLMo(model_config(d_model=64, n_layers=2, **changes))


def initializations():
    """Names of schemes, blocks and init_fn: each scheme with one init_fn, and DeepNorm, which multiplies, with all.

    Every pair of the three is in some case; those of the other schemes are exhaustive.
    """
    for index, name in enumerate(["", *NAMES]):
        for number, init_fn in enumerate(("normal", "normal_scaled", "normal_depth_scaled")):
            blocks = ("sequential", "llama") if (index + number) % 2 else ("llama", "sequential")
            daily = name in ("", "lns", "deepnorm") or index % 3 == number
            for block in blocks if name == "deepnorm" else blocks[:1]:
                yield pytest.param(name, block, init_fn, marks=[] if daily else EXHAUSTIVE)


@pytest.mark.parametrize(("name", "block", "init_fn"), [*initializations()])
def test_every_initialization_combines_with_every_scheme(name, block, init_fn):
    """Stock draws the same numbers. DeepNorm multiplies v, o and both feed-forward matrices by (8 L)^(-1/4)."""
    stock = draw(layer_norm_type="rms", init_fn="normal", block_type=block).state_dict()
    ours = draw(layer_norm_type=f"{name}_rms".lstrip("_"), init_fn=init_fn, block_type=block)
    assert str(ours.config.init_fn) == init_fn, "building the model changed init_fn in its config"
    ours = ours.state_dict()
    for key, value in stock.items():
        factor = torch.ones(len(value), *[1] * (value.dim() - 1))
        residual = "attn_out" in key or ("ff_out" in key and "blocks" in key)
        if name == "deepnorm" and (residual or "v_proj" in key or "ff_proj" in key):
            factor *= 16**-0.25
        elif name == "deepnorm" and "att_proj" in key:
            factor[128:] *= 16**-0.25
        if residual:
            number = int(key.split(".")[2]) + 1
            factor *= {"normal": 1.0, "normal_scaled": 4**-0.5}.get(init_fn, (2 * number) ** -0.5)
        rtol = 1e-6 if (factor != 1).any() else 0
        torch.testing.assert_close(ours[key], value * factor, rtol=rtol, atol=0)


@pytest.mark.parametrize("kind", ["mixln_default:alpha=0.6", "layerscale_rms", "groupln_low_precision", "lns_rms"])
def test_a_model_pickles_with_its_scheme(kind):
    model = build(layer_norm_type=kind)
    copied = pickle.loads(pickle.dumps(model))
    assert sites.read_back(copied) == norm_types.scheme_of_type(kind)
    assert torch.equal(copied(tokens()).logits, model(tokens()).logits)


@pytest.mark.parametrize("changes", [{}, {"block_type": "llama", "attention_layer_norm": True, "clip_qkv": 0.5}, {"n_kv_heads": 2}, {"alibi": True, "rope": False, "include_bias": True}], ids=str)  # fmt: skip
def test_our_forward_with_the_plan_of_pre_ln_equals_olmos_own_to_the_bit(changes):
    stock = build(layer_norm_type="rms", residual_dropout=0.1, **changes).train()
    ours, ids = copy.deepcopy(stock), tokens()
    for block in blocks_of(ours):
        blocks.replace_forward(block, dict.fromkeys(("attn", "ff"), Plan()))
    found = []
    for model in (stock, ours):
        torch.manual_seed(0)  # dropout
        loss_of(logits := model(ids).logits, ids).backward()
        found.append([logits, *(parameter.grad for parameter in model.parameters())])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


# Sites are counted and read back; a scheme that cannot be built is refused


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (Plan(norm_before=False), "found 0 norms in a sub-layer, expected one or two"),
        (Plan(groups=4, norm_on_output=True), "found grouped statistics and two norms"),
        (Plan(groups=5), "5 groups do not divide model.d_model=32"),
    ],
)
def test_a_scheme_that_this_integration_cannot_build_is_refused(monkeypatch, plan, message):
    monkeypatch.setattr(registry, "_table", dict(registry._table))
    schemes.define_scheme(Definition("other", "Other", "Other", lambda *_: plan, "a test"))
    with pytest.raises(OLMoConfigurationError, match=f"layer_norm_type=other_rms, block 1, attn: .*{message}"):
        OLMo(model_config(layer_norm_type="other_rms"))


def test_the_sites_are_in_order_and_the_scheme_is_read_back_from_them():
    """The final norm, the embedding norm and the norms of q and k stay OLMo's."""
    quarter = parse("lns:exponent=0.25")
    more = dict(attention_layer_norm=True, embedding_layer_norm=True, block_group_size=2)
    model = build(layer_norm_type="lns_rms:exponent=0.25", **more)
    found = [(name, module.lns_scale, site) for name, module, site in sites.in_model(model)]
    assert found == [
        (f"transformer.block_groups.{i // 2}.{i % 2}.{sub}_norm", (i + 1) ** -0.25, Site(quarter, i + 1, 4, sub))
        for i in range(4)
        for sub in ("attn", "ff")
    ]
    assert len(found) == sum(hasattr(module, "lns_scale") for module in model.modules())
    assert sites.read_back(model) == sites.read_back(copy.deepcopy(model)) == quarter
    for asked in (LNS, PRE_LN):
        with pytest.raises(MeasurementError, match="was selected .*but found lns:exponent=0.25 on 8 sub-layers"):
            sites.require_complete(model, asked, 4)


@pytest.mark.parametrize(
    ("kind", "line"),
    [
        ("lns_rms", "LayerNorm Scaling on: 8 norms (lns_rms); s = 1 (block 1) to 0.5 (block 4); exponent 0.5; backend torch (no CUDA device is visible); scaled initialization off (init_fn mitchell); measured: sites, output, gradient, initialization"),
        ("lnsafterff_rms", "LNS after feed-forward on: 8 norms (lnsafterff_rms); output_scale = 1 (block 1) to 0.5 (block 4), ff only; exponent 0.5; scaled initialization off (init_fn mitchell); measured: block, initialization"),
    ],
)  # fmt: skip
def test_the_start_up_line_says_what_was_built_and_measured(caplog, monkeypatch, kind, line):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with caplog.at_level("INFO", logger="olmo_lns"):
        OLMo(model_config(layer_norm_type=kind, init_fn="mitchell"))
    assert [record.getMessage() for record in caplog.records if " on: " in record.getMessage()] == [line]


def test_a_group_norm_that_was_replaced_is_found():
    model = build(layer_norm_type="groupln_rms:groups=4")
    model.transformer.blocks[1].attn_norm = build(layer_norm_type="rms").transformer.blocks[1].attn_norm
    with pytest.raises(MeasurementError, match="found groups=1, expected 4"):
        sites.read_back(model)
