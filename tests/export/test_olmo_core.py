"""OLMo-core checkpoints: stock OLMo-core and stock transformers compute what the model computed under its scheme."""

import json
import os
import pickle
import sys

import pytest

pytest.importorskip("olmo_core.nn", reason="needs ai2-olmo-core 2.5 to 3.0 (make test-olmo-core)")

import numpy as np
import torch
from olmo_core.distributed.checkpoint import (
    get_checkpoint_metadata,
    load_model_and_optim_state,
    save_model_and_optim_state,
)
from olmo_core.nn.moe.parallel_mlp import ParallelMLPBase
from olmo_core.nn.transformer import TransformerConfig
from support import olmo_core_models as small
from support.exports import export, load_hf, logits, refused, relative, verify
from torch.distributed.checkpoint.api import CheckpointException

from olmo_lns.cli import main
from olmo_lns.export.open import open_model
from olmo_lns.olmo_core import apply


@pytest.fixture
def trained(tmp_path, monkeypatch):
    """Save weights and config.json as OLMo-core's trainer does; gives the folder and the model's logits."""
    monkeypatch.setattr(ParallelMLPBase, "forward", small.dense_experts)

    def make(model_config, built=None, name="step1"):
        built = small.model(model_config).eval() if built is None else built
        folder = tmp_path / name
        save_model_and_optim_state(folder / "model_and_optim", built, save_overwrite=True)
        tokenizer = {"vocab_size": 60, "eos_token_id": 0, "pad_token_id": 1, "identifier": None}
        config = {"model": model_config.as_config_dict(), "dataset": {"sequence_length": 32, "tokenizer": tokenizer}}
        (folder / "config.json").write_text(json.dumps(config))
        return folder, logits(built, small.TOKENS)

    return make


@pytest.mark.parametrize("block", ["default", "reordered_norm", "moe", "moe_hybrid"])
def test_stock_olmo_core_and_transformers_compute_the_same(block, trained, tmp_path):
    model_config = small.config(block, **{"n_kv_heads": 2} if block == "default" else {})
    folder, expected = trained(small.with_scheme(model_config, exponent=0.25))
    assert relative(logits(open_model(folder), small.TOKENS), expected) == 0
    if block == "default":
        assert export(folder, tmp_path / "hf", "--format", "hf") == 0 and verify(folder, tmp_path / "hf") == 0
        llama = load_hf(tmp_path / "hf")
        assert type(llama).__name__ == "LlamaForCausalLM" and relative(logits(llama, small.TOKENS), expected) <= 1e-5
    assert export(folder, tmp_path / "out") == 0 and verify(folder, tmp_path / "out") == 0
    text = (tmp_path / "out" / "config.json").read_text()
    assert "olmo_lns" not in text and "exponent" not in text
    config = json.loads(text)
    stock = TransformerConfig.from_dict(config["model"]).build()
    load_model_and_optim_state(tmp_path / "out" / "model_and_optim", stock)
    assert relative(logits(stock.eval(), small.TOKENS), expected) <= 1e-5
    config["model"]["block"]["layer_norm"]["eps"] = 2e-6
    (tmp_path / "out" / "config.json").write_text(json.dumps(config))
    assert verify(folder, tmp_path / "out") == 1


def clipped():
    """A clip that the tokens of a comparison don't reach."""
    model_config = small.config()
    model_config.block.sequence_mixer.clip_qkv = 100.0
    return model_config


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (clipped, "clip_qkv"),
        (lambda: small.config(qk_norm=True), "the model has no weight"),
        (lambda: small.config("reordered_norm"), "compute different logits"),
        (lambda: small.config("moe"), "blocks without a dense feed-forward"),
        (lambda: small.config(norm={"name": "default", "bias": False}), "compute different logits"),
    ],
)
def test_what_no_llama_computes_is_refused(make, reason, trained, tmp_path, capsys):
    folder, _ = trained(small.with_scheme(make()))
    assert reason in refused(capsys, folder, tmp_path / "out", "--format", "hf")


def test_nothing_to_fold_and_a_missing_weight_are_named(trained, tmp_path, capsys):
    assert "nothing to fold" in refused(capsys, trained(small.config())[0], tmp_path / "out")
    folder, _ = trained(apply(small.config()), small.model(small.config(n_layers=3)), "step2")
    assert "blocks.3" in refused(capsys, folder, tmp_path / "out")


class Hostile:
    """Makes a folder when it is unpickled."""

    def __init__(self, folder):
        self.folder = folder

    def __reduce__(self):
        return os.mkdir, (str(self.folder),)


