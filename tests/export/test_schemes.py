"""The arithmetic of folding; every scheme is folded where that is exact, and kept or refused where it is not."""

import dataclasses
import json
import math
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.exports import export, load_hf, load_olmo, logits, refused, relative, save_olmo
from support.olmo_models import build, tokens

from olmo_lns.checkpoints.olmo import IGNORED, Architecture, OLMoCheckpoint
from olmo_lns.cli import main
from olmo_lns.errors import LNSConfigError
from olmo_lns.export import fold
from olmo_lns.export.fold import Rounding
from olmo_lns.export.huggingface import choose_class, is_gemma2
from olmo_lns.record import Record
from olmo_lns.schemes import names, parse

IDS = tokens(batch=2, length=16)
FOLDS = (
    *("layerscale", "skipinit", "lnsafterbranch", "lnsafterattn", "lnsafterff"),
    *("lnsvalue", "lnsrate", "lnsstart", "lnsuniform", "lnsreversed"),
)
GEMMA = ("sandwich", "sandwich_depth")
KEPT = tuple(name for name in names() if name not in ("preln", "lns", *FOLDS))
#: Name -> part of the reason why it does not fold.
REASONS = {
    **dict.fromkeys(("postln", "mixln", "deepnorm", "admin"), "its norms sit on the sums"),
    **dict.fromkeys(("branchln", "branchln_depth", *GEMMA), "it normalises the branches"),
    **dict.fromkeys(("lnsbefore", "lnsafterresidual"), "equals Pre-LN only up to the eps"),
    "groupln": "statistics over groups of channels",
}
SHAPES = {
    "rms": {},
    "default, llama blocks": {"block_type": "llama"},
    "biases": {"include_bias": True, "weight_tying": True},
    "no gains, groups": {"layer_norm_with_affine": False, "block_group_size": 2},
}


def saved(folder, name, **changes):
    return save_olmo(folder / "checkpoint", layer_norm_type=name, **changes), folder / "checkpoint"


def test_every_scheme_folds_or_has_a_reason():
    assert set(REASONS) == set(KEPT)
    for name in (*FOLDS, *KEPT):
        problem = fold.obstacle(parse(name), 4)
        assert (REASONS[name] in problem) if name in REASONS else not problem
        assert parse(name).folds_into_pre_ln(4) is not bool(problem)
        assert is_gemma2(parse(name), 4) is (name in GEMMA)


@pytest.mark.parametrize(("name", "shape"), [(name, list(SHAPES)[i % 4]) for i, name in enumerate(FOLDS)])
def test_a_scheme_that_folds_runs_in_stock_olmo_and_transformers(tmp_path, name, shape):
    base = "default" if "default" in shape else "rms"
    model, folder = saved(tmp_path, f"{name}_{base}", **SHAPES[shape])
    expected = logits(model, IDS)
    assert export(folder, tmp_path / "olmo") == 0
    stock = load_olmo(tmp_path / "olmo")
    assert str(stock.config.layer_norm_type) == base
    assert relative(logits(stock, IDS), expected) <= 1e-5
    assert Record.read(tmp_path / "olmo") == Record(parse(name), base, "plain", folded=True)
    assert export(folder, tmp_path / "hf", "--format", "hf", "--tokenizer", "none") == 0
    assert relative(logits(load_hf(tmp_path / "hf"), IDS), expected) <= 1e-5
    if name in ("layerscale", "lnsafterbranch"):
        for out in ("olmo", "hf"):
            assert main(["verify", str(folder), str(tmp_path / out), "--length", "16"]) == 0


