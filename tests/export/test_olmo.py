"""OLMo checkpoints: stock OLMo and stock transformers compute what the model computed under its scheme."""

import json

import pytest

pytest.importorskip("olmo.model", reason="ai2-olmo is not installed")

import torch
import yaml
from support.exports import byte_tokenizer, export, load_hf, load_olmo, logits, refused, relative, save_olmo, verify
from support.olmo_models import tokens

from olmo_lns.export.open import open_model
from olmo_lns.schemes import Definition, Learned, Plan, names, parse, registry

NO_GAIN = {"layer_norm_with_affine": False}
TIED, BIASES = {"weight_tying": True}, {"include_bias": True, "weight_tying": True}
#: Name, which begins with the base norm -> the changed settings; "" where no stock class computes the model.
CHANGES = {
    "rms_tied_without_padding": (TIED | {"embedding_size": None}, "Llama"),
    "rms_gqa": ({"n_kv_heads": 2, "rope_theta": 100}, "Llama"),
    "rms_no_gain_biases": (NO_GAIN | BIASES, "Llama"),
    "rms_groups_llama_block_no_gain": ({"block_group_size": 2, "block_type": "llama"} | NO_GAIN, "Llama"),
    "default_bias": ({"bias_for_layer_norm": True}, ""),
    "default_no_gain_tied_clipped": (NO_GAIN | TIED | {"layer_norm_eps": 1e-5, "clip_qkv": 0.5}, "Olmo"),
}
IDS, BARE = tokens(batch=2, length=16), ("--tokenizer", "none")


#: Together these have each base norm, both stock classes, no gain, tied weights, groups of heads and clipping.
QUICK = ("rms_gqa", "default_bias", "default_no_gain_tied_clipped")


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in CHANGES])
def test_stock_software_computes_the_same(name, tmp_path, capsys):
    changes, like = CHANGES[name]
    folder = tmp_path / "lns"
    model = save_olmo(folder, layer_norm_type=f"lns_{name.partition('_')[0]}", **changes)
    expected = logits(model, IDS)
    assert relative(logits(open_model(folder), IDS), expected) == 0
    assert export(folder, tmp_path / "olmo") == 0
    stock = load_olmo(tmp_path / "olmo")
    assert relative(logits(stock, IDS), expected) <= 1e-5 and verify(folder, tmp_path / "olmo") == 0
    assert sorted(path.name for path in (tmp_path / "olmo").iterdir()) == [
        "config.yaml",
        "export_receipt.json",
        "model.pt",
    ]
    config = yaml.safe_load((tmp_path / "olmo" / "config.yaml").read_text())
    assert config["model"]["layer_norm_type"] == name.partition("_")[0]
    if not like:
        assert "a LayerNorm with a weight" in refused(capsys, folder, tmp_path / "hf", "--format", "hf")
        return
    assert export(folder, tmp_path / "hf", "--format", "hf", *BARE) == 0
    made = load_hf(tmp_path / "hf")
    assert type(made).__name__ == f"{like}ForCausalLM" and relative(logits(made, IDS), expected) <= 1e-5
    assert verify(folder, tmp_path / "hf") == 0
    assert "lns" not in (tmp_path / "hf" / "config.json").read_text()
    stock.load_state_dict(torch.load(folder / "model.pt", weights_only=True))
    assert relative(logits(stock, IDS), expected) > 1e-2, "the factor makes no difference, so this test shows nothing"


@pytest.mark.parametrize("name", [name for name in names() if name not in ("preln", "lns")])
def test_every_other_scheme_is_folded_or_refused(name, tmp_path, capsys):
    folder, groups = tmp_path / "run", ":groups=2" if "groups" in parse(name).parameters else ""
    model, words = save_olmo(folder, layer_norm_type=f"{name}_rms{groups}"), (folder, tmp_path / "out")
    if not parse(name).folds_into_pre_ln(4):
        assert "cannot be folded" in refused(capsys, *words)
    else:
        assert export(*words) == 0
        assert relative(logits(load_olmo(tmp_path / "out"), IDS), logits(model, IDS)) <= 1e-5


def _mixed(layer_number, n_layers, sub_layer):
    """Every factor that a Pre-LN block has room for, in one scheme; its blocks multiply what their norms return."""
    if sub_layer == "attn":
        return Plan(norm_scale=layer_number**-0.5, output_scale=0.7, gate=Learned(per_channel=True, start=0.9))
    return Plan(norm_scale=0.8, init_factors=(("ff_in", 2.0),))


@pytest.mark.parametrize("base", ["rms", "default"])
@pytest.mark.parametrize("gains", [True, False])
def test_a_scheme_with_several_factors_is_folded_whole(base, gains, tmp_path, monkeypatch):
    monkeypatch.setitem(registry._table, "mixed", Definition("mixed", "Mixed", "mixed", _mixed, "a test"))
    settings = {"layer_norm_type": f"mixed_{base}", "layer_norm_with_affine": gains}
    model = save_olmo(tmp_path / "run", **settings)
    assert export(tmp_path / "run", tmp_path / "out") == 0 and verify(tmp_path / "out") == 0
    assert relative(logits(load_olmo(tmp_path / "out"), IDS), logits(model, IDS)) <= 1e-5


