"""Parameters and FLOPs in closed form equal those of OLMo's own model and counter; memory equals a sum by hand."""

from pathlib import Path

import pytest

from olmo_lns.errors import LNSConfigError
from olmo_lns.study import files
from olmo_lns.study.engines import OLMO
from olmo_lns.study.engines.base import Machine, Shape

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
def test_parameters_and_flops_agree_with_olmo(changed):
    pytest.importorskip("olmo", reason="needs ai2-olmo")
    from olmo_lns.study.engines.olmo import load

    config = load(REPOSITORY / "configs" / "olmo" / "60M-preln.yaml", changed)
    shape = OLMO.shape(files.flatten(config))
    parameters, per_token = OLMO.count(Path(), config)
    assert shape.parameters == parameters
    # OLMo counts 6 N_without_wte + 4 wte: it takes the input embedding for a matrix multiplication in the backward
    # pass. Ours leaves this lookup out, and counts a tied embedding as the head.
    untied = 0 if shape.tied else 4 * shape.embedding
    tied = -2 * shape.embedding if shape.tied else 0
    assert per_token * shape.tokens == pytest.approx(shape.flops + (untied + tied) * shape.tokens, rel=1e-12)


def test_tokens_flops_and_checkpoint_size_equal_those_by_hand():
    assert SHAPE.tokens == 256 * 4096 * 19074 and SHAPE.parameters == 85_074_432
    by_hand = (6 * (85_074_432 - 50304 * 512) + 12 * 8 * 512 * 4096) * SHAPE.tokens
    assert SHAPE.flops == by_hand and SHAPE.checkpoint_bytes == 12 * 85_074_432


def test_memory_equals_its_computation_by_hand():
    """Memory holds states, 14 d + 4 inner bf16 activations a token and block, and logits in bf16 and twice in fp32."""
    tokens = 8 * 4096
    rest = 2 * tokens * (14 * 512 + 4 * 2048) * 8 + 10 * tokens * 50304
    assert Machine("ddp", 8).memory(SHAPE, 8) == 16 * SHAPE.parameters + rest
    sharded = 16 * SHAPE.parameters / 8 + 2 * (2 * (4 * 512**2 + 3 * 512 * 2048) + 50304 * 512)
    assert Machine("fsdp", 8).memory(SHAPE, 8) == pytest.approx(sharded + rest)
    kept = 2 * tokens * 512 * 8 + 10 * tokens * 50304
    assert Machine("ddp", 8, recompute=True).memory(SHAPE, 8) == 16 * SHAPE.parameters + kept
    # Two GPUs share a model, so that the moments are divided by four.
    halved = (SHAPE.parameters * (2 + 4 + 12 / 4) + rest) / 2
    assert Machine("distributed_optimizer", 8, split=2).memory(SHAPE, 8) == pytest.approx(halved)
    assert Machine("zero9", 8).memory(SHAPE, 8) is None


@pytest.mark.parametrize(
    ("machine", "gpus", "even", "said"),
    [
        (Machine("ddp", 8), 32, True, None),
        (Machine("ddp", 8), 64, True, "64 GPUs × micro-batch 8 do not divide the batch of 256"),
        (Machine("ddp", 8), 64, False, None),
        (Machine("ddp", 8), 7, False, "7 GPUs do not divide the batch of 256"),
        (Machine("ddp", 8, 2, "TP 2"), 64, True, None),
        (Machine("ddp", 8, 4, "TP 4"), 6, True, "TP 4 is more than 6 GPUs, or does not divide them"),
        (Machine("ddp", 7), 8, True, "256 is not a multiple of the micro-batch of 7"),
    ],
    ids=str,
)
def test_the_number_of_gpus_must_fit_the_batch(machine, gpus, even, said):
    found = machine.problem(SHAPE, gpus, even=even)
    assert (found is None) if said is None else said in str(found)


def test_a_duration_is_read_in_steps_or_tokens_and_refused_in_epochs():
    settings = {
        "model.d_model": 64, "model.n_heads": 4, "model.n_layers": 2, "model.mlp_ratio": 8, "model.vocab_size": 100,
        "model.max_sequence_length": 100, "model.weight_tying": False, "model.layer_norm_with_affine": True,
        "global_train_batch_size": 10, "optimizer.learning_rate": 1e-3, "scheduler.t_warmup": 1, "scheduler.alpha_f": 0.1,
    }  # fmt: skip
    assert OLMO.shape(settings | {"max_duration": "20e3T"}).steps == 20
    assert OLMO.shape(settings | {"max_duration": "20001T"}).steps == 21
    assert OLMO.shape(settings | {"max_duration": 7}).steps == 7
    with pytest.raises(LNSConfigError, match="in epochs"):
        OLMO.shape(settings | {"max_duration": "1ep"})
    with pytest.raises(LNSConfigError, match="no 'max_duration'"):
        OLMO.shape(settings)
