"""Parameters and FLOPs in closed form against OLMo's own model and counter."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from olmo_lns.errors import LNSConfigError
from olmo_lns.study.engines import OLMO
from olmo_lns.study.engines.base import shape_of
from olmo_lns.study.engines.shape import GPUS, Shape

REPOSITORY = Path(__file__).resolve().parents[2]
SHAPE = Shape(
    layers=8, width=512, heads=8, kv_heads=8, inner=2048, vocabulary=50304, tied=False, gain=True, sequence=4096,
    batch=256, steps=19074, warmup=2000, learning_rate=6e-4, min_learning_rate=6e-5,
)  # fmt: skip


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"model.weight_tying": True},
        {"model.layer_norm_with_affine": False},
        {"model.n_kv_heads": 2},
        {"model.mlp_hidden_size": None, "model.mlp_ratio": 6},
    ],
    ids=str,
)
def test_parameters_and_flops_agree_with_olmo(changed: dict[str, Any]) -> None:
    pytest.importorskip("olmo", reason="needs ai2-olmo")
    from olmo_lns.study.engines import olmo_config

    config = olmo_config.load(REPOSITORY / "configs" / "olmo" / "60M-preln.yaml", changed)
    shape = shape_of(olmo_config.flatten(config), OLMO)
    parameters, per_token = olmo_config.count(config)
    assert shape.parameters == parameters
    # OLMo's backward pass counts the input embedding as a matrix multiplication, and so with tied
    # embeddings the same parameters: 6 N_without_wte + 4 wte; ours leaves the lookup out.
    untied = 0 if shape.tied else 4 * shape.embedding
    tied = -2 * shape.embedding if shape.tied else 0
    assert per_token * shape.tokens == pytest.approx(shape.flops + (untied + tied) * shape.tokens, rel=1e-12)


def test_tokens_hours_and_disk() -> None:
    assert SHAPE.tokens == 256 * 4096 * 19074 and SHAPE.parameters == 85_074_432
    by_hand = (6 * (85_074_432 - 50304 * 512) + 12 * 8 * 512 * 4096) * SHAPE.tokens
    assert SHAPE.flops == by_hand
    assert SHAPE.gpu_hours("H100", 0.4) == pytest.approx(by_hand / (989.5e12 * 0.4) / 3600)
    assert SHAPE.checkpoint_bytes == 12 * 85_074_432


def test_memory_by_strategy() -> None:
    ddp, fsdp = SHAPE.memory("ddp", 8, 8), SHAPE.memory("fsdp", 8, 8)
    assert ddp["states"] == 16 * SHAPE.parameters and fsdp["states"] < ddp["states"] / 2
    assert SHAPE.memory("ddp", 8, 16)["activations"] == 2 * ddp["activations"]
    assert SHAPE.memory("ddp", 8, 8, recompute=True)["activations"] < ddp["activations"] / 10
    assert SHAPE.memory("distributed_optimizer", 8, 8)["states"] == pytest.approx(7.5 * SHAPE.parameters)
    assert ddp["total"] == ddp["states"] + ddp["activations"] + ddp["logits"]
    with pytest.raises(LNSConfigError, match="strategy 'zero9'"):
        SHAPE.memory("zero9", 8, 8)


def test_durations() -> None:
    settings = {
        "model.d_model": 64, "model.n_heads": 4, "model.n_layers": 2, "model.mlp_ratio": 8, "model.vocab_size": 100,
        "model.max_sequence_length": 100, "model.weight_tying": False, "model.layer_norm_with_affine": True,
        "global_train_batch_size": 10, "optimizer.learning_rate": 1e-3, "scheduler.t_warmup": 1, "scheduler.alpha_f": 0.1,
    }  # fmt: skip
    assert shape_of(settings | {"max_duration": "20e3T"}, OLMO).steps == 20
    assert shape_of(settings | {"max_duration": "20001T"}, OLMO).steps == 21
    assert shape_of(settings | {"max_duration": 7}, OLMO).steps == 7
    with pytest.raises(LNSConfigError, match="in epochs"):
        shape_of(settings | {"max_duration": "1ep"}, OLMO)
    with pytest.raises(LNSConfigError, match="no 'max_duration'"):
        shape_of(settings, OLMO)


def test_gpus_are_the_data_sheets() -> None:
    assert {name: gpu.peak / 1e12 for name, gpu in GPUS.items()} == {"A100": 312, "H100": 989.5, "H200": 989.5}
    assert replace(SHAPE, steps=2 * SHAPE.steps).gpu_hours("A100", 0.5) == pytest.approx(
        4 / 5 * 2 * SHAPE.gpu_hours("A100", 0.4)
    )
