"""The factor on the layers of a tiny model of the local spec: values, gradients, keys, numbers, refusals."""

import copy
import dataclasses
import inspect
import io

import pytest
import torch
from support import megatron_tiny as tiny
from support.hooked import hooked

import olmo_lns
from olmo_lns import sites
from olmo_lns.errors import CheckpointMismatchError, LNSConfigError, MeasurementError
from olmo_lns.integrations.megatron import apply, plain_initialization, printing


def test_mtp_layers_continue_the_numbers_of_the_blocks():
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec

    def model_of(cfg):
        spec = tiny.local_spec(cfg)
        return tiny.build(cfg, spec, mtp_block_spec=get_gpt_mtp_block_spec(cfg, spec, use_transformer_engine=False))

    options = {"mtp_num_layers": 2, "init_method_std": 0.2}
    try:
        stock = hooked(model_of(tiny.config(**options)))
    except TypeError as error:
        pytest.skip(f"this Megatron builds no MTP layers without Transformer Engine: {error}")
    model = model_of(tiny.under(**options))
    stock.load_state_dict(model.state_dict())
    for number, mtp in enumerate(stock.mtp.layers, start=tiny.LAYERS + 1):
        layer = getattr(mtp, "mtp_model_layer", None) or mtp.transformer_layer
        hooked(stock, [layer], ("input_layernorm", "pre_mlp_layernorm"), numbers=[number])
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
    options = dict(
        kind=MLATransformerConfig, q_lora_rank=16, kv_lora_rank=16, qk_head_dim=4, qk_pos_emb_head_dim=4, v_head_dim=8,
        kv_channels=8, rope_type="rope", apply_rope_fusion=False, qk_layernorm=True, init_method_std=0.2,
    )  # fmt: skip
    spec = get_gpt_layer_local_spec(multi_latent_attention=True, qk_layernorm=True, normalization="RMSNorm")
    spec.submodules.self_attention.submodules.core_attention = Core
    model, stock = tiny.model_of(spec, **options), tiny.build(tiny.config(**options), spec)
    stock.load_state_dict(model.state_dict())
    assert len(tiny.scaled_norms(model)) == 2 * tiny.LAYERS
    tiny.assert_same_step(model, hooked(stock))


def keys_of(model):
    keys = {k: v.key for k, v in model.sharded_state_dict().items() if hasattr(v, "key")}
    return [list(dict(model.named_parameters())), list(model.state_dict()), keys]


def test_every_layer_has_two_sites_with_its_global_number_and_the_keys_of_stock():
    model, stock = tiny.model_of(), tiny.build(tiny.config())
    sites = [(norm.lns_sub_layers[0].layer_number, norm.lns_scale) for norm in tiny.scaled_norms(model)]
    assert sites == [(block, block**-0.5) for block in (1, 1, 2, 2, 3, 3, 4, 4)]
    assert not tiny.scaled_norms(model.decoder.final_layernorm)
    assert keys_of(model) == keys_of(stock)
    assert isinstance(model.decoder.layers[0].input_layernorm, torch.nn.RMSNorm)
    assert tiny.scaled_norms(stock) == [] and type(stock.decoder.layers[0].input_layernorm) is torch.nn.RMSNorm
    std = 0.02 / (2 * tiny.LAYERS) ** 0.5
    assert stock.decoder.layers[0].mlp.linear_fc2.weight.std().item() == pytest.approx(std, rel=0.1)


def test_a_built_model_that_was_trained_is_refused_unless_it_is_said():
    model = tiny.build(tiny.config())
    with torch.no_grad():
        model.decoder.layers[1].pre_mlp_layernorm.weight[3] += 0.1
    with pytest.raises(CheckpointMismatchError, match="weights of its norm ff are not at their start"):
        apply([model])
    assert tiny.scaled_norms(model) == []
    assert apply([model], trained=True) == 2 * tiny.LAYERS


@pytest.mark.parametrize(("scaled", "text"), [(True, "found (output projections 0.0071, others 0.02)"), (False, "off")])
def test_apply_to_a_built_model_reports_its_initialization(scaled, text, capsys):
    config = tiny.config()
    if not scaled:
        olmo_lns.plain_initialization(config)
    printing._printed.clear()
    olmo_lns.apply(tiny.build(config))
    assert f"scaled initialization {text}" in capsys.readouterr().out


