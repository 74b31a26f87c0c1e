"""Train an OLMo config in this process, with a record of every step."""

import os
import signal
from dataclasses import dataclass, field
from typing import Any

import pytest
from olmo.train import Trainer

from olmo_lns.processes import process_group
from olmo_lns.train import load_config, prepare, run


@dataclass
class Training:
    """:param result: of ``olmo_lns.train.run``. :param losses: by step.

    :param before: step -> the token ids of its batch, and the weights before it.
    """

    result: Any = None
    model: Any = None
    losses: dict[int, float] = field(default_factory=dict)
    before: dict[int, Any] = field(default_factory=dict)


def train(path, *overrides, signal_at=None):
    """Train a config; send SIGINT to this process at step ``signal_at``."""
    found, config, step = Training(), load_config(path, overrides), Trainer.train_step

    def train_step(trainer, batch, **options):
        weights = {name: value.clone() for name, value in trainer.model.state_dict().items()}
        found.model, found.before[trainer.global_step] = trainer.model, (batch["input_ids"].clone(), weights)
        metrics = step(trainer, batch, **options)
        found.losses[trainer.global_step] = trainer.cur_train_loss
        if trainer.global_step == signal_at:
            os.kill(os.getpid(), signal.SIGINT)
        return metrics

    with process_group() as device, pytest.MonkeyPatch.context() as patched:
        patched.setattr(Trainer, "train_step", train_step)
        prepare(config, device)
        found.result = run(config, device)
    return found