@pytest.mark.parametrize(("saved", "asked"), [(None, "bf16"), (torch.bfloat16, "keep")])
def test_products_are_rounded_once(saved, asked, tmp_path):
    """Each value of a sharded checkpoint's export is the fp64 product, rounded once."""
    model = save_olmo(tmp_path / "run", layer_norm_type="lns_rms:exponent=0.25", sharded=True, dtype=saved)
    assert export(tmp_path / "run", tmp_path / "out", "--dtype", asked) == 0
    assert verify(tmp_path / "run", tmp_path / "out") == 0
    folded = torch.load(tmp_path / "out" / "model.pt", weights_only=True)
    for name, value in model.state_dict().items():
        factor = (int(name.split(".")[2]) + 1) ** -0.25 if "_norm" in name else 1.0
        assert torch.equal(folded[name], (value.double() * factor).bfloat16()), name


def test_a_scheme_that_a_stock_config_does_not_name(tmp_path, capsys):
    """The same weights under a stock type: nothing to fold, until somebody says what they were trained with."""
    model = save_olmo(tmp_path / "lns", layer_norm_type="lns_rms:exponent=0.25")
    text = (tmp_path / "lns" / "config.yaml").read_text()
    (tmp_path / "stock").mkdir()
    (tmp_path / "stock" / "config.yaml").write_text(text.replace("lns_rms:exponent=0.25", "rms"))
    torch.save(model.state_dict(), tmp_path / "stock" / "model.pt")
    assert "nothing to fold" in refused(capsys, tmp_path / "stock", tmp_path / "out")
    assert export(tmp_path / "stock", tmp_path / "out", "--scheme", "lns:exponent=0.25") == 0
    assert relative(logits(load_olmo(tmp_path / "out"), IDS), logits(model, IDS)) <= 1e-5
    assert "says scheme lns:exponent=0.25" in refused(capsys, tmp_path / "lns", tmp_path / "no", "--scheme", "lns")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"alibi": True, "rope": False}, "compute different logits"),
        ({"activation_type": "gelu"}, "cannot be loaded"),
        ({"attention_layer_norm": True}, "compute different logits"),
        ({"clip_qkv": 0.5}, "clip_qkv, which only Olmo has"),
        ({"include_bias": True, "bias_for_layer_norm": True}, "the model has no weight"),
    ],
)
def test_what_no_stock_class_computes_is_refused(changes, reason, tmp_path, capsys):
    save_olmo(tmp_path / "run", layer_norm_type="lns_rms", **changes)
    assert reason in refused(capsys, tmp_path / "run", tmp_path / "out", "--format", "hf", *BARE)


def test_the_tokenizer_travels_and_another_models_is_refused(tmp_path, capsys):
    from transformers import AutoTokenizer

    own = byte_tokenizer(tmp_path / "tokenizer.json")
    save_olmo(tmp_path / "run", layer_norm_type="lns_rms", tokenizer=own, eos_token_id=0)
    assert export(tmp_path / "run", tmp_path / "out", "--format", "hf") == 0
    assert "end of text is '<eos>'" in capsys.readouterr().out
    assert AutoTokenizer.from_pretrained(tmp_path / "out").encode("AB") == [34, 35]
    assert json.loads((tmp_path / "out" / "config.json").read_text())["eos_token_id"] == 0
    large = byte_tokenizer(tmp_path / "large.json", 200)
    words = (tmp_path / "run", tmp_path / "no", "--format", "hf", "--tokenizer")
    assert "Expected the tokenizer of this model" in refused(capsys, *words, large)
    assert "none.json was not found" in refused(capsys, *words, tmp_path / "none.json")
    assert "--tokenizer needs --format hf" in refused(capsys, *words[:2], "--tokenizer", own)


def test_damage_is_named_and_nothing_is_left_behind(tmp_path, capsys):
    def again(change):
        state = model.state_dict()
        change(state)
        torch.save(state, tmp_path / "run" / "model.pt")
        return refused(capsys, tmp_path / "run", tmp_path / "out")

    model = save_olmo(tmp_path / "run", layer_norm_type="lns_rms")
    (tmp_path / "used").mkdir()
    assert "exists" in refused(capsys, tmp_path / "run", tmp_path / "used")
    lost = "transformer.blocks.1.ff_norm.weight"
    assert f'Missing key(s) in state_dict: "{lost}"' in again(lambda state: state.pop(lost))
    assert lost in again(lambda state: state.update({lost: torch.ones(3)}))
    assert "NaN or infinite" in again(lambda state: state.update({lost: torch.full((32,), torch.nan)}))
    (tmp_path / "run" / "model.pt").write_bytes(b"\x80no archive")
    assert "its weights, cannot be loaded" in refused(capsys, tmp_path / "run", tmp_path / "out")
    (tmp_path / "run" / "model.pt").unlink()
    assert "no complete checkpoint" in refused(capsys, tmp_path / "run", tmp_path / "out")