def test_apply_to_a_built_model_equals_apply_to_its_config_and_twice_is_once():
    model, other, stock = tiny.build(tiny.config()), tiny.model_of(), tiny.build(tiny.config())
    other.load_state_dict(model.state_dict())
    assert apply([model]) == apply(model) == 2 * tiny.LAYERS
    assert apply(stock.decoder) == 2 * tiny.LAYERS
    losses = {tiny.gradients(each, tiny.batch())[0] for each in (model, other, stock)}
    assert len(losses) == 1
    with pytest.raises(LNSConfigError, match="already"):
        apply(model, exponent=1.0)
    with pytest.raises(LNSConfigError, match="already"):
        apply(stock.config, exponent=1.0)
    del model.decoder.layers[:]  # a pipeline stage of an embedding alone
    assert apply([model, tiny.build(tiny.config())]) == 2 * tiny.LAYERS
    with pytest.raises(LNSConfigError, match="nothing to scale"):
        apply(stock.embedding)
    with pytest.raises(LNSConfigError, match="Expected the model before that"):
        apply(type("DistributedDataParallel", (torch.nn.Sequential,), {})(stock))


def test_measuring_draws_no_number_and_works_on_the_meta_device():
    plain = tiny.config()
    plain.output_layer_init_method = plain.init_method
    found = [(tiny.build(cfg), torch.rand(4)) for cfg in (plain, tiny.under())]
    (stock, one), (model, other) = found
    assert torch.equal(one, other)
    assert all(torch.equal(a, b) for a, b in zip(stock.parameters(), model.parameters(), strict=True))
    with torch.device("meta"):
        model = tiny.build(tiny.under(use_cpu_initialization=False))
    model.to_empty(device="cpu")
    assert [norm.lns_scale for norm in tiny.scaled_norms(model)] == [n**-0.5 for n in (1, 1, 2, 2, 3, 3, 4, 4)]


def test_plain_initialization_alone_measures_the_draw_and_scales_nothing(capsys):
    cfg = tiny.config(hidden_size=64)
    assert olmo_lns.plain_initialization(cfg) is cfg
    for model in (tiny.build(dataclasses.replace(cfg)), tiny.build(cfg)):
        assert tiny.scaled_norms(model) == []
        assert model.decoder.layers[3].mlp.linear_fc2.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert "measured: initialization" in capsys.readouterr().out
    for action in (
        lambda: apply(cfg, keep_scaled_init=True),
        lambda: plain_initialization(tiny.under(keep_scaled_init=True)),
    ):
        with pytest.raises(LNSConfigError, match="contradict"):
            action()


def test_an_init_method_that_is_set_after_apply_draws_the_output_projections():
    """As in Megatron Bridge. A copy of the config keeps the settings."""
    cfg = tiny.config(hidden_size=64, ffn_hidden_size=256)
    finished, cfg.init_method = cfg.init_method, None
    apply(cfg)
    cfg.init_method = finished
    layer = tiny.build(copy.deepcopy(cfg)).decoder.layers[0]
    for weight in (layer.self_attention.linear_proj.weight, layer.mlp.linear_fc2.weight):
        assert weight.std().item() == pytest.approx(0.02, rel=0.05)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("use_transformer_engine_op_fuser", True),
        ("inference_fuse_tp_communication", True),
        ("enable_mhc_connections", True),
        ("transformer_impl", "inference_optimized"),
        ("heterogeneous_block_specs", True),
        ("batch_invariant_mode", True),
        ("scale_layernorm_by_depth", True),
    ],
)
def test_a_setting_that_lns_does_not_support_is_refused(name, value):
    setattr(cfg := tiny.under(), name, value)  # set late: not every version knows each of them
    for refuses in (apply, tiny.build):
        with pytest.raises(LNSConfigError, match=f"{name}={value!r}"):
            refuses(cfg)


class Restless(torch.nn.RMSNorm):
    """A norm that never gives the same twice."""

    def forward(self, x):
        return super().forward(x) * torch.rand(())


class Doubled(torch.nn.Identity):
    def forward(self, x):
        return 2 * x


def norm(kind=torch.nn.LayerNorm):
    return kind(tiny.HIDDEN)


@pytest.mark.parametrize(
    ("place", "part", "message"),
    [
        ("pre_mlp_layernorm", torch.nn.Identity(), r"TransformerLayer 3 has 0 norms before its mlp, .*: none"),
        ("pre_mlp_layernorm", norm(Restless), "block 3, ff"),
        ("cross_attention", norm(), "has cross_attention. Expected two norms, before attention and"),
        ("post_mlp_layernorm", norm(), "has post_mlp_layernorm. Expected two norms, before attention"),
        ("post_mlp_layernorm", Doubled(), "has post_mlp_layernorm"),
        ("post_mlp_layernorm", torch.nn.Identity(), ""),
        ("mlp.linear_fc2.post_layernorm", norm(), "has mlp.linear_fc2.post_layernorm"),
    ],
)
def test_a_layer_that_is_not_two_norms_attention_and_mlp_is_refused_and_left_as_it_was(place, part, message):
    model = tiny.build(tiny.config())
    holder, _, name = place.rpartition(".")
    setattr(model.decoder.layers[2].get_submodule(holder), name, part)
    if not message:  # what does nothing is no third norm
        assert apply(model) == 2 * tiny.LAYERS
        return
    with pytest.raises((LNSConfigError, MeasurementError), match=message):
        apply(model)
    assert not list(sites.in_model(model)) and not tiny.scaled_norms(model)


