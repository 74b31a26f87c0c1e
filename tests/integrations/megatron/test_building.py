"""Building: hybrid stacks, configs without the flags, models without a site, schemes from a provider, MuP."""

import inspect
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from support import megatron_tiny as tiny

from olmo_lns.errors import LNSConfigError
from olmo_lns.integrations.megatron import apply, building
from olmo_lns.integrations.megatron.settings import Settings
from olmo_lns.record import Record
from olmo_lns.schemes import parse


class Custom(torch.nn.Module):
    """A layer that is no transformer layer."""

    def __init__(self, config, layer_number, **kwargs):
        super().__init__()
        self.layer_number = layer_number


def hybrid(pattern):
    """A hybrid stack of the installed version, with Megatron's own attention and MLP layers."""
    pytest.importorskip("megatron.core.ssm.mamba_block")
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.ssm.mamba_block import MambaStack, MambaStackSubmodules
    from megatron.core.transformer.spec_utils import ModuleSpec
    from support.megatron_hybrid import attention_and_mlp

    cfg = tiny.under(num_layers=len(pattern), is_hybrid_model=True)
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
    stack = hybrid("*-*-*-")
    assert [norm.lns_sites[0].layer_number for norm in tiny.scaled_norms(stack)] == [1, 1, 2, 2, 3, 3]
    assert "LayerNorm Scaling on: 6 norms (RMSNorm), 6 in this process (blocks 1-3)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        ("-*-*", "is layer 1 of a hybrid pattern and holds only MLP"),
        ("**--", "is layer 2 of a hybrid pattern and holds only attention"),
        ("*-MM*-", "Custom 3 of (Mamba|Hybrid)Stack has 0 sub-layers with the scheme, expected 1"),
        ("*-*", "has 3 layers: attention without an MLP"),
    ],
)
def test_a_hybrid_pattern_that_is_not_attention_and_mlp_in_turn_is_refused(pattern, words):
    with pytest.raises(LNSConfigError, match=words):
        hybrid(pattern)


@pytest.fixture
def arguments(monkeypatch):
    """The parsed command line in a stand-in for ``megatron.training``, which the wheel lacks."""
    args = SimpleNamespace(layernorm_scaling=True)
    module = ModuleType("megatron.training.global_vars")
    module.__dict__.update(_GLOBAL_ARGS=args, get_args=lambda: args)
    for name in ("megatron.training", module.__name__):
        monkeypatch.setitem(sys.modules, name, module)
    return args


def test_a_config_that_did_not_come_from_the_arguments_is_refused(arguments, monkeypatch):
    """Otherwise a script with a config of its own, or --yaml-cfg, would train Pre-LN under --layernorm-scaling."""
    with pytest.raises(LNSConfigError, match="was not made by core_transformer_config_from_args"):
        tiny.build(tiny.config())
    vars(arguments).clear()
    arguments.yaml_cfg = "x.yaml"  # all that is left of the command line
    assert tiny.scaled_norms(tiny.build(tiny.config())) == []
    monkeypatch.setattr(sys, "argv", ["pretrain_gpt.py", "--yaml-cfg", "x.yaml", "--norm-scheme=sandwich"])
    with pytest.raises(LNSConfigError, match=r"--norm-scheme=sandwich was given, .*--yaml-cfg replaces every argument"):
        tiny.build(tiny.config())


def test_a_model_without_a_site_is_refused(arguments):
    """--use-legacy-models builds such a model, out of other layers."""
    build = building.model_built(lambda model: model)
    layers = torch.nn.Sequential(torch.nn.LayerNorm(8), torch.nn.Linear(8, 8))
    for model in ([layers], ([layers], "optimizer", "scheduler")):
        with pytest.raises(LNSConfigError, match=r"container.Sequential was built without it in a single block"):
            build(model)
    arguments.layernorm_scaling = False
    assert build([layers]) == [layers]
    assert vars(arguments) == {"layernorm_scaling": False}


