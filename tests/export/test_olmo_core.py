"""OLMo-core and stock transformers classes run the exports of real OLMo-core checkpoints."""

import importlib.util
import json
import math

import pytest

pytest.importorskip("olmo_core.nn", reason="needs ai2-olmo-core 2.5 to 3.0 (make test-olmo-core)")

import numpy as np
import torch
from olmo_core.distributed.checkpoint import load_model_and_optim_state, save_model_and_optim_state
from olmo_core.nn.transformer import TransformerConfig
from olmo_core.optim import AdamWConfig
from support import olmo_core_models as small

from olmo_lns.checkpoints import record_in
from olmo_lns.checkpoints.olmo_core import OLMoCoreCheckpoint
from olmo_lns.cli import main
from olmo_lns.models.loading import open_olmo_core
from olmo_lns.olmo_core import apply
from olmo_lns.record import Record
from olmo_lns.schemes import parse


def _save(folder, made, built, *, record=None, optimizer=None):
    """Save weights, optimizer and config.json as OLMo-core's trainer does, and our record beside them."""
    save_model_and_optim_state(folder / "model_and_optim", built, optimizer or AdamWConfig(lr=1e-3).build(built))
    tokenizer = {"vocab_size": 60, "eos_token_id": 0, "pad_token_id": 1, "identifier": None}
    config = {"model": made.as_config_dict(), "dataset": {"sequence_length": 32, "tokenizer": tokenizer}}
    (folder / "config.json").write_text(json.dumps(config))
    if record:
        record.write(folder)
    return folder


@pytest.fixture
def trained(tmp_path):
    def make(made, built=None, *, name="step1", **kwargs):
        built = small.model(made) if built is None else built
        return _save(tmp_path / name, made, built, **kwargs), built

    return make


def _export(source, out, *arguments):
    assert main(["export", str(source), str(out), *arguments]) == 0
    return out