class TEFusedResidualRMSNorm(torch.nn.RMSNorm):
    def forward(self, x):
        return super().forward(x), x


class Squared(torch.nn.Module):
    def forward(self, x):
        return x * x, x


@pytest.mark.parametrize("kind", [Squared, TEFusedResidualRMSNorm])
def test_of_a_norm_that_also_returns_the_residual_the_output_alone_is_scaled(kind):
    options = () if kind is Squared else (tiny.HIDDEN,)
    model = tiny.build(tiny.config())
    norm = model.decoder.layers[3].input_layernorm = kind(*options)
    apply(model)
    y, residual = norm(x := torch.randn(2, tiny.HIDDEN))
    assert residual is x
    torch.testing.assert_close(y, 0.5 * kind(*options)(x)[0])


def test_a_scaled_norm_keeps_its_class_name_and_its_factor_when_saved_or_copied():
    """Megatron-FSDP and recipes for quantization go by class names."""
    norm = tiny.model_of().decoder.layers[2].input_layernorm
    assert type(norm).__name__ == "RMSNorm"
    torch.save(torch.nn.Sequential(norm), file := io.BytesIO())
    file.seek(0)
    x = torch.randn(4, tiny.HIDDEN)
    for copied in (torch.load(file, weights_only=False)[0], copy.deepcopy(norm)):
        assert type(copied) is type(norm) and (copied.lns_scale, copied.lns_sub_layers) == (
            3**-0.5,
            norm.lns_sub_layers,
        )
        assert torch.equal(copied(x), norm(x))


def hybrid(pattern):
    """A hybrid stack of the installed version, with Megatron's own attention and MLP layers."""
    pytest.importorskip("megatron.core.ssm.mamba_block")
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.ssm.mamba_block import MambaStack, MambaStackSubmodules
    from megatron.core.transformer.spec_utils import ModuleSpec
    from support.megatron_hybrid import attention_and_mlp

    class Custom(torch.nn.Module):
        """A layer that is no transformer layer."""

        def __init__(self, config, layer_number, **kwargs):
            super().__init__()
            self.layer_number = layer_number

    cfg = tiny.config(num_layers=len(pattern), is_hybrid_model=True)
    attention, mlp = attention_and_mlp(tiny.local_spec(cfg))
    older = "hybrid_override_pattern" in inspect.signature(MambaStack.__init__).parameters
    return MambaStack(
        cfg,
        MambaStackSubmodules(mamba_layer=ModuleSpec(module=Custom), attention_layer=attention, mlp_layer=mlp),
        **({"hybrid_override_pattern": pattern} if older else {"layer_type_list": list(pattern)}),
        post_layer_norm=False,
        pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
    )


def test_attention_and_mlp_layers_of_a_hybrid_stack_share_a_block_number(capsys):
    apply(stack := hybrid("*-*-*-"))
    assert [norm.lns_sub_layers[0].layer_number for norm in tiny.scaled_norms(stack)] == [1, 1, 2, 2, 3, 3]
    assert "LayerNorm Scaling on: 6 norms (RMSNorm), 6 in this process (blocks 1-3)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        ("-*-*", "'1 ff', '1 attn', .* layer 2l - 1 must be attention .* Expected norms of attention and MLP in turn"),
        ("**--", "'1 attn', '1 attn', .* Expected norms of attention and MLP in turn"),
        ("*-MM*-", "Custom 3 of (Mamba|Hybrid)Stack is not a TransformerLayer"),
        ("*-*", "'2 attn'.* an odd number of .* from 1 to 1.5"),
    ],
)
def test_a_hybrid_pattern_that_is_not_attention_and_mlp_in_turn_is_refused(pattern, words):
    with pytest.raises((LNSConfigError, MeasurementError), match=words):
        apply(hybrid(pattern))


@pytest.mark.parametrize(("pattern", "wrong"), [("*--*", [2, 3]), ("*-*-", [])])
def test_a_stage_of_one_layer_tells_a_wrong_hybrid_pattern_by_its_number(pattern, wrong):
    for place in range(4):
        stack = hybrid(pattern)
        stack.layers = torch.nn.ModuleList([stack.layers[place]])
        stack.pre_process, stack.post_process = place == 0, place == 3
        if place in wrong:
            with pytest.raises(MeasurementError, match="attention and MLP in turn"):
                apply(stack)
        else:
            assert apply(stack) == 1
