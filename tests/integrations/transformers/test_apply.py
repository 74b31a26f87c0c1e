"""``apply`` and ``fold`` on models in hand, against stock models whose norms are multiplied by hooks."""

import copy
import re
import sys

import pytest
import torch
from support.transformers_models import MODELS, blocks, hooked, inputs, same, stock

import olmo_lns
from olmo_lns import sites
from olmo_lns.errors import CheckpointMismatchError, LNSConfigError, MeasurementError, UpstreamChangedError
from olmo_lns.integrations.transformers import apply, fold
from olmo_lns.scaled import ScaledOutput

transformers = pytest.importorskip("transformers")


@pytest.mark.parametrize("kind", ["llama", "olmo", "gpt2", "gpt_neox", "vit", "dinov2"])
def test_outputs_and_gradients_equal_those_of_hooks_and_a_folded_model_is_stock(kind):
    model = stock(kind).double()
    reference = hooked(kind, model, exponent=0.25)
    keys, kinds = list(model.state_dict()), list(map(type, model.modules()))
    assert apply(model, "lns:exponent=0.25", trained=True) is model and list(model.state_dict()) == keys
    same(kind, model, reference)
    assert str(sites.read_back(model)) == "lns:exponent=0.25"
    with torch.no_grad():
        expected, found = reference(**inputs(kind)).logits, fold(model)(**inputs(kind)).logits
    assert list(map(type, model.modules())) == kinds
    assert type(model.config).__name__ == MODELS[kind][1] and not hasattr(model.config, "lns")
    assert (found - expected).abs().max() <= 3e-6 * expected.abs().max()
    with pytest.raises(LNSConfigError, match="nothing to fold"):
        fold(model)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_an_example_may_leave_the_cache_on(attention):
    model = stock("llama", attn_implementation=attention)
    assert model.config.use_cache
    apply(model, example=torch.randint(8, (2, 6)), trained=True)
    assert model.config.use_cache and str(sites.read_back(model)) == "lns"


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("llama", {"initialization": "scaled"}, "expected plain or upstream"),
        ("llama", {"blocks": [torch.nn.Identity()]}, "no part of this LlamaForCausalLM"),
        ("gpt2", {"changes": {"add_cross_attention": True}}, "third sub-layer"),
    ],
)
def test_what_does_not_fit_is_refused_and_the_model_left_as_it_was(kind, options, message):
    model = stock(kind, **options.pop("changes", {}))
    kinds, config = [type(module) for module in model.modules()], model.config
    with pytest.raises(LNSConfigError, match=message):
        apply(model, **options)
    assert [type(module) for module in model.modules()] == kinds and model.config is config


def test_gains_that_hold_the_factor_are_refused():
    folded = fold(apply(transformers.LlamaForCausalLM(stock("llama").config)))
    with pytest.raises(
        CheckpointMismatchError, match="LlamaForCausalLM: the weights of its norm .*input_layernorm are"
    ):
        apply(folded)


def test_weights_that_were_loaded_and_trained_are_refused_unless_it_is_said(tmp_path):
    stock("llama").save_pretrained(tmp_path)
    apply(transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(tmp_path)))
    loaded = transformers.LlamaForCausalLM.from_pretrained(tmp_path).eval()
    with pytest.raises(CheckpointMismatchError, match=f"^{tmp_path}: .* trained=True"):
        apply(loaded)
    same("llama", apply(loaded, trained=True), hooked("llama", stock("llama")))


