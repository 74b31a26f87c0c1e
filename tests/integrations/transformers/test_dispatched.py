"""Models that accelerate has dispatched to several devices or offloaded: scaled and folded as others, or refused."""

import pytest
import torch
from support.transformers_models import hooked, inputs, stock

from olmo_lns.errors import LNSConfigError
from olmo_lns.integrations.transformers import apply, fold, register

register()
transformers = pytest.importorskip("transformers")
accelerate = pytest.importorskip("accelerate", reason="pip install 'olmo-lns[hf]'")

PARTS = (
    "model.embed_tokens",
    "model.rotary_emb",
    "model.layers.0",
    "model.layers.1",
    "model.layers.2",
    "model.norm",
    "lm_head",
)


def logits(model):
    with torch.no_grad():
        return model(**inputs("llama")).logits


def loaded(folder, *offloaded, where="cpu", **options):
    """Load a folder with a device map. Every part is on the CPU, and the hooks of accelerate move inputs to it."""
    places = {part: where if part in offloaded else "cpu" for part in PARTS}
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, device_map=places, **options)
    if not offloaded:
        model = accelerate.dispatch_model(model, places, force_hooks=True)
    return model.eval()


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    stock("llama").save_pretrained(root / "stock")
    apply(stock("llama"), initialization="upstream", trained=True).save_pretrained(root / "lns")
    return root


@pytest.mark.parametrize("first", ["apply", "dispatch"])
@pytest.mark.parametrize("removed", [True, False])
def test_a_dispatched_model_is_scaled_saved_and_folded(first, removed, folders, tmp_path):
    expected = logits(hooked("llama", stock("llama")))
    if first == "dispatch":
        model = apply(loaded(folders / "stock"), initialization="upstream", trained=True)
    else:
        model = loaded(folders / "lns")
    assert hasattr(model.model.layers[1].input_layernorm, "_hf_hook")
    torch.testing.assert_close(logits(model), expected, rtol=1e-4, atol=1e-5)
    if removed:
        accelerate.hooks.remove_hook_from_submodules(model)
        torch.testing.assert_close(logits(model), expected, rtol=1e-4, atol=1e-5)
    model.save_pretrained(tmp_path / "saved")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    torch.testing.assert_close(logits(again.eval()), expected, rtol=1e-4, atol=1e-5)
    folded = fold(model)
    torch.testing.assert_close(logits(folded), expected, rtol=1e-4, atol=1e-5)
    folded.save_pretrained(tmp_path / "folded")
    plain = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "folded")
    torch.testing.assert_close(logits(plain.eval()), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("offloaded", [("model.layers.1",), ("lm_head",), PARTS])
def test_a_model_that_is_offloaded_to_the_disk_loads_under_its_scheme_and_is_not_folded(offloaded, folders, tmp_path):
    options = {"where": "disk", "offload_folder": str(tmp_path)}
    model = loaded(folders / "lns", *offloaded, **options)
    torch.testing.assert_close(logits(model), logits(hooked("llama", stock("llama"))), rtol=1e-4, atol=1e-5)
    for function, each in ((fold, model), (apply, loaded(folders / "stock", *offloaded, **options))):
        before = logits(each)
        with pytest.raises(LNSConfigError, match=r"accelerate has offloaded the weights of .* without device_map="):
            function(each)
        assert torch.equal(logits(each), before)
    assert not hasattr(model, "lns_made_of") or type(model).lns_made_of is transformers.LlamaForCausalLM


def test_a_model_that_is_moved_as_a_whole_is_scaled_and_folded(folders):
    expected = logits(hooked("llama", stock("llama")))
    model, hook = accelerate.cpu_offload_with_hook(loaded(folders / "stock"), "cpu")
    apply(model, initialization="upstream", trained=True)
    torch.testing.assert_close(logits(model), expected, rtol=1e-4, atol=1e-5)
    hook.offload()
    torch.testing.assert_close(logits(fold(model)), expected, rtol=1e-4, atol=1e-5)
