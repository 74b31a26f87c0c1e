"""A tiny stock model of each family that the transformers integration supports, and a reference with hooks."""

import copy
import functools
import json

import pytest
import torch

from support import hooked as reference
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
_OTHERS = ("bert", "olmo2", "olmo3")  # not Pre-LN
#: model_type -> (class, config class, arguments).
MODELS = {kind: row for kind, row in ARCHITECTURES.items() if kind not in _OTHERS and hasattr(transformers, row[0])} | {
    "vit": ("ViTForImageClassification", "ViTConfig", _IMAGES),
    "dinov2": ("Dinov2ForImageClassification", "Dinov2Config", _IMAGES | {"mlp_ratio": 2}),
}
#: Family -> the paths of the two sub-layers' norms in a block, written out here.
NORMS = {"gpt2": ("ln_1", "ln_2"), "vit": ("layernorm_before", "layernorm_after"), "dinov2": ("norm1", "norm2")}
LLAMA_NORMS = ("input_layernorm", "post_attention_layernorm")


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


def hooked(kind, model, exponent=0.5):
    """A copy of a stock model whose norms are multiplied by ``l ** -exponent`` from outside."""
    model = copy.deepcopy(model)
    return reference.hooked(model, blocks(kind, model), NORMS.get(kind, LLAMA_NORMS), exponent)


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


def read_config(folder):
    return json.loads((folder / "config.json").read_text())


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
        max_steps=6,
        per_device_train_batch_size=2,
        learning_rate=1e-2,
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


@functools.cache
def tokenizer():
    """One token for each of the words w0 … w96."""
    tokenizers = pytest.importorskip("tokenizers")
    words = {f"w{i}": i for i in range(97)}
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    model.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    special = dict(unk_token="w0", eos_token="w1", pad_token="w1")
    return transformers.PreTrainedTokenizerFast(tokenizer_object=model, padding_side="left", **special)