@pytest.mark.parametrize("block", ["default", "reordered_norm", "peri_norm", "moe", "moe_hybrid"])
def test_stock_olmo_core_runs_the_fold(block, trained, tmp_path, monkeypatch):
    from olmo_core.nn.moe.parallel_mlp import ParallelMLPBase

    monkeypatch.setattr(ParallelMLPBase, "forward", small.dense_experts)
    made = small.with_scheme(small.config(block), exponent=0.25)
    folder, built = trained(made)
    out = _export(folder, tmp_path / "out", "--format", "olmo-core")
    text = (out / "config.json").read_text()
    assert "olmo_lns" not in text
    assert Record.read(out).folded
    stock = open_olmo_core(out)
    assert type(stock.blocks["1"].attention_norm).__module__.startswith("olmo_core.")
    torch.testing.assert_close(stock(small.TOKENS), built(small.TOKENS), rtol=1e-5, atol=2e-6)
    if block == "default":  # as OLMo-core itself loads it
        model = TransformerConfig.from_dict(json.loads(text)["model"]).build()
        load_model_and_optim_state(out / "model_and_optim", model)
        torch.testing.assert_close(model(small.TOKENS), built(small.TOKENS), rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize(
    ("make", "name", "norm"),
    [
        (lambda: small.config(n_kv_heads=2), "LlamaForCausalLM", "input_layernorm"),
        (lambda: small.config(qk_norm=True, use_head_qk_norm=True), "Qwen3ForCausalLM", "input_layernorm"),
        (lambda: small.config("reordered_norm", qk_norm=True), "Olmo2ForCausalLM", "post_attention_layernorm"),
    ],
)
def test_transformers_runs_the_fold_and_our_class_the_checkpoint(make, name, norm, trained, tmp_path, capsys):
    """The stock class runs the fold; our class, for more training, is made of the checkpoint and of its fold."""
    load = pytest.importorskip("transformers").AutoModelForCausalLM.from_pretrained
    folder, built = trained(small.with_scheme(make()))
    out = _export(folder, tmp_path / "out", "--format", "hf", "--tokenizer", "none")
    stock = load(out)
    assert type(stock).__name__ == name
    torch.testing.assert_close(stock(small.TOKENS).logits, built(small.TOKENS), rtol=1e-5, atol=2e-6)
    assert main(["verify", str(folder), str(out), "--length", "16"]) == 0
    folded = _export(folder, tmp_path / "folded")
    for source, said in ((folder, "as trained"), (folded, "unfolded: the factors are outside again")):
        out = tmp_path / f"lns-of-{source.name}"
        capsys.readouterr()
        assert main(["hf", "import", str(source), "-o", str(out), "--tokenizer", "none"]) == 0
        assert said in capsys.readouterr().out
        model = load(out).eval()
        assert type(model).__name__ == f"LNS{name}"
        torch.testing.assert_close(model(small.TOKENS).logits, built(small.TOKENS), rtol=1e-5, atol=2e-6)
        assert getattr(model.model.layers[1], norm).lns_scale == pytest.approx(2**-0.5)


@pytest.mark.parametrize("block", ["default", "reordered_norm"])
def test_unfolding_restores_the_checkpoint(block, trained, tmp_path, capsys):
    made = small.with_scheme(small.config(block), exponent=0.25)
    folder, built = trained(made)
    folded = _export(folder, tmp_path / "folded")
    config = json.loads((folded / "config.json").read_text())
    for eps in (None, 2e-6):  # another eps changes the function
        if eps:
            (folded / "SHA256SUMS").unlink()
            config["model"]["block"]["layer_norm"]["eps"] = eps
            (folded / "config.json").write_text(json.dumps(config))
        assert main(["verify", str(folder), str(folded), "--length", "16"]) == (1 if eps else 0)
    assert "config: block.layer_norm.eps is 2e-06" in capsys.readouterr().out
    folded = _export(folder, tmp_path / "folded-anew")
    again = _export(folded, tmp_path / "again", "--unfold")
    text = capsys.readouterr().out
    assert "the factor is outside again" in text and "load_optim_state=false" in text
    opened = OLMoCoreCheckpoint.open(again)
    assert opened.record.scheme == made.block.resolved_scheme and not opened.record.folded
    assert type(TransformerConfig.from_dict(dict(opened.model)).block) is type(made.block)
    for name, expected in built.state_dict().items():
        torch.testing.assert_close(opened.tensors[name].load(), expected, rtol=2e-7, atol=0)


@pytest.mark.parametrize("drop", [False, True])
def test_unfolding_rescales_the_moments_of_training_in_stock_olmo_core(drop, trained, tmp_path, capsys):
    """An unfolded gain is 1/s as large, so its moments are multiplied by s and by s²."""
    made = apply(small.config())
    folder, _ = trained(made)
    folded = _export(folder, tmp_path / "folded")
    stock = open_olmo_core(folded).train()
    optimizer = AdamWConfig(lr=1e-3).build(stock)
    for _ in range(2):
        optimizer.zero_grad()
        small.loss_of(stock(small.TOKENS)).backward()
        optimizer.step()
    trained_on = _save(tmp_path / "on", small.config(), stock, record=Record.read(folded), optimizer=optimizer)
    out = _export(trained_on, tmp_path / "out", "--unfold", *(["--drop-optimizer"] if drop else []))
    printed = capsys.readouterr().out
    if drop:
        assert "the optimizer's moments were dropped as asked" in printed
        assert not any(name.startswith("optim.") for name in OLMoCoreCheckpoint.open(out).stored.names)
        return
    assert "16 moments of the optimizer rescaled to match" in printed
    ours = small.model(made, seed=None)
    own = AdamWConfig(lr=1e-3).build(ours)
    load_model_and_optim_state(out / "model_and_optim", ours, own)
    torch.testing.assert_close(ours(small.TOKENS), stock(small.TOKENS), rtol=1e-5, atol=2e-6)
    theirs = dict(stock.named_parameters())
    for name, parameter in ours.named_parameters():
        factor = small.factor_of(name, "default")
        for moment, power in (("exp_avg", 1), ("exp_avg_sq", 2)):
            wanted = optimizer.state[theirs[name]][moment] * factor**power
            torch.testing.assert_close(own.state[parameter][moment], wanted, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: small.config(qk_norm=True), "QK-norm over all heads"),
        (lambda: small.config("reordered_norm"), "without QK-norm over all heads"),
        (lambda: small.config("peri_norm"), "block type peri_norm"),
        (lambda: small.config(norm={"name": "default"}), "layer_norm.name='default'; layer_norm.bias=True"),
        (lambda: small.config(norm={"name": "rms"}), "layer_norm.bias=True"),
    ],
)
def test_an_architecture_that_no_stock_class_computes_is_refused(make, message, trained, tmp_path, capsys):
    folder, _ = trained(small.with_scheme(make()))
    assert main(["export", str(folder), str(tmp_path / "out"), "--format", "hf"]) == 1
    assert message in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_a_pre_ln_model_and_a_contradicting_record_are_refused(trained, tmp_path, capsys):
    for made, record, reason in (
        (small.config(), None, "there is nothing to fold"),
        (apply(small.config()), Record(), "contradict each other"),
    ):
        folder, _ = trained(made, name=reason[:5], record=record)
        assert main(["export", str(folder), str(tmp_path / "out")]) == 1
        assert reason in capsys.readouterr().err


