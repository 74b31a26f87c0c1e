"""Training tools on a model with a scheme: Trainer, PEFT, gradient checkpointing, torch.compile."""

import copy

import pytest
import torch
from support.transformers_models import hooked, inputs, same, stock, trainer

from olmo_lns import sites
from olmo_lns.errors import LNSConfigError
from olmo_lns.integrations.transformers import apply, fold, register

register()
transformers = pytest.importorskip("transformers")
#: In CI, PEFT and TRL are installed in the environment of OLMo-core.
SFT = "pip install 'olmo-lns[sft]'"


def losses(done):
    return [line["loss"] for line in done.state.log_history if "loss" in line]


def test_a_trainer_trains_as_with_hooks_even_when_resumed(tmp_path):
    model = stock("llama")
    reference, done = (
        trainer(hooked("llama", model), tmp_path / "hooks"),
        trainer(apply(copy.deepcopy(model), trained=True), tmp_path),
    )
    for each in (reference, done):
        each.train()
    expected = losses(reference)
    assert losses(done) == pytest.approx(expected, rel=1e-4)
    fresh = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-3")
    assert type(fresh).lns_made_of is transformers.LlamaForCausalLM
    resumed = trainer(fresh, tmp_path)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert losses(resumed)[-3:] == pytest.approx(expected[-3:], rel=1e-4)
    assert sites.read_back(resumed.model).name == "lns"


def test_gradient_checkpointing_gives_the_same_gradients():
    model = apply(stock("llama"), trained=True).train()
    plain = copy.deepcopy(model)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    same("llama", model, plain, tolerance=1e-6)


@pytest.mark.exhaustive  # tests/norm/test_compile.py compiles the same norms
@pytest.mark.slow
def test_a_compiled_model_equals_the_eager_one():
    model = apply(stock("llama"), trained=True)
    eager = copy.deepcopy(model)
    torch._dynamo.reset()
    model.forward = torch.compile(model.forward, backend="aot_eager")
    same("llama", model, eager)


@pytest.mark.trl
def test_lora_with_the_default_targets_trains_and_merges_under_a_scheme(tmp_path):
    peft = pytest.importorskip("peft", reason=SFT)
    model, reference = apply(stock("llama"), trained=True), hooked("llama", stock("llama"))
    tuned = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", r=4, init_lora_weights=False))
    names = [name for name, parameter in tuned.named_parameters() if parameter.requires_grad]
    assert len(names) == 3 * 2 * 2 and all(".q_proj." in name or ".v_proj." in name for name in names)
    with torch.no_grad():
        tuned_logits = tuned(**inputs("llama")).logits
        assert (tuned_logits - reference(**inputs("llama")).logits).abs().max() > 1e-2
    tuned(**inputs("llama"), labels=inputs("llama")["input_ids"]).loss.backward()
    assert all(p.grad is not None for n, p in tuned.named_parameters() if p.requires_grad)
    tuned.save_pretrained(tmp_path)
    merged = tuned.merge_and_unload()
    assert sites.read_back(merged).name == "lns"
    with torch.no_grad():
        assert (merged(**inputs("llama")).logits - tuned_logits).abs().max() < 1e-4


@pytest.mark.trl
@pytest.mark.parametrize("kind", ["LNTuningConfig", "modules_to_save"])
def test_an_adapter_on_the_norms_trains_and_merges_and_is_refused_where_the_base_would_lack_the_factor(kind):
    peft = pytest.importorskip("peft", reason=SFT)
    options = {"task_type": "CAUSAL_LM"} | (
        {"modules_to_save": ["input_layernorm"]} if kind == "modules_to_save" else {}
    )
    config = (peft.LNTuningConfig if kind == "LNTuningConfig" else peft.LoraConfig)(**options)
    tuned = peft.get_peft_model(apply(stock("llama"), trained=True), copy.deepcopy(config)).eval()
    expected = peft.get_peft_model(hooked("llama", stock("llama")), copy.deepcopy(config)).eval()

    def largest_difference(model):
        return (model(**inputs("llama")).logits - expected(**inputs("llama")).logits).abs().max()

    with torch.no_grad():
        for name, parameter in tuned.named_parameters():
            if parameter.requires_grad:
                parameter.mul_(1.5)
                expected.get_parameter(name).mul_(1.5)
        assert largest_difference(tuned) < 1e-5
        with tuned.disable_adapter(), expected.disable_adapter():
            assert largest_difference(tuned) < 1e-5
        with pytest.raises(LNSConfigError, match="after merge_and_unload"):
            fold(tuned.base_model.model)
        assert largest_difference(fold(tuned.merge_and_unload())) < 1e-4
    with pytest.raises(LNSConfigError, match="before get_peft_model"):
        apply(peft.get_peft_model(stock("llama"), config).base_model.model, trained=True)


@pytest.mark.trl
@pytest.mark.parametrize(("kind", "kept"), [("llama", True), ("olmo", False)])
def test_an_adapter_fits_the_folded_base_only_where_no_matrix_was_folded(kind, kept, tmp_path):
    peft = pytest.importorskip("peft", reason=SFT)
    model = apply(stock(kind), trained=True)
    base = fold(copy.deepcopy(model))
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    tuned = peft.get_peft_model(model, config).eval()
    tuned.save_pretrained(tmp_path)
    with torch.no_grad():
        expected = tuned(**inputs(kind)).logits
        if not kept:
            refused = copy.deepcopy(tuned)
            with pytest.raises(LNSConfigError, match="Merge the adapters first"):
                fold(refused.base_model.model)
            assert torch.equal(refused(**inputs(kind)).logits, expected)  # the refused fold changed no projection
        merged_first = fold(tuned.merge_and_unload())(**inputs(kind)).logits
        on_folded = peft.PeftModel.from_pretrained(base, tmp_path).eval()(**inputs(kind)).logits
    limit = 1e-5 * expected.abs().max()
    assert (merged_first - expected).abs().max() <= limit
    assert ((on_folded - expected).abs().max() <= limit) == kept