@pytest.mark.parametrize("given", [False, True])
def test_a_stage_without_a_layer_passes_and_its_arguments_name_the_scheme(arguments, given):
    arguments.layernorm_scaling = given
    chunks = [tiny.model_of()]
    del chunks[0].decoder.layers[:]  # a pipeline stage that only computes the loss
    assert building.model_built(lambda: chunks)() is chunks
    assert Settings.of(arguments).scheme == parse("lns")


@pytest.mark.parametrize(("built", "keep"), [(False, False), (False, True), (True, False)])
def test_a_scheme_that_a_provider_applies_is_in_the_arguments_of_the_checkpoint(arguments, capsys, built, keep):
    """Otherwise the checkpoint would say Pre-LN, and a later launch without ``apply`` would load it as such."""
    arguments.layernorm_scaling = False
    scheme = "lnsafterbranch:exponent=0.25"

    def provider():
        if not built:
            return [tiny.model_of(scheme, keep_scaled_init=keep)]
        apply(model := tiny.build(tiny.config()), scheme=scheme)
        return [model]

    building.model_built(building.model_built(provider))()  # setup_model_and_optimizer calls get_model
    drawn = "upstream" if built or keep else "plain"  # a built model was drawn by Megatron's own initialization
    assert Settings.of(arguments).check().record() == Record(parse(scheme), scaled_init=drawn)
    assert f"--norm-scheme {scheme}: not given but applied to the model" in capsys.readouterr().out


def test_two_schemes_in_one_model_and_one_that_contradicts_the_arguments_are_refused(arguments):
    chunks = [tiny.model_of(f"lns:exponent={exponent}") for exponent in (0.5, 0.25)]
    with pytest.raises(LNSConfigError, match="lns was asked for, but the model was built with lns:exponent=0.25"):
        building.model_built(lambda: chunks)()
    arguments.layernorm_scaling = False
    with pytest.raises(LNSConfigError, match=r"one model with lns:exponent=0.25 .* and lns:exponent=0.5 .*by apply"):
        building.model_built(lambda: chunks)()


def test_apply_after_the_build_or_twice_is_refused():
    model = tiny.build(cfg := tiny.config())
    with pytest.raises(LNSConfigError, match="a model was built from this TransformerConfig before"):
        apply(cfg)
    with pytest.raises(LNSConfigError, match="no meaning for a built model"):
        apply(model, keep_scaled_init=True)
    assert apply(model) == 8
    tiny.build(cfg := tiny.config())  # the model is dropped, so nobody can train it
    assert apply(cfg) == 0
    with pytest.raises(LNSConfigError, match=r"already \(lns\)"):
        apply(cfg, exponent=1.0)
    assert cfg.layernorm_scaling_exponent == 0.5


@pytest.mark.parametrize(("keep", "std"), [(False, 0.02), (True, 0.02 / 8**0.5)])
def test_the_output_projections_are_initialized_as_asked(keep, std):
    """As in Megatron Bridge, ``init_method`` is set only after ``apply``."""
    cfg = tiny.config(hidden_size=64, ffn_hidden_size=256)
    finished, cfg.init_method = cfg.init_method, None
    apply(cfg, keep_scaled_init=keep)
    cfg.init_method = finished
    layer = tiny.build(cfg).decoder.layers[0]
    for weight in (layer.self_attention.linear_proj.weight, layer.mlp.linear_fc2.weight):
        assert weight.std().item() == pytest.approx(std, rel=0.05)


def test_mup_keeps_its_width_factor():
    """Under MuP ``init_method`` has the factor 1/sqrt(width_mult); only the depth factor is dropped."""
    config = SimpleNamespace(use_mup=True, init_method="std/sqrt(m)", output_layer_init_method="std/sqrt(2Lm)")
    assert building.use_plain_initialization(config)
    assert config.output_layer_init_method == "std/sqrt(m)"
