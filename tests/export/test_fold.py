"""The arithmetic of a fold, and what a config says of a model."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from olmo_lns.checkpoints.olmo import Architecture
from olmo_lns.errors import LNSConfigError
from olmo_lns.export import fold
from olmo_lns.export.fold import Rounding
from olmo_lns.export.huggingface import choose_class


@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 1000), number=st.integers(1, 64))
def test_the_result_is_the_nearest_number(source: torch.dtype, dtype: torch.dtype, seed: int, number: int) -> None:
    """Of every dtype that weights may have; ``number`` 1 only changes the dtype."""
    weight = torch.randn(500, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(source)
    rounding = Rounding()
    found = rounding.scale("w", weight, number**-0.5, dtype)
    exact = weight.double() / math.sqrt(number)
    info = torch.finfo(dtype)
    if dtype == torch.float64:  # the product is taken for exact
        torch.testing.assert_close(found, exact, rtol=1e-15, atol=0)
        assert rounding.worst == 0
        return
    unit = torch.exp2(torch.floor(torch.log2(exact.abs().clamp(min=info.smallest_normal)))) * info.eps
    assert ((found.double() - exact).abs() <= unit * (0.5 + 1e-4)).all()
    assert rounding.worst == pytest.approx(((found.double() - exact) / exact).abs().max().item(), rel=1e-6)
    if exact.abs().min() >= info.smallest_normal:
        assert rounding.worst <= info.eps / 2 * (1 + 1e-4)


def test_chunks_make_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of any factor: one number, one for each row, one for each row of each layer."""
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


def test_zeros_zero_centred_gains_and_overflow() -> None:
    rounding = Rounding()
    assert torch.equal(rounding.scale("z", torch.zeros(3), 0.5, torch.float32), torch.zeros(3))
    assert rounding.worst == 0
    assert torch.equal(rounding.scale("g", torch.tensor([0.0, 1.0]), 0.5, torch.float32, 1.0), torch.tensor([0.5, 1.0]))
    with pytest.raises(LNSConfigError, match=r"overflow torch\.float16"):
        rounding.scale("w", torch.tensor([1e6]), 1.0, torch.float16)


def test_architecture_knows_olmos_settings_and_defaults() -> None:
    from olmo.config import ModelConfig

    theirs = {f.name: f.default for f in dataclasses.fields(ModelConfig)}
    ours = {f.name: f.default for f in dataclasses.fields(Architecture)}
    assert set(theirs) <= set(ours), "OLMo has a new model setting"
    assert {name: str(value) for name, value in theirs.items()} == {name: str(ours[name]) for name in theirs}


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
def test_shapes_are_those_of_olmos_model(changes: dict[str, Any]) -> None:
    from support.olmo_models import build

    model = build(layer_norm_type="default", **changes)
    config = {k: str(v) if isinstance(v, str) else v for k, v in model.config.asdict().items()}
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    assert Architecture.from_config(config, "here").shapes() == expected


RMS = Architecture(
    layer_norm_type="lns_rms", rope=True, include_bias=False, bias_for_layer_norm=False, weight_tying=False
)
BIASES = {"layer_norm_type": "lns_default", "include_bias": True, "weight_tying": True}


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
        (BIASES, "StableLm has none"),
        (BIASES | {"layer_norm_with_affine": False}, "Olmo has none"),
        ({"layer_norm_type": "exotic"}, "layer norm type exotic"),
    ],
)
def test_what_no_class_computes_is_refused(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(LNSConfigError, match="no stock transformers class") as caught:
        choose_class(dataclasses.replace(RMS, **changes))
    assert reason in str(caught.value) and "\n" not in str(caught.value)