def test_a_replaced_forward_is_found_and_not_saved(tmp_path):
    model = apply(stock("llama"), trained=True)
    assert not [module for module in model.modules() if isinstance(module, ScaledOutput)]
    blocks("llama", model)[1].input_layernorm.forward = lambda x: x
    with pytest.raises(MeasurementError, match="norm_scale=1.0"):
        model.save_pretrained(tmp_path / "out")
    del model.model.layers[1]
    with pytest.raises(MeasurementError):
        model.save_pretrained(tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_the_depth_factor_of_gpt2_is_taken_off_unless_it_is_asked_for(kind, tmp_path, capfd):
    def ratio(model):
        of, others = [], []
        for block in blocks(kind, model):
            for name, parameter in block.named_parameters():
                if parameter.dim() == 2:
                    residual = name.removesuffix(".weight").rpartition(".")[2] in ("c_proj", "o_proj", "down_proj")
                    (of if residual else others).append(parameter.std())
        return (torch.stack(of).mean() / torch.stack(others).mean()).item()

    plain = stock(kind, large=False, **({"n_embd": 128} if kind == "gpt2" else {"hidden_size": 128}))
    assert ratio(plain) == pytest.approx(6**-0.5 if kind == "gpt2" else 1.0, abs=0.03)
    applied = apply(copy.deepcopy(plain))
    assert ratio(applied) == pytest.approx(1.0, abs=0.03)
    assert "scaled initialization off; measured: sites, output, gradient, initialization" in capfd.readouterr().err
    applied.apply(applied._init_weights)  # as a launcher that builds on the meta device does
    assert ratio(applied) == pytest.approx(1.0, abs=0.03)
    upstream = apply(copy.deepcopy(plain), initialization="upstream")
    assert ratio(upstream) == ratio(plain)
    for model, expected in ((applied, 1.0), (upstream, ratio(plain))):
        fresh = transformers.AutoModelForCausalLM.from_config(model.config)
        assert ratio(fresh) == pytest.approx(expected, abs=0.03)


def test_the_depth_factor_of_another_family_is_taken_off_by_its_measure(capfd):
    config = transformers.ImageGPTConfig(vocab_size=97, n_positions=32, n_embd=128, n_layer=4, n_head=4)
    torch.manual_seed(0)
    model = apply(transformers.ImageGPTForCausalImageModeling(config))
    assert model.transformer.h[3].mlp.c_proj.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert "scaled initialization off" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("names", "text"),
    [
        (["self_attn.k_proj"], "scaled initialization off"),
        (
            ["self_attn.o_proj", "mlp.down_proj"],
            r"scaled initialization found \(o_proj and down_proj 0.005, others 0.02",
        ),
    ],
)
def test_what_the_owner_of_a_fresh_llama_drew_at_a_quarter_is_left_alone(names, text, capfd):
    config = transformers.LlamaConfig(
        vocab_size=97, hidden_size=64, intermediate_size=128, num_hidden_layers=8, num_attention_heads=4
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        for block in model.model.layers:
            for name in names:
                block.get_submodule(name).weight.mul_(0.25)
    before = copy.deepcopy(model.state_dict())
    apply(model)
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    assert re.search(text, line := capfd.readouterr().err), line


def test_weights_that_a_state_dict_brought_are_not_drawn_anew():
    trained, model = stock("gpt2", large=False), stock("gpt2", large=False)
    with torch.no_grad():
        for parameter in trained.parameters():
            parameter.add_(1e-3 * torch.randn_like(parameter))
    model.load_state_dict(trained.state_dict())
    assert torch.equal(
        apply(model, trained=True).transformer.h[1].mlp.c_proj.weight, trained.transformer.h[1].mlp.c_proj.weight
    )


def test_a_tower_is_folded_with_the_model_that_has_it_and_loses_its_scheme():
    """Also in a model of another framework. The config of the tower names the scheme, not that of the whole model."""
    tower = stock("llama")
    wrapper = torch.nn.Sequential(tower)
    olmo_lns.apply(tower, trained=True)
    ids = inputs("llama")["input_ids"]
    expected = tower(ids).logits.detach()
    assert olmo_lns.fold(wrapper, example=lambda model: model[0](ids)) is wrapper
    assert not any(sites.in_model(wrapper)) and type(tower).__mro__ == type(stock("llama")).__mro__
    assert type(tower.config) is type(stock("llama").config) and not hasattr(tower.config, "lns")
    torch.testing.assert_close(tower(ids).logits, expected)


def test_a_scaled_tower_of_a_stock_model_of_transformers_is_folded():
    transformers = pytest.importorskip("transformers")
    sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4)
    vision = transformers.CLIPVisionConfig(**sizes, image_size=16, patch_size=8)
    text = transformers.LlamaConfig(**sizes, vocab_size=96)
    config = transformers.LlavaConfig(vision_config=vision, text_config=text, image_token_id=90)
    model = transformers.LlavaForConditionalGeneration(config).eval()
    ids = torch.arange(3, 11)[None]
    olmo_lns.apply(tower := model.model.language_model)
    expected = model(input_ids=ids).logits.detach()
    olmo_lns.fold(model, example={"input_ids": ids})
    assert not any(sites.in_model(model)) and not hasattr(tower, "lns_made_of")
    torch.testing.assert_close(model(input_ids=ids).logits, expected)


def test_the_module_that_resumes_must_be_there_once_a_scheme_is_selected(monkeypatch):
    scaled = apply(stock("llama"), trained=True)
    monkeypatch.setitem(sys.modules, "transformers.trainer", None)  # Python then finds no such module
    for select in (lambda: apply(stock("llama"), trained=True), lambda: type(scaled)(scaled.config)):
        with pytest.raises(UpstreamChangedError, match=r"the module transformers.trainer was not found"):
            select()
