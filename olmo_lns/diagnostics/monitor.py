"""Record the output variance of each block during OLMo training, for the paper's variance-through-training figure.

``OLMO_LNS_MONITOR=every=100`` on any OLMo launch writes a CSV file in the save folder, with one row per block every 100
steps. A sampled step observes the blocks in the forward pass only, without the recomputation by activation
checkpointing in the backward pass.
"""

from __future__ import annotations

import logging
import math
import re
from pathlib import Path
from typing import Any, Callable, Mapping

import torch

from olmo_lns.atomic import write_atomically
from olmo_lns.diagnostics.capture import observe
from olmo_lns.diagnostics.variance import Moments
from olmo_lns.environment import MONITOR, read
from olmo_lns.errors import LNSConfigError
from olmo_lns.hook import wrap
from olmo_lns.integrations.olmo.model import blocks_of

log = logging.getLogger(__name__)

#: Columns of the CSV file. ``block`` is 1-based; :mod:`~olmo_lns.diagnostics.variance` defines the others.
COLUMNS = ("step", "block", "variance", "rms", "max", "tokens")
FILE_NAME = "lns_variance.csv"
#: A whole row: step and block, three measures, which may be NaN, and the number of tokens.
ROW = re.compile(r"\d+,\d+(,-?(\d+(\.\d*)?(e[+-]?\d+)?|nan|inf)){3},\d+")


def parse_setting(value: str) -> int:
    """Return the number of steps between two samples in ``"every=100"``.

    :raises LNSConfigError: if the key is not ``every``, or the value is not a whole number >= 1.
    """
    key, _, every = value.partition("=")
    if key != "every" or not every.isdecimal() or int(every) < 1:
        raise LNSConfigError(
            f"{MONITOR} is {value!r}. Expected every=N with a whole number N >= 1. Set {MONITOR}=every=100."
        )
    return int(every)


def register() -> None:
    """Monitor every ``Trainer`` that is fitted while ``OLMO_LNS_MONITOR`` is set.

    :mod:`olmo_lns.hook` calls it after each execution of ``olmo.train``.
    """
    wrap("olmo.train:Trainer.fit", _wrap_fit, needed=False)


def _wrap_fit(fit: Callable[..., Any]) -> Callable[..., Any]:
    def wrapped(self: Any) -> Any:
        if value := read(MONITOR):
            Monitor(self, parse_setting(value), Path(self.cfg.save_folder) / FILE_NAME)
        return fit(self)

    return wrapped


class Monitor:
    """Measure the output variance of each block while an ``olmo.train.Trainer`` trains, in every ``every``-th step.

    Creating a monitor replaces two methods of the trainer. The monitor writes a row for each block to ``path``.

    :raises MeasurementError: if the blocks of the model are not numbered by their positions.
    :raises LNSConfigError: if ``path`` exists and is not a file of the monitor.
    """

    def __init__(self, trainer: Any, every: int, path: Path) -> None:
        self.every, self.path = every, path
        self._trainer = trainer
        blocks_of(trainer.model)  # raise now rather than at the first sample
        self._moments: Moments | None = None
        self._is_writer = not (torch.distributed.is_initialized() and torch.distributed.get_rank())
        self._train_step, self._model_forward = trainer.train_step, trainer.model_forward
        trainer.train_step, trainer.model_forward = self._step, self._forward
        if self._is_writer:
            start_file(path, trainer.global_step)
            log.info("LNS monitor: the output variance of each block is written to %s every %d steps.", path, every)

    def _step(self, *args: Any, **kwargs: Any) -> Any:
        step = self._trainer.global_step  # fit() increments it before the step
        if step % self.every:
            return self._train_step(*args, **kwargs)
        self._moments = Moments(len(blocks_of(self._trainer.model)))
        try:
            metrics = self._train_step(*args, **kwargs)
            self._write(step, self._moments)
        finally:
            self._moments = None
        return metrics

    def _forward(self, batch: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        if (moments := self._moments) is None:
            return self._model_forward(batch, *args, **kwargs)
        mask = batch.get("attention_mask")
        # Search again for each sample: FSDP and block groups may have been wrapped since the last.
        blocks = blocks_of(self._trainer.model)
        with observe(blocks, lambda block, call: moments.add(block, call.output, mask)):
            return self._model_forward(batch, *args, **kwargs)

    def _write(self, step: int, moments: Moments) -> None:
        moments.pool_ranks()
        if not self._is_writer:
            return
        columns = moments.columns()
        rows = list(zip(columns["variance"], columns["rms"], columns["max"], strict=True))
        if bad := [block for block, row in enumerate(rows, start=1) if not math.isfinite(row[0])]:
            log.warning("Block %d is the first block with an output that is not finite, at step %d.", bad[0], step)
        with self.path.open("a", encoding="utf-8") as file:
            for block, row in enumerate(rows, start=1):
                numbers = ",".join(f"{value:.6g}" for value in row)
                file.write(f"{step},{block},{numbers},{moments.tokens}\n")


def start_file(path: Path, step: int) -> None:
    """Write the header, or keep the whole samples of an existing file up to ``step``: a resumed run repeats later ones.

    A kill or a full disk leaves a row that was cut, or a sample without its last blocks. Both are removed.

    :raises LNSConfigError: if ``path`` is not a file of the monitor.
    """
    expected = ",".join(COLUMNS)
    content = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    if expected.startswith(content.strip("\0")):  # a crash of the machine leaves an empty file, or NUL bytes
        content = f"{expected}\n"
    header, *rows = content[: content.rfind("\n") + 1].splitlines() or [content]  # without a row that has no end
    if header != expected:
        raise LNSConfigError(
            f"{MONITOR}: {path} is not a file of the monitor. Its columns are {header[:80]!r} instead of {expected!r}. "
            "Move the file away."
        )
    samples: dict[int, dict[int, str]] = {}  # step -> block -> row; the last of equal ones, as of two attempts
    for row in filter(ROW.fullmatch, rows):
        sampled_step, block = map(int, row.split(",")[:2])
        samples.setdefault(sampled_step, {})[block] = row
    blocks = max((block for sample in samples.values() for block in sample), default=0)
    whole = {key: sample for key, sample in sorted(samples.items()) if key <= step and len(sample) == blocks}
    kept = [sample[block] for sample in whole.values() for block in sorted(sample)]
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, "\n".join([header, *kept]) + "\n")
