"""Programs that would lose the factor of a model with a scheme: they are refused, and a stock model goes on as ever."""

import pytest
import torch
from support.transformers_models import inputs, stock, tokenizer

from olmo_lns.errors import LNSConfigError
from olmo_lns.integrations.transformers import apply, register

register()
transformers = pytest.importorskip("transformers")


def lns(kind="llama"):
    return apply(stock(kind), trained=True)


def test_accelerates_megatron_plugin_is_refused():
    """It looks for ``llama`` anywhere in the model type, and builds a Megatron model from the config."""
    accelerate = pytest.importorskip("accelerate.utils")
    plugin = accelerate.MegatronLMPlugin()
    plugin.set_network_size_args(stock("llama"))
    assert plugin.megatron_lm_default_args["num_layers"] == stock("llama").config.num_hidden_layers
    with pytest.raises(LNSConfigError, match="--layernorm-scaling"):
        plugin.set_network_size_args(lns())


def hyperclovax(scaling):
    if not hasattr(transformers, "HyperCLOVAXConfig"):
        pytest.skip("needs a transformers that has HyperCLOVA X")
    torch.manual_seed(0)
    sizes = dict(vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
    config = transformers.HyperCLOVAXConfig(**sizes, use_post_norm=False, logits_scaling=scaling)
    return transformers.AutoModelForCausalLM.from_config(config)


def trl_module(name):
    pytest.importorskip("trl", reason="pip install 'olmo-lns[sft]'")
    return pytest.importorskip(f"trl.{name}", reason="needs a TRL that has HyperCLOVA X")


@pytest.mark.trl
def test_trls_fused_head_of_hyperclovax_is_refused():
    if not hasattr(utils := trl_module("trainer.utils"), "add_fused_lm_head"):
        pytest.skip("needs a TRL that has a fused head")
    utils.add_fused_lm_head(hyperclovax(2.0))
    with pytest.raises(LNSConfigError, match="logits_scaling=1"):
        utils.add_fused_lm_head(apply(hyperclovax(2.0)))
    accepted = apply(hyperclovax(1.0)).eval()
    ids = inputs("llama")["input_ids"]
    expected = accepted(input_ids=ids).logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
    utils.add_fused_lm_head(accepted)
    assert accepted(input_ids=ids, labels=ids, fused_lm_head=True).loss.item() == pytest.approx(
        -expected.mean().item(), rel=1e-5
    )


@pytest.mark.trl
def test_trls_distillation_of_hyperclovax_is_refused(tmp_path):
    """Its loss has code of its own for the logits of the student and of the teacher."""
    module = trl_module("trainer.distillation_trainer")
    prompts = pytest.importorskip("datasets").Dataset.from_list([{"prompt": "w5 w6 w7"}] * 2)
    options = dict(
        max_steps=1, per_device_train_batch_size=2, max_completion_length=4, save_strategy="no", report_to=[]
    )
    options |= dict(use_cpu=True, bf16=False, disable_tqdm=True, logging_steps=1)
    arguments = module.DistillationConfig(str(tmp_path), **options)

    def train(student, teacher):
        run = module.DistillationTrainer(student, teacher, arguments, prompts, processing_class=tokenizer())
        run.train()
        return next(line["loss"] for line in run.state.log_history if "loss" in line)

    assert train(hyperclovax(2.0), hyperclovax(2.0)) == 0  # one model
    assert train(apply(hyperclovax(1.0)), apply(hyperclovax(1.0))) == 0
    for pair in ((apply(hyperclovax(2.0)), hyperclovax(2.0)), (hyperclovax(2.0), apply(hyperclovax(2.0)))):
        with pytest.raises(LNSConfigError, match="logits_scaling=1"):
            train(*pair)


@pytest.mark.trl
def test_trls_asynchronous_distillation_of_hyperclovax_is_refused():
    """A run needs a server of vLLM, so the loss is called without its trainer."""
    module = trl_module("experimental.async_distillation.async_distillation_trainer")
    loss = module.AsyncDistillationTrainer._compute_loss
    with pytest.raises(LNSConfigError, match="logits_scaling=1"):
        loss(None, apply(hyperclovax(2.0)), {})
    with pytest.raises(KeyError):  # of the batch, which is empty
        loss(None, hyperclovax(2.0), {})


@pytest.mark.trl
def test_liger_on_a_model_with_a_scheme_is_refused(monkeypatch):
    """By its function of the family; by the model type (``use_liger_kernel=True``) it skips the model."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    liger = pytest.importorskip("liger_kernel.transformers", reason="needs liger-kernel")
    modeling = transformers.models.llama.modeling_llama
    monkeypatch.setattr(modeling, "LlamaRMSNorm", modeling.LlamaRMSNorm)  # which Liger replaces in the module as well
    norms_alone = dict(rope=False, swiglu=False, cross_entropy=False, fused_linear_cross_entropy=False)
    models = stock("llama"), lns()
    liger.apply_liger_kernel_to_llama(model=models[0], **norms_alone)
    with pytest.raises(LNSConfigError, match="Apply Liger to the model first"):
        liger.apply_liger_kernel_to_llama(model=models[1], **norms_alone)


@pytest.mark.trl
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_deepspeeds_kernels_are_refused(kind):
    """They replace blocks of known classes, which a model with a scheme has too."""
    pytest.importorskip("deepspeed", reason="needs deepspeed")
    from deepspeed.module_inject import replace_module
    from deepspeed.module_inject.replace_policy import HFGPT2LayerPolicy, LLAMALayerPolicy

    policy = {"llama": LLAMALayerPolicy, "gpt2": HFGPT2LayerPolicy}[kind]
    model = lns(kind)
    block = (model.model.layers if kind == "llama" else model.transformer.h)[1]
    with pytest.raises(LNSConfigError, match=r"Fold the model first \(olmo_lns.fold\)"):
        replace_module.policy_to_ds_container(policy=policy(block, inference=True))
