"""The demo's arms: one small deep OLMo model, and the two settings in which the arms differ."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from olmo_lns.errors import LNSConfigError

if TYPE_CHECKING:
    from olmo_lns.demo.data import DemoData

__all__ = ["ARMS", "DEFAULT_ARMS", "Arm", "Shape", "parse_arms", "train_config"]


@dataclass(frozen=True)
class Arm:
    """:param norm: OLMo's ``layer_norm_type``.
    :param init_fn: OLMo's ``init_fn``; all arms use ``init_std`` 0.02, cut off at 3 std."""

    norm: str
    init_fn: str
    about: str


ARMS = {
    "preln": Arm("rms", "normal", "Pre-LN, every matrix drawn with std 0.02"),
    "preln_scaled_init": Arm(
        "rms",
        "full_megatron",
        "Pre-LN, residual output projections drawn with 0.02/sqrt(2L) (OLMo's full_megatron; its head has 1/sqrt(d))",
    ),
    "lns": Arm("lns_rms", "normal", "Pre-LN with both norms of block l times 1/sqrt(l), initialization as preln"),
    "preln_mitchell": Arm("rms", "mitchell", "Pre-LN, OLMo's own scaled initialization (changes every matrix)"),
}
#: ``preln_mitchell`` differs from ``preln`` in more than one thing: only on request.
DEFAULT_ARMS = ("preln", "preln_scaled_init", "lns")


@dataclass(frozen=True)
class Shape:
    """Size of model and run; the defaults are the demo. Lengths in tokens, ``batch`` in sequences."""

    layers: int = 24
    d_model: int = 128
    heads: int = 4
    sequence: int = 256
    batch: int = 4
    learning_rate: float = 1e-3


def parse_arms(text: str) -> list[str]:
    """Names from a comma-separated list, in its order.

    :raises LNSConfigError: an unknown name, with the nearest known one; an empty list.
    """
    names = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    for name in names:
        if name not in ARMS:
            near = difflib.get_close_matches(name, ARMS, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise LNSConfigError(f"unknown arm {name!r}.{hint} Known: {', '.join(ARMS)}")
    if not names:
        raise LNSConfigError(f"no arm given. Known: {', '.join(ARMS)}")
    return names


def train_config(arm: str, seed: int, steps: int, shape: Shape, data: DemoData, folder: Path) -> Any:
    """OLMo's ``TrainConfig`` of one run, after :func:`olmo_lns.integrations.olmo.register`."""
    from olmo.config import TrainConfig

    held_out = {"paths": [str(data.heldout)], "num_workers": 0, "drop_last": True, "seed": 0}
    return TrainConfig.new(
        run_name=f"demo-{arm}-seed{seed}-data-{data.digest[:12]}",
        seed=seed,
        model=_model(arm, shape, data),
        optimizer={"name": "adamw", "learning_rate": shape.learning_rate, "weight_decay": 0.1, "eps": 1e-8},
        scheduler={"name": "cosine_with_warmup", "t_warmup": max(1, steps // 10), "alpha_f": 0.1},
        data={"paths": [str(data.train)], "num_workers": 0, "drop_last": True},
        evaluators=[{"label": "heldout", "data": held_out, "subset_num_batches": 32}],
        eval_interval=steps,
        tokenizer={"identifier": str(data.tokenizer)},
        save_folder=str(folder),
        save_interval=None,
        save_interval_unsharded=max(1, steps // 6),
        save_num_unsharded_checkpoints_to_keep=1,
        no_pre_train_checkpoint=True,
        try_load_latest_save=True,
        max_duration=steps,
        stop_at=steps,
        global_train_batch_size=shape.batch,
        device_train_microbatch_size=shape.batch,
        device_eval_batch_size=8,
        max_grad_norm=1.0,
        precision="fp32",
        distributed_strategy="ddp",
        save_data_indices=False,
    )


def _model(arm: str, shape: Shape, data: DemoData) -> dict[str, Any]:
    return {
        "d_model": shape.d_model,
        "n_layers": shape.layers,
        "n_heads": shape.heads,
        "mlp_hidden_size": 4 * shape.d_model,  # SwiGLU: two halves of 2·d
        "rope": True,
        "attention_dropout": 0.0,
        "residual_dropout": 0.0,
        "embedding_dropout": 0.0,
        "layer_norm_type": ARMS[arm].norm,
        "layer_norm_eps": 1e-6,
        "include_bias": False,
        "weight_tying": False,
        "max_sequence_length": shape.sequence,
        "vocab_size": data.vocab_size,
        "embedding_size": data.vocab_size,
        "eos_token_id": data.eos_token_id,
        "pad_token_id": data.eos_token_id,
        "init_fn": ARMS[arm].init_fn,
        "init_std": 0.02,
        "init_cutoff_factor": 3.0,
    }
