"""The tools people train with, on a model of ours: Trainer, PEFT, checkpointing, torch.compile."""

from __future__ import annotations

import copy

import pytest
import torch
from support.transformers_models import hooked, inputs, same, schemes, stock  # noqa: F401

from olmo_lns.integrations import binding
from olmo_lns.integrations.transformers import apply, register

register()

STEPS, RATE = 6, 1e-2


def rows(count: int = 12, length: int = 8) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(2, 97, (count, length), generator=generator)
    labels = ids.clone()
    labels[:, 0] = -100  # nothing predicts it, but transformers 4 would count it
    return [{"input_ids": row, "labels": label} for row, label in zip(ids, labels, strict=True)]


def trainer(model, folder, **changes):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate", reason="Trainer needs accelerate: pip install 'olmo-lns[hf]'")
    options = dict(
        output_dir=str(folder),
        max_steps=STEPS,
        per_device_train_batch_size=2,
        learning_rate=RATE,
        lr_scheduler_type="constant",
        optim="adamw_torch",
        weight_decay=0.0,
        max_grad_norm=0.0,
        logging_steps=1,
        save_steps=3,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    arguments = transformers.TrainingArguments(**{**options, **changes})

    class InOrder(transformers.Trainer):
        def _get_train_sampler(self, *args, **kwargs):
            return torch.utils.data.SequentialSampler(self.train_dataset)

    return InOrder(model=model, args=arguments, train_dataset=rows())


def losses(done) -> list[float]:
    return [line["loss"] for line in done.state.log_history if "loss" in line]


def by_hand(model) -> list[float]:
    """The same training written out, on a stock model whose norms are multiplied by hooks."""
    optimizer, found, data = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0, eps=1e-8), [], rows()
    model.train()
    for step in range(STEPS):
        ids = torch.stack([row["input_ids"] for row in data[2 * step : 2 * step + 2]])
        logits = model(ids).logits
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def test_trainer_equals_a_hand_written_loop_also_when_resumed(tmp_path):
    model = stock("llama")
    expected = by_hand(hooked("llama", model))
    done = trainer(apply(copy.deepcopy(model)), tmp_path)
    done.train()
    assert losses(done) == pytest.approx(expected, rel=1e-4)
    import transformers

    fresh = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-3")
    assert type(fresh).__name__ == "LNSLlamaForCausalLM"
    resumed = trainer(fresh, tmp_path)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert losses(resumed)[-3:] == pytest.approx(expected[-3:], rel=1e-4)
    assert binding.read_back(resumed.model).name == "lns"


@pytest.mark.parametrize("kind", ["llama", "gpt2", "gpt_neox"])
def test_gradient_checkpointing(kind):
    model = apply(stock(kind), initialization="upstream").train()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    plain = copy.deepcopy(model)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    same(kind, model, plain, tolerance=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["lns", pytest.param("lnsafterbranch", marks=pytest.mark.exhaustive)])
def test_compiled(scheme, schemes):  # noqa: F811
    model = apply(stock("llama"), scheme)
    eager = copy.deepcopy(model)
    torch._dynamo.reset()
    model.forward = torch.compile(model.forward, backend="aot_eager")
    same("llama", model, eager)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_and_autocast(dtype):
    model, reference = stock("llama"), hooked("llama", stock("llama"))
    apply(model)
    with torch.no_grad():
        expected = reference(**inputs("llama")).logits
        spread = 0.05 * expected.abs().max()
        assert (model(**inputs("llama")).logits - expected).abs().max() < 1e-4
        with torch.autocast("cpu", dtype):
            assert (model(**inputs("llama")).logits.float() - expected).abs().max() < spread
        low = model.to(dtype)(**inputs("llama")).logits
        assert low.dtype == dtype and (low.float() - expected).abs().max() < spread


@pytest.mark.parametrize("scheme", ["lns", "lnsafterbranch"])
def test_lora_with_the_default_targets(scheme, tmp_path, schemes):  # noqa: F811
    peft = pytest.importorskip("peft", reason="peft is not installed: pip install 'olmo-lns[sft]'")
    model, reference = apply(stock("llama"), scheme), hooked("llama", stock("llama"), scheme)
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
    assert binding.read_back(merged).name == scheme
    with torch.no_grad():
        assert (merged(**inputs("llama")).logits - tuned_logits).abs().max() < 1e-4


def test_an_adapter_on_the_last_projections_is_scaled_with_the_branch(schemes):  # noqa: F811
    peft = pytest.importorskip("peft", reason="peft is not installed: pip install 'olmo-lns[sft]'")
    config = peft.LoraConfig(r=4, target_modules=["o_proj", "down_proj"], init_lora_weights=False)
    tuned = peft.get_peft_model(apply(stock("llama"), "lnsafterbranch"), config).eval()
    with torch.no_grad():
        expected = tuned(**inputs("llama")).logits
        merged = tuned.merge_and_unload()(**inputs("llama")).logits
    assert (merged - expected).abs().max() < 1e-4 * expected.abs().max()