def _default_scaled():
    made = small.config()
    made.block.name = type(made.block.name)("default_scaled")
    return made


def _mend(monkeypatch):
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


@pytest.mark.parametrize("buffers", [0, 4])
def test_every_command_reads_default_scaled_with_its_factor(buffers, trained, tmp_path, monkeypatch, capsys):
    """It has no buffers, or correct ones; --unfold turns its weights and optimizer into ours."""
    transformers = pytest.importorskip("transformers")
    with monkeypatch.context() as mended:
        if buffers:  # without init_weights they hold what the constructor wrote
            made = _default_scaled()
            folder, built = trained(made, built=made.build())
        else:
            _mend(mended)
            folder, built = trained(_default_scaled())  # on meta, then initialized, as OLMo-core's train modules do
            assert main(["verify", str(folder), str(_export(folder, tmp_path / "by-mended")), "--length", "16"]) == 0
        expected = built(small.TOKENS).detach()
    assert len([name for name in built.state_dict() if "ln_scale" in name]) == buffers
    assert record_in(folder) == Record(parse("lns"), "rms", "plain")
    if importlib.util.find_spec("matplotlib"):
        out = tmp_path / "variance.json"
        assert main(["analyze", "variance", "--model", str(folder), *_data(tmp_path), "-o", str(out)]) == 0
        assert json.loads(out.read_text())["settings"]["lns"]["scheme"] == "lns"
    close = {"rtol": 1e-5, "atol": 2e-6}
    hf = _export(folder, tmp_path / "hf", "--format", "hf", "--tokenizer", "none")
    stock = transformers.AutoModelForCausalLM.from_pretrained(hf)
    assert type(stock).__name__ == "LlamaForCausalLM"
    torch.testing.assert_close(stock(small.TOKENS).logits, expected, **close)
    out = _export(folder, tmp_path / "ours", "--unfold")
    assert f"{buffers} buffers dropped" in capsys.readouterr().out
    assert any(name.startswith("optim.") for name in OLMoCoreCheckpoint.open(out).stored.names)
    ours = open_olmo_core(out)
    assert [block.attention_norm.lns_scale for block in ours.blocks.values()] == [n**-0.5 for n in (1, 2, 3, 4)]
    for model in (ours, open_olmo_core(_export(folder, tmp_path / "folded")), open_olmo_core(folder)):
        torch.testing.assert_close(model(small.TOKENS), expected, **close)
    assert main(["verify", str(folder), str(hf), "--length", "16"]) == 0
    assert main(["hf", "import", str(folder), "-o", str(tmp_path / "lns"), "--tokenizer", "none"]) == 0
    brought = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "lns")
    assert type(brought).__name__ == "LNSLlamaForCausalLM"
    torch.testing.assert_close(brought(small.TOKENS).logits, expected, **close)


GARBAGE = [-1.8e16, 0.7, 0.57, 0.5]


@pytest.mark.parametrize("values", [GARBAGE, [1.0] * 4, [0.0] * 4, [1.0, 0.9, 0.8, 0.7], [None, None, 0.5, None]])
def test_default_scaled_with_wrong_factors_is_refused(values, trained, tmp_path, capsys):
    """Every command that would read the factors refuses them."""
    made = _default_scaled()
    built = made.build()
    for block, value in zip(built.blocks.values(), values, strict=True):
        if value is None:
            del block.ln_scale
        else:
            block.ln_scale.fill_(value)
    folder, _ = trained(made, built=built)
    reason = "1 of 4 blocks have a factor ln_scale: expected one in each or none"
    if None not in values:
        reason = f"found {', '.join(f'{value:.3g}' for value in values)}, expected 1, 0.707, 0.577, 0.5"
    words = ("--model", str(folder), *_data(tmp_path), "-o", str(tmp_path / "out.json"))
    commands = [["export", str(folder), str(tmp_path / "out")]]
    if values == GARBAGE:
        right = _export(trained(small.with_scheme(small.config()), name="right")[0], tmp_path / "stock")
        commands += [[*commands[0], "--unfold"], [*commands[0], "--format", "hf"]]
        commands += [["hf", "import", str(folder), "-o", str(tmp_path / "out")], ["analyze", "variance", *words]]
        commands += [["verify", str(folder), str(right)]]
    for command in commands:
        capsys.readouterr()
        assert main(command) == 1
        assert reason in capsys.readouterr().err, command
    assert not (tmp_path / "out").exists()


def _data(path):
    np.random.default_rng(0).integers(2, 60, 2_000).astype(np.uint16).tofile(path / "data.npy")
    return ("--data", str(path / "data.npy"), "--sequence-length", "16", "--batch-size", "4", "--quiet")