@pytest.mark.parametrize("end", [["--scheme", "lns"], []])
def test_weights_that_run_code_are_refused(end, trained, tmp_path, capsys):
    """OLMo-core unpickles what the files of weights hold; so do the buffers of default_scaled."""
    config = default_scaled() if end else small.with_scheme(small.config())
    folder, _ = trained(config, small.model(config))
    weights, code = folder / "model_and_optim", pickle.dumps(Hostile(tmp_path / "ran"))
    for place in get_checkpoint_metadata(weights).storage_data.values():
        with (weights / place.relative_path).open("r+b") as file:
            file.seek(place.offset)
            file.write(code)
    with pytest.raises(CheckpointException):
        load_model_and_optim_state(weights, small.model(config))
    (tmp_path / "ran").rmdir()  # OLMo-core has run the code
    assert "cannot be loaded" in refused(capsys, folder, tmp_path / "out", *end)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "name", ["os.abort", "olmo_core.config.import_module", "olmo_core.nowhere.Config", "colorsys.X"]
)
@pytest.mark.parametrize("place", ["block", "block.layer_norm", ""])
def test_a_config_that_names_another_class_is_refused(name, place, trained, tmp_path, capsys):
    """OLMo-core imports the module of each class, and calls what it finds there."""
    folder, _ = trained(small.with_scheme(small.config()))
    config = json.loads((folder / "config.json").read_text())
    target = config["model"]
    for key in filter(None, place.split(".")):
        target = target[key]
    target.clear()
    target["_CLASS_"] = name
    (folder / "config.json").write_text(json.dumps(config))
    sys.modules.pop("colorsys", None)
    assert name in refused(capsys, folder, tmp_path / "out") or "nowhere" in name
    assert "colorsys" not in sys.modules


def default_scaled():
    model_config = small.config()
    model_config.block.name = type(model_config.block.name)("default_scaled")
    return model_config


@pytest.mark.parametrize("buffers", [False, True])
def test_default_scaled_with_working_factors(buffers, trained, tmp_path, capsys):
    """Read with --scheme lns, with its buffer and without, as pull request 698 and DepthBench have it."""
    built = small.model(default_scaled() if buffers else small.with_scheme(small.config())).eval()
    for number, block in enumerate(built.blocks.values() if buffers else (), start=1):
        block.ln_scale.fill_(number**-0.5)
    folder, expected = trained(default_scaled(), built)
    assert "--scheme lns or --scheme preln" in refused(capsys, folder, tmp_path / "out")
    for form in ("olmo-core", "hf"):
        assert export(folder, tmp_path / form, "--scheme", "lns", "--format", form) == 0
        assert relative(logits(open_model(tmp_path / form), small.TOKENS), expected) <= 1e-5
        assert verify(folder, tmp_path / form, "--scheme", "lns") == 0


def test_default_scaled_with_other_factors_is_refused(trained, tmp_path, capsys):
    built = small.model(default_scaled())
    for value, block in zip([0.0, 1.4, -0.2, 3e-38], built.blocks.values(), strict=True):
        block.ln_scale.fill_(value)  # as OLMo-core's own init_weights leaves it
    folder, _ = trained(default_scaled(), built)
    line = refused(capsys, folder, tmp_path / "out", "--scheme", "lns")
    assert "[0.0, 1.39" in line and "--scheme lns has the factors [1.0, 0.707" in line


def test_a_checkpoint_is_analyzed_under_its_scheme(trained, tmp_path):
    """The variance is that of the blocks' outputs."""
    model_config = small.with_scheme(small.config())
    model, ids = small.model(model_config).eval(), np.random.default_rng(0).integers(2, 60, 64).astype(np.uint16)
    ids.tofile(tmp_path / "ids.npy")
    words = ["--model", trained(model_config, model)[0], "--data", tmp_path / "ids.npy", "--sequence-length", 32]
    assert main(["analyze", "variance", *map(str, words), "--device", "cpu", "-o", str(tmp_path / "out.json")]) == 0
    outputs = []
    for block in model.blocks.values():
        block.register_forward_hook(lambda _, __, out: outputs.append(out.double().var(-1, unbiased=False).mean()))
    logits(model, torch.from_numpy(ids.astype(np.int64)).view(2, 32))
    found = json.loads((tmp_path / "out.json").read_text())
    np.testing.assert_allclose(found["blocks"]["variance"], torch.stack(outputs).numpy(), rtol=1e-4)
    assert found["settings"]["scheme"] == "lns"
