"""A tiny stock model of each family that the transformers integration supports, and a reference with hooks."""

import copy
import json
import os

import pytest
import torch

from olmo_lns.schemes import Plan, lns_scale, names, registry
from olmo_lns.schemes.registry import Definition
from olmo_lns.schemes.table import EXPONENT
from support import launch
from support.diagnostic_models import ARCHITECTURES, LAYERS, VOCABULARY

transformers = pytest.importorskip("transformers", reason="transformers is not installed: pip install 'olmo-lns[hf]'")

_IMAGES = dict(
    image_size=8,
    patch_size=2,
    num_channels=1,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=LAYERS,
    num_attention_heads=4,
    num_labels=5,
)
#: model_type -> (class, config class, arguments).
MODELS = {kind: row for kind, row in ARCHITECTURES.items() if kind != "bert" and hasattr(transformers, row[0])} | {
    "vit": ("ViTForImageClassification", "ViTConfig", _IMAGES),
    "dinov2": ("Dinov2ForImageClassification", "Dinov2Config", _IMAGES | {"mlp_ratio": 2}),
}
IN_FRONT = [kind for kind in MODELS if kind not in ("olmo2", "olmo3")]
#: Family -> the paths of the two sub-layers' norms in a block, written out here.
NORMS = {
    "gpt2": ("ln_1", "ln_2"),
    "vit": ("layernorm_before", "layernorm_after"),
    "dinov2": ("norm1", "norm2"),
    "olmo2": ("post_attention_layernorm", "post_feedforward_layernorm"),
    "olmo3": ("post_attention_layernorm", "post_feedforward_layernorm"),
}
LLAMA_NORMS = ("input_layernorm", "post_attention_layernorm")
#: Family -> the last projections of the two branches. Their output is the branch, because dropout is off.
OUTPUTS = {
    "gpt2": ("attn.c_proj", "mlp.c_proj"),
    "gpt_neox": ("attention.dense", "mlp.dense_4h_to_h"),
    "vit": ("attention.o_proj", "mlp.fc2"),
    "dinov2": ("attention.o_proj", "mlp.fc2"),
}
LLAMA_OUTPUTS = ("self_attn.o_proj", "mlp.down_proj")
if transformers.__version__.startswith("4."):
    OUTPUTS["vit"] = ("attention.output.dense", "output.dense")
    OUTPUTS["dinov2"] = ("attention.output.dense", "mlp.fc2")


def environment(**changes):
    """The environment of a process that loads our models: it finds the same package as these tests."""
    return launch.environment(PYTHONPATH=os.environ.get("PYTHONPATH"), **changes)


def config(kind, **changes):
    _, name, arguments = MODELS[kind]
    return getattr(transformers, name)(**{**arguments, **changes})


def stock(kind, seed=0, large=True, **changes):
    """A stock model in evaluation mode. :param large: move gains and biases off their start, enlarge matrices."""
    torch.manual_seed(seed)
    model = getattr(transformers, MODELS[kind][0])(config(kind, **changes))
    if large:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(4.0) if parameter.dim() > 1 else parameter.add_(0.2 * torch.randn_like(parameter))
    return model.eval()


def inputs(kind, batch=2, length=10):
    generator = torch.Generator().manual_seed(1)
    if kind in ("vit", "dinov2"):
        return {"pixel_values": torch.randn(batch, 1, 8, 8, generator=generator)}
    return {"input_ids": torch.randint(2, VOCABULARY, (batch, length), generator=generator)}


def blocks(kind, model):
    base = model.base_model
    if kind == "gpt2":
        return list(base.h)
    return list(base.layers if hasattr(base, "layers") else base.encoder.layer)


def hooked(kind, model, scheme="lns", exponent=0.5):
    """A copy of a stock model whose norms (or branches) are multiplied by ``l ** -exponent`` from outside."""
    reference = copy.deepcopy(model)
    norms, outputs = NORMS.get(kind, LLAMA_NORMS), OUTPUTS.get(kind, LLAMA_OUTPUTS)
    paths = {
        "lns": norms,
        "branchnorm": norms,
        "lnsafterbranch": outputs,
        "lnsafterattn": outputs[:1],
        "lnsafterff": outputs[1:],
    }[scheme]
    for number, block in enumerate(blocks(kind, reference), start=1):
        for path in paths:
            factor = number**-exponent
            block.get_submodule(path).register_forward_hook(lambda module, args, out, factor=factor: out * factor)
    return reference


def same(kind, left, right, tolerance=1e-5):
    """Logits and the gradient of every parameter of two models agree."""
    results = []
    for model in (left, right):
        model.zero_grad()
        logits = model(**inputs(kind)).logits
        logits.float().log_softmax(-1)[..., 3].sum().backward()
        results.append((logits.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}))
    (logits, gradients), (expected, wanted) = results
    assert logits.shape == expected.shape and gradients.keys() == wanted.keys()
    assert (logits - expected).abs().max() <= tolerance * expected.abs().max()
    for name, gradient in gradients.items():
        assert (gradient - wanted[name]).abs().max() <= tolerance * (wanted[name].abs().max() + 1e-3), name


def _after(*scaled):
    def plan(layer_number, n_layers, sub_layer, *, exponent):
        factor = lns_scale(layer_number, exponent=exponent)
        return Plan(branch_scale=factor) if sub_layer in scaled else Plan()

    return plan


def _branch_norm(layer_number, n_layers, sub_layer, *, exponent):
    return Plan(pre=False, branch=True, branch_scale=lns_scale(layer_number, exponent=exponent))


def _post(layer_number, n_layers, sub_layer):
    return Plan(pre=False, post=True)


@pytest.fixture
def schemes(monkeypatch):
    """Add rows that the table may lack: factors after the branches, a scaled norm on the branch, Post-LN."""
    rows = {
        "lnsafterbranch": (_after("attn", "ff"), {"exponent": EXPONENT}),
        "lnsafterattn": (_after("attn"), {"exponent": EXPONENT}),
        "lnsafterff": (_after("ff"), {"exponent": EXPONENT}),
        "branchnorm": (_branch_norm, {"exponent": EXPONENT}),
        "anotherform": (_post, {}),
    }
    for name, (plan, parameters) in rows.items():
        if name not in names():
            row = Definition(name, name, name, plan, "a test", parameters)
            monkeypatch.setitem(registry._table, name, row)


def read_config(folder):
    return json.loads((folder / "config.json").read_text())


STEPS, RATE = 6, 1e-2


def rows(count=12, length=8):
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(2, 97, (count, length), generator=generator)
    labels = ids.clone()
    labels[:, 0] = -100  # no position predicts it, but transformers 4 would count it
    return [{"input_ids": row, "labels": label} for row, label in zip(ids, labels, strict=True)]


def trainer(model, folder, **changes):
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
