"""OLMo's published 1B, whose norms have no gain and whose head is tied: trained narrow, exported and verified."""

import os
from pathlib import Path

import pytest
import torch
import yaml
from support.exports import export, load_hf, load_olmo, logits, relative, verify
from support.launch import OLMO_SRC, write_config
from support.olmo_models import tokens

from olmo_lns import cli
from olmo_lns.export.open import open_model

#: The model of configs/official-0724/OLMo-1B.yaml.
STOCK = {
    **{"d_model": 2048, "n_heads": 16, "n_layers": 16, "mlp_ratio": 8, "weight_tying": True, "alibi": False},
    **{"rope": True, "flash_attention": False, "attention_dropout": 0.0, "attention_layer_norm": False},
    **{"multi_query_attention": False, "include_bias": False, "block_type": "sequential", "layer_norm_type": "default"},
    **{"layer_norm_with_affine": False, "bias_for_layer_norm": False, "attention_layer_norm_with_affine": False},
    **{"activation_type": "swiglu", "residual_dropout": 0.0, "embedding_dropout": 0.0, "max_sequence_length": 2048},
    **{"vocab_size": 50280, "embedding_size": 50304, "eos_token_id": 50279, "pad_token_id": 1},
    **{"init_device": "meta", "init_fn": "mitchell"},
}
NARROW = {"d_model": 32, "n_heads": 4, "n_layers": 4, "max_sequence_length": 32, "vocab_size": 250}
NARROW |= {"embedding_size": 256, "eos_token_id": 0}


def test_the_model_is_that_of_olmos_file():
    path = Path(os.environ.get(OLMO_SRC, ""), "configs", "official-0724", "OLMo-1B.yaml")
    if not path.is_file():
        pytest.skip(f"{OLMO_SRC} names no checkout of OLMo")
    assert yaml.safe_load(path.read_text())["model"] == STOCK


def test_the_stock_1b_trains_under_the_flags_of_the_guide_and_its_export_is_verified(tmp_path, caplog):
    config = write_config(tmp_path, model={**STOCK, **NARROW}, save_interval=4)
    flags = ["--model.layer_norm_type=lns", "--model.init_fn=normal", "--model.init_cutoff_factor=3"]
    with caplog.at_level("INFO", logger="olmo_lns"):
        assert cli.main(["train", str(config), *flags]) == 0
    assert "LayerNorm Scaling on: 8 norms (lns_default); s = 1 (block 1) to 0.5 (block 4)" in caplog.text
    assert (
        "scaled initialization off (init_fn normal); measured: sites, output, gradient, initialization" in caplog.text
    )
    folder, ids = tmp_path / "run" / "step4-unsharded", tokens(length=16)
    assert "layer_norm_type: lns_default" in (folder / "config.yaml").read_text()
    trained = logits(open_model(folder), ids)
    for words, load in (("olmo",), load_olmo), (("hf", "--tokenizer", "none"), load_hf):
        out = tmp_path / words[0]
        assert export(folder, out, "--format", *words) == 0 and verify(folder, out) == 0
        assert relative(logits(load(out), ids), trained) <= 1e-5
    stock = load_olmo(tmp_path / "olmo")
    assert torch.equal(stock.transformer.wte.weight, load_hf(tmp_path / "hf").lm_head.weight)
