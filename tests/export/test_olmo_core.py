"""OLMo-core checkpoints: stock OLMo-core and stock transformers compute what the model computed under its scheme."""

import json
import math

import pytest

pytest.importorskip("olmo_core.nn", reason="needs ai2-olmo-core 2.5 to 3.0 (make test-olmo-core)")

import torch
from olmo_core.distributed.checkpoint import load_model_and_optim_state, save_model_and_optim_state
from olmo_core.nn.moe.parallel_mlp import ParallelMLPBase
from olmo_core.nn.transformer import TransformerConfig
from support import olmo_core_models as small
from support.exports import export, load_hf, logits, refused, relative, verify

from olmo_lns.export.open import open_model
from olmo_lns.olmo_core import apply

#: OLMo-core's own buffers after its init_weights: not factors of any scheme.
GARBAGE = [0.0, 1.4, -0.2, 3e-38]


@pytest.fixture
def trained(tmp_path):
    """Save weights and config.json as OLMo-core's trainer does; gives the folder and the model."""

    def make(made, built=None, name="step1"):
        built = small.model(made).eval() if built is None else built
        folder = tmp_path / name
        save_model_and_optim_state(folder / "model_and_optim", built)
        tokenizer = {"vocab_size": 60, "eos_token_id": 0, "pad_token_id": 1, "identifier": None}
        config = {"model": made.as_config_dict(), "dataset": {"sequence_length": 32, "tokenizer": tokenizer}}
        (folder / "config.json").write_text(json.dumps(config))
        return folder, logits(built, small.TOKENS)

    return make


@pytest.mark.parametrize("block", ["default", "reordered_norm", "moe", "moe_hybrid"])
def test_stock_olmo_core_computes_the_same(block, trained, tmp_path, monkeypatch):
    monkeypatch.setattr(ParallelMLPBase, "forward", small.dense_experts)
    folder, expected = trained(small.with_scheme(small.config(block), exponent=0.25))
    assert relative(logits(open_model(folder), small.TOKENS), expected) == 0
    assert export(folder, tmp_path / "out") == 0 and verify(folder, tmp_path / "out") == 0
    text = (tmp_path / "out" / "config.json").read_text()
    assert "olmo_lns" not in text and "exponent" not in text
    stock = TransformerConfig.from_dict(json.loads(text)["model"]).build()
    load_model_and_optim_state(tmp_path / "out" / "model_and_optim", stock)
    assert relative(logits(stock.eval(), small.TOKENS), expected) <= 1e-5
    config = json.loads(text)
    config["model"]["block"]["layer_norm"]["eps"] = 2e-6
    (tmp_path / "out" / "config.json").write_text(json.dumps(config))
    assert verify(folder, tmp_path / "out") == 1


def test_transformers_computes_the_same(trained, tmp_path):
    folder, expected = trained(small.with_scheme(small.config(n_kv_heads=2)))
    assert export(folder, tmp_path / "out", "--format", "hf") == 0
    stock = load_hf(tmp_path / "out")
    assert type(stock).__name__ == "LlamaForCausalLM"
    assert relative(logits(stock, small.TOKENS), expected) <= 1e-5
    assert verify(folder, tmp_path / "out") == 0


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: small.config(qk_norm=True), "has no place in LlamaForCausalLM"),
        (lambda: small.config("reordered_norm"), "doesn't compute this model"),
        (lambda: small.config("moe"), "blocks without a dense feed-forward"),
        (lambda: small.config(norm={"name": "default", "bias": False}), "doesn't compute this model"),
    ],
)
def test_what_no_llama_computes_is_refused(make, reason, trained, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(ParallelMLPBase, "forward", small.dense_experts)
    folder, _ = trained(small.with_scheme(make()))
    assert reason in refused(capsys, folder, tmp_path / "out", "--format", "hf")


def test_nothing_to_fold_and_a_missing_weight_are_named(trained, tmp_path, capsys):
    folder, _ = trained(small.config())
    assert "nothing to fold" in refused(capsys, folder, tmp_path / "out")
    made = apply(small.config())
    folder, _ = trained(made, name="step2")
    short = small.config(n_layers=3)
    save_model_and_optim_state(folder / "model_and_optim", small.model(short), save_overwrite=True)
    assert "blocks.3" in refused(capsys, folder, tmp_path / "out")


def _default_scaled():
    made = small.config()
    made.block.name = type(made.block.name)("default_scaled")
    return made


def _floats(monkeypatch):
    """OLMo-core's block as its pull request 698 and DepthBench have it: the factor is a Python float, not a buffer."""
    from olmo_core.nn.transformer.block import LayerNormScaledTransformerBlock as Block

    original = Block.__init__

    def __init__(self, *, block_idx, **kwargs):
        original(self, block_idx=block_idx, **kwargs)
        del self.ln_scale
        self.ln_scale = 1.0 / math.sqrt(block_idx + 1)

    def forward(self, x, *, loss_div_factor=None, **kwargs):
        h = self.attention_residual_stream(x, self.attention(self.attention_norm(x) * self.ln_scale, **kwargs))
        return self.feed_forward_residual_stream(h, self.feed_forward(self.feed_forward_norm(h) * self.ln_scale))

    monkeypatch.setattr(Block, "__init__", __init__)
    monkeypatch.setattr(Block, "forward", forward)


@pytest.mark.parametrize("buffers", [False, True])
def test_default_scaled_with_working_factors(buffers, trained, tmp_path, monkeypatch, capsys):
    """With --scheme lns it is read with and without its buffer; without the option it is refused."""
    if not buffers:
        _floats(monkeypatch)
    built = small.model(_default_scaled()).eval()
    for number, block in enumerate(built.blocks.values(), start=1):
        if buffers:
            block.ln_scale.fill_(number**-0.5)
    folder, expected = trained(_default_scaled(), built)
    monkeypatch.undo()
    assert "--scheme lns or --scheme preln" in refused(capsys, folder, tmp_path / "out")
    for form in ("olmo-core", "hf"):
        assert export(folder, tmp_path / form, "--scheme", "lns", "--format", form) == 0
        assert relative(logits(open_model(tmp_path / form), small.TOKENS), expected) <= 1e-5
        assert verify(folder, tmp_path / form, "--scheme", "lns") == 0


def test_default_scaled_with_other_factors_is_refused(trained, tmp_path, capsys):
    built = small.model(_default_scaled())
    for value, block in zip(GARBAGE, built.blocks.values(), strict=True):
        block.ln_scale.fill_(value)
    folder, _ = trained(_default_scaled(), built)
    line = refused(capsys, folder, tmp_path / "out", "--scheme", "lns")
    assert "0, 1.4, -0.2" in line and "expected 1, 0.707, 0.577, 0.5" in line
    assert torch.isfinite(logits(small.model(small.config()), small.TOKENS)).all()