@pytest.mark.parametrize("name", ["layerscale_rms", "skipinit_rms", "lnsafterff_rms"])
def test_a_sharded_checkpoint_folds_as_an_unsharded_one_does(tmp_path, name):
    model, folder = saved(tmp_path, name, sharded=True, optimizer=True)
    assert export(folder, tmp_path / "sharded") == 0
    assert export(folder, tmp_path / "unsharded", "--format", "olmo-unsharded") == 0
    stock = load_olmo(tmp_path / "unsharded")
    assert relative(logits(stock, IDS), logits(model, IDS)) <= 1e-5
    written = OLMoCheckpoint.open(tmp_path / "sharded").tensors
    assert set(written) == set(stock.state_dict())
    for key, value in stock.state_dict().items():
        torch.testing.assert_close(written[key].load(), value, rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", GEMMA)
@pytest.mark.parametrize(
    "changes", [{}, {"block_type": "llama", "weight_tying": True}, {"n_kv_heads": 2, "layer_norm_with_affine": False}]
)
def test_a_sandwich_model_exports_as_gemma_2(tmp_path, name, changes):
    model, folder = saved(tmp_path, f"{name}_rms", **changes)
    assert export(folder, tmp_path / "hf", "--format", "hf", "--tokenizer", "none") == 0
    exported = load_hf(tmp_path / "hf")
    assert type(exported).__name__ == "Gemma2ForCausalLM"
    assert relative(logits(exported, IDS), logits(model, IDS)) <= 1e-5
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["lns_record"]["scheme"] == name
    assert main(["verify", str(folder), str(tmp_path / "hf"), "--length", "16"]) == 0


@pytest.mark.parametrize(
    ("base", "changes", "message"),
    [
        ("default", {}, "LayerNorm .Gemma 2 has RMSNorm"),
        ("rms", {"include_bias": True, "weight_tying": True}, "biases"),
        ("rms", {}, "blocks.1.attn_norm_out holds NaN or infinite values .1 of 32"),
    ],
)
def test_a_sandwich_that_cannot_become_gemma_2_is_refused(tmp_path, capsys, base, changes, message):
    model, folder = saved(tmp_path, f"sandwich_{base}", **changes)
    if "NaN" in message:
        model.transformer.blocks[1].attn_norm_out.weight.data[3] = torch.inf
        torch.save(model.state_dict(), folder / "model.pt")
    assert re.search(message, refused(capsys, folder, tmp_path / "hf", "--format", "hf", "--tokenizer", "none"))


@pytest.mark.parametrize("name", KEPT)
def test_a_model_that_does_not_fold_keeps_its_scheme(tmp_path, capsys, name):
    model, folder = saved(tmp_path, f"{name}_default", sharded=name == "mixln")
    assert export(folder, tmp_path / "olmo", "--format", "olmo-unsharded") == 0
    assert REASONS[name] in capsys.readouterr().out
    assert Record.read(tmp_path / "olmo") == Record(parse(name), "default", "plain")
    assert relative(logits(load_olmo(tmp_path / "olmo"), IDS), logits(model, IDS)) <= 1e-6
    if name == "postln":
        assert main(["verify", str(folder), str(tmp_path / "olmo"), "--length", "16"]) == 0
    if name not in GEMMA:
        assert REASONS[name] in refused(capsys, folder, tmp_path / "hf", "--format", "hf", "--tokenizer", "none")


def test_a_scheme_that_does_more_than_scale_norms_is_not_unfolded(tmp_path, capsys):
    _, folder = saved(tmp_path, "layerscale_rms")
    assert export(folder, tmp_path / "folded") == 0
    message = refused(capsys, tmp_path / "folded", tmp_path / "again", "--unfold")
    assert "LayerScale" in message and "more than multiply the norms" in message


# --- the arithmetic, and what a config says of a model ----------------------------------------------


@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 1000), number=st.integers(1, 64))
def test_folding_rounds_to_the_nearest_number(source, dtype, seed, number):
    """In every dtype that weights may have; layer ``number`` 1 only changes the dtype."""
    weight = torch.randn(500, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(source)
    rounding = Rounding()
    found = rounding.scale("w", weight, number**-0.5, dtype)
    exact = weight.double() / math.sqrt(number)
    info = torch.finfo(dtype)
    if dtype == torch.float64:  # Rounding takes this product for exact
        torch.testing.assert_close(found, exact, rtol=1e-15, atol=0)
        assert rounding.worst == 0
        return
    unit = torch.exp2(torch.floor(torch.log2(exact.abs().clamp(min=info.smallest_normal)))) * info.eps
    assert ((found.double() - exact).abs() <= unit * (0.5 + 1e-4)).all()
    assert rounding.worst == pytest.approx(((found.double() - exact) / exact).abs().max().item(), rel=1e-6)
    if exact.abs().min() >= info.smallest_normal:
        assert rounding.worst <= info.eps / 2 * (1 + 1e-4)


def test_the_size_of_a_chunk_makes_no_difference(monkeypatch):
    """The factor is one number, one for each row, or one for each row of each layer."""
    weight = torch.randn(3, 7, 13)
    for factor in (0.3, torch.rand(3).double(), torch.rand(3, 7).double()):
        exact = weight.double() * (
            factor if isinstance(factor, float) else factor.view(*factor.shape, *[1] * (3 - factor.dim()))
        )
        for elements in (1 << 18, 10):
            monkeypatch.setattr(fold, "_CHUNK", elements)
            assert torch.equal(Rounding().scale("w", weight, factor, torch.bfloat16), exact.bfloat16())
            edit = Rounding().edit("w", factor)
            pieces = [edit.function((start, 2, 0), weight[start : start + 1, 2:5].clone()) for start in range(3)]
            assert torch.equal(torch.cat(pieces), exact[:, 2:5].float())


def test_zeros_stay_zeros_shifted_gains_are_scaled_and_overflow_is_refused():
    rounding = Rounding()
    assert torch.equal(rounding.scale("z", torch.zeros(3), 0.5, torch.float32), torch.zeros(3))
    assert rounding.worst == 0
    assert torch.equal(rounding.scale("g", torch.tensor([0.0, 1.0]), 0.5, torch.float32, 1.0), torch.tensor([0.5, 1.0]))
    with pytest.raises(LNSConfigError, match=r"overflow torch\.float16"):
        rounding.scale("w", torch.tensor([1e6]), 1.0, torch.float16)


def test_architecture_knows_olmos_settings_and_defaults():
    from olmo.config import ModelConfig

    theirs = {f.name: f.default for f in dataclasses.fields(ModelConfig)}
    ours = {f.name: f.default for f in dataclasses.fields(Architecture)}
    assert set(theirs) <= set(ours) | IGNORED, "OLMo has a new model setting"
    assert {name: str(value) for name, value in theirs.items() if name not in IGNORED} == {
        name: str(value) for name, value in ours.items() if name in theirs
    }


@pytest.mark.parametrize(
    "changes",
    [
        {"n_kv_heads": 2},
        {"block_type": "llama", "include_bias": True},
        {"layer_norm_with_affine": False, "weight_tying": True},
        {"attention_layer_norm": True, "n_kv_heads": 2, "bias_for_layer_norm": True},
        {"rope": False, "embedding_layer_norm": True, "activation_type": "gelu"},
    ],
)
def test_shapes_are_those_of_olmos_model(changes):
    model = build(layer_norm_type="default", **changes)
    config = {k: str(v) if isinstance(v, str) else v for k, v in model.config.asdict().items()}
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    assert Architecture.from_config(config, "here").shapes() == expected


RMS = Architecture(
    layer_norm_type="lns_rms", rope=True, include_bias=False, bias_for_layer_norm=False, weight_tying=False
)
LAYER_NORM_BIASES = {"layer_norm_type": "lns_default", "include_bias": True, "weight_tying": True}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"clip_qkv": 8.0}, "clip_qkv"),
        ({"bias_for_layer_norm": True}, "biases in RMSNorm"),
        ({"include_bias": True}, "a bias in the output layer"),
        ({"alibi": True}, "ALiBi"),
        ({"rope": False}, "learned position embeddings"),
        ({"norm_after": True}, "post-norm"),
        ({"attention_layer_norm": True}, "queries and keys"),
        ({"embedding_layer_norm": True}, "on the embeddings"),
        ({"scale_logits": True}, "scale_logits"),
        ({"activation_type": "gelu"}, "activation gelu"),
        (LAYER_NORM_BIASES, "StableLm has none"),
        (LAYER_NORM_BIASES | {"layer_norm_with_affine": False}, "Olmo has none"),
        ({"layer_norm_type": "exotic"}, "layer norm type exotic"),
    ],
)
def test_an_architecture_that_no_stock_class_computes_is_refused(changes, reason):
    with pytest.raises(LNSConfigError, match="no stock transformers class") as caught:
        choose_class(dataclasses.replace(RMS, **changes))
    assert reason in str(caught.value) and "\n" not in str(caught.value)
