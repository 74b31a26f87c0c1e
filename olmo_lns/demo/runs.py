"""One run of the demo: an arm under a seed, recorded so that it can stop and go on anywhere.

A run's folder holds ``config.yaml`` (what was asked for), ``losses.csv``, ``variances.csv``,
OLMo's checkpoints, ``train.log`` and, once finished, ``result.json``.
"""

from __future__ import annotations

import csv
import itertools
import json
import logging
import re
import shutil
import time
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable, Iterator, Mapping, Sequence

import yaml

from olmo_lns.errors import LNSConfigError

if TYPE_CHECKING:
    import torch

    from olmo_lns.runs.trainer import ObservedTrainer

__all__ = ["Interrupted", "Result", "Run", "execute"]

#: Held-out sequences over which the variance is measured.
VARIANCE_SEQUENCES = 32
#: Keys that name places: a folder that was moved is still the same run.
_PLACES = ("data.paths", "evaluators", "tokenizer", "save_folder")


class Interrupted(Exception):
    """A signal ended a run early; its checkpoint is saved. ``step`` is how far it came."""

    def __init__(self, step: int) -> None:
        super().__init__(f"interrupted at step {step}")
        self.step = step


@dataclass(frozen=True)
class Result:
    """:param train_loss: mean over the last tenth of the steps; nats per byte, as ``heldout_loss``.
    :param variance: of each block's output on held-out text, block 1 first; ``variance_at_init`` before step 1.
    :param seconds: of training in this and earlier sessions, evaluation included.
    """

    arm: str
    seed: int
    steps: int
    parameters: int
    train_loss: float
    heldout_loss: float
    variance: list[float]
    variance_at_init: list[float]
    seconds: float

    @property
    def growth(self) -> float:
        """V: variance of the last block over that of block L/4."""
        return self.variance[-1] / self.variance[max(1, len(self.variance) // 4) - 1]


@dataclass(frozen=True)
class Run:
    """One arm under one seed, in ``folder``; ``config`` is OLMo's TrainConfig, not yet prepared."""

    arm: str
    seed: int
    config: Any
    folder: Path

    @property
    def steps(self) -> int:
        return int(self.config.max_duration)

    @property
    def checkpoint(self) -> Path:
        return self.folder / f"step{self.steps}-unsharded"

    @property
    def saved_step(self) -> int:
        """The step of the newest checkpoint, from which the run goes on; 0 without one."""
        found = [re.fullmatch(r"step(\d+)(-unsharded)?", path.name) for path in self.folder.glob("step*")]
        return max((int(match[1]) for match in found if match), default=0)

    def result(self) -> Result | None:
        """The result of the finished run, or None while it is unfinished."""
        path = self.folder / "result.json"
        return Result(**json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else None

    def losses(self) -> list[tuple[int, float]]:
        """(step, training loss) so far."""
        return [(int(row["step"]), float(row["loss"])) for row in _read(self.folder / "losses.csv")]

    def claim(self, *, overwrite: bool) -> None:
        """Take the folder for this configuration, or keep it where it is this run's already.

        :param overwrite: remove a run of another configuration.
        :raises LNSConfigError: there is one, and no leave to remove it; the first difference is named.
        """
        path = self.folder / "config.yaml"
        if path.is_file() and (difference := self._difference(path)) is not None:
            if not overwrite:
                raise LNSConfigError(
                    f"{self.folder} holds another run: {difference}; "
                    "use --out for another folder, or --overwrite to replace it"
                )
            shutil.rmtree(self.folder)
        if not path.is_file():
            self.folder.mkdir(parents=True, exist_ok=True)
            self.config.save(path)

    def _difference(self, path: Path) -> str | None:
        """How this run differs from the config in ``path``, in its most telling key."""
        from omegaconf import OmegaConf

        there = _flat(yaml.safe_load(path.read_text(encoding="utf-8")))
        here = _flat(yaml.safe_load(OmegaConf.to_yaml(OmegaConf.structured(self.config))))
        differing = [key for key in sorted({*there, *here}) if there.get(key) != here.get(key)]
        if not differing:
            return None
        # The length of the run says more than the intervals that follow from it.
        key = min(differing, key=lambda name: name != "max_duration")
        return f"{key} is {there.get(key)} there and {here.get(key)} here"


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in values.items():
        name = f"{prefix}{key}"
        if name not in _PLACES:
            out |= _flat(value, f"{name}.") if isinstance(value, dict) else {name: value}
    return out


def _read(path: Path) -> list[dict[str, str]]:
    if not path.is_file():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def _write(path: Path, names: list[str], rows: Sequence[Sequence[float]]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file, lineterminator="\n").writerows([names, *rows])


class Recorder:
    """Observes OLMo's Trainer and keeps the run's files; see :class:`olmo_lns.runs.trainer.LoopObserver`."""

    def __init__(self, run: Run, report_step: Callable[[int, float], None]) -> None:
        self.run, self.report_step = run, report_step
        self.heldout_loss: float | None = None
        self.trainer: ObservedTrainer | None = None
        self.started = time.perf_counter()
        self.earlier = 0.0

    def on_start(self, trainer: ObservedTrainer) -> None:
        self.trainer, step = trainer, trainer.global_step
        # Steps after the checkpoint were lost with the process that did them.
        rows = [row for row in _read(self.run.folder / "losses.csv") if int(row["step"]) <= step]
        _write(
            self.run.folder / "losses.csv",
            ["step", "loss", "seconds"],
            [(int(r["step"]), float(r["loss"]), float(r["seconds"])) for r in rows],
        )
        self.earlier = float(rows[-1]["seconds"]) if rows else 0.0
        self.started = time.perf_counter()
        if step == 0:
            self.record_variance(step)
        if step >= self.run.steps:  # killed between the last step and the result
            trainer.eval()
        self.report_step(step, float("nan"))

    def on_step(self, step: int, loss: float) -> None:
        with (self.run.folder / "losses.csv").open("a", newline="", encoding="utf-8") as file:
            csv.writer(file, lineterminator="\n").writerow([step, f"{loss:.6f}", f"{self.seconds():.2f}"])
        self.report_step(step, loss)

    def on_eval(self, step: int, metrics: Mapping[str, float]) -> None:
        self.heldout_loss = metrics["eval/heldout/CrossEntropyLoss"]

    def seconds(self) -> float:
        return self.earlier + time.perf_counter() - self.started

    def record_variance(self, step: int) -> None:
        """Append the variance of every block's output to ``variances.csv``."""
        from olmo_lns.diagnostics.variance import block_output_variance

        assert self.trainer is not None
        batches = _heldout_batches(self.run.config)
        measured = block_output_variance(self.trainer.model, None, batches, self.trainer.device).variance
        path = self.run.folder / "variances.csv"
        rows = [(int(r["step"]), int(r["block"]), float(r["variance"])) for r in _read(path) if int(r["step"]) != step]
        rows += [(step, block, value) for block, value in enumerate(measured, start=1)]
        _write(path, ["step", "block", "variance"], rows)

    def finish(self) -> Result:
        """Measure what is left and write ``result.json``, the mark of a finished run."""
        assert self.trainer is not None and self.heldout_loss is not None
        seconds = self.seconds()
        self.record_variance(self.run.steps)
        by_step: dict[int, list[float]] = {}
        for row in _read(self.run.folder / "variances.csv"):
            by_step.setdefault(int(row["step"]), []).append(float(row["variance"]))
        last = [loss for _, loss in self.run.losses()][-max(1, self.run.steps // 10) :]
        result = Result(
            arm=self.run.arm,
            seed=self.run.seed,
            steps=self.run.steps,
            parameters=self.trainer.model.num_params(),
            train_loss=sum(last) / len(last),
            heldout_loss=self.heldout_loss,
            variance=by_step[self.run.steps],
            variance_at_init=by_step[0],
            seconds=round(seconds, 1),
        )
        temporary = self.run.folder / "result.json.tmp"
        temporary.write_text(json.dumps(asdict(result), indent=2) + "\n", encoding="utf-8")
        temporary.replace(self.run.folder / "result.json")
        return result


def _heldout_batches(config: Any) -> list[torch.Tensor]:
    import numpy as np
    import torch

    length = config.model.max_sequence_length
    tokens = np.memmap(config.evaluators[0].data.paths[0], dtype=np.uint16, mode="r")
    rows = np.stack(list(itertools.islice(_sequences(tokens, length), VARIANCE_SEQUENCES)))
    return list(torch.from_numpy(rows.astype(np.int64)).split(config.device_eval_batch_size))


def _sequences(tokens: Any, length: int) -> Iterator[Any]:
    """Sequences spread over all of the text, for the start of the memmap is the manual alone."""
    count = len(tokens) // length
    for number in range(0, count, max(1, count // VARIANCE_SEQUENCES)):
        yield tokens[number * length : (number + 1) * length]


@contextmanager
def _logged(folder: Path) -> Iterator[None]:
    """OLMo's and our log goes to the run's ``train.log``, not over the progress bar."""
    handler = logging.FileHandler(folder / "train.log", encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(name)s %(levelname)s %(message)s"))
    loggers = [logging.getLogger(name) for name in ("olmo", "olmo_lns")]
    before = [(logger.level, logger.propagate) for logger in loggers]
    for logger in loggers:
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        logger.propagate = False
    try:
        yield
    finally:
        for logger, (level, propagate) in zip(loggers, before, strict=True):
            logger.removeHandler(handler)
            logger.setLevel(level)
            logger.propagate = propagate
        handler.close()


def execute(run: Run, device: torch.device, report_step: Callable[[int, float], None]) -> Result:
    """Train ``run`` from where it is to its end; its folder must be claimed and the process group up.

    :param report_step: called with (step, training loss); the loss of a start or resume is NaN.
    :raises Interrupted: SIGINT or SIGTERM; a checkpoint was saved.
    """
    from copy import deepcopy

    from olmo_lns.runs.train import prepare
    from olmo_lns.runs.trainer import run as train

    recorder = Recorder(run, report_step)
    config = deepcopy(run.config)
    with _logged(run.folder):
        prepare(config, device)
        outcome = train(config, device, observer=recorder)
        if not outcome.complete:
            raise Interrupted(outcome.step)
        return recorder.finish()
