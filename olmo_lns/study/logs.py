"""Find the console logs of a run, and read the losses in them.

OLMo and OLMo-core print a message for each logged step: a line with the step, then a line for each metric. Megatron
prints one line. A launcher may put a label before each line. The lines of each label are then read by themselves.
"""

from __future__ import annotations

import math
import re
import statistics
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from olmo_lns.errors import LNSConfigError

ANSI = re.compile(r"\x1b\[[0-9;]*m")
#: Labels of ``srun --label`` (``3: ``), torchrun's ``--tee`` and mpirun's ``--tag-output`` (``[default3]:``,
#: ``[1,3]<stdout>:``) and pdsh (``node-3: ``), also one after the other.
LABEL = re.compile(r"(?: *\d+: |\[[\w.,/-]+\](?:<std\w+>)?:|[A-Za-z][\w.-]*: )*")
#: The end of the first line of a message of OLMo or OLMo-core.
STEP = re.compile(r"\[step=(\d+)/(\d+|\?\?\?)(?:,epoch=\d+)?(?:,eta=[^\]]*)?\]\s*$")
RANK = re.compile(r":(\d+)\t|rank=(\d+)\]")  # in that line, without and with a terminal
METRIC = re.compile(r" {3,}(\S.*?)=(\S+)\s*$")
LOSSES = ("train/CrossEntropyLoss", "train/CE loss")
HELDOUT = ("eval/heldout/CrossEntropyLoss", "eval/lm/heldout/CE loss")
NAMES = (*LOSSES, *HELDOUT)
#: Both frameworks print at least four digits: 0.9876, 3.025, 10.25, 100.2, 1,234.
PRINTED = re.compile(
    r"0\.\d{4,}|[1-9]\.\d{3,}|[1-9]\d\.\d\d+|[1-9]\d{2,3}\.\d+|\d{1,3}(,\d{3})+(\.\d+)?|\d(\.\d+)?[eE]-\d\d|[-+]?(nan|inf)"
)
#: Megatron's line of a step. Its last number shows that the line is whole.
ITERATION = re.compile(
    r"iteration\s+(\d+)\s*/\s*(\d+)\s*\|(?:.*\| lm loss:\s*(\S+) \|)?.*\| number of skipped iterations:\s*\d+ \|"
)
VALIDATION = re.compile(r"validation loss at iteration (\d+)(?: on validation set)? \| lm loss value: (\S+) \|")
MEGATRON_PRINTED = re.compile(r"\d\.\d{6}E[+-]\d\d|[-+]?(nan|inf)", re.IGNORECASE)
ENDED = "[after training is done]"


def find_logs(folder: Path) -> list[Path]:
    """Return the console logs in a run folder by name. Numbers are sorted by value: ``-99`` before ``-100``."""
    parts = {path: re.split(r"(\d+)", path.name) for path in folder.glob("*.log")}  # every second part is a number
    return sorted(parts, key=lambda path: [int(part) if part.isdecimal() else part for part in parts[path]])


def next_log(folder: Path) -> Path:
    """Return the path of the next log, after the highest number: the log of another attempt is never overwritten."""
    matches = [re.fullmatch(r"attempt-(\d+)\.log", path.name) for path in folder.glob("*.log")]
    return folder / f"attempt-{max((int(match[1]) for match in matches if match), default=0) + 1:02d}.log"


@dataclass
class Curve:
    """Losses of a run, in nats per token, by optimizer step.

    :param losses: training loss.
    :param heldout: loss on held-out data after the step.
    :param logged: the steps in the log, including those that Megatron skipped and logged without a loss.
    :param total_steps: planned number of steps, or None if it is unknown.
    :param has_ended: True if Megatron's training loop has ended after the last loss, and not by a signal or an exit
        option.
    """

    losses: dict[int, float] = field(default_factory=dict)
    heldout: dict[int, float] = field(default_factory=dict)
    logged: list[int] = field(default_factory=list)
    total_steps: int | None = None
    has_ended: bool = False

    @property
    def last(self) -> int:
        """The last step with a loss. The steps are in order."""
        return next(reversed(self.losses), 0)

    @property
    def interval(self) -> int:
        """The most frequent number of steps between two logged steps, or 1 for fewer than two steps."""
        distances = [after - before for before, after in pairwise(self.logged)]
        return max(statistics.multimode(distances), default=1)

    @property
    def is_done(self) -> bool:
        """True if the log has the loss of the last planned step, or the end of Megatron's training.

        Megatron may end without a loss for the last step.
        """
        return self.has_ended or (self.total_steps is not None and self.last >= self.total_steps)

    def final(self, fraction: float) -> tuple[float, int]:
        """Return the mean and the number of the losses in the last ``fraction`` of a finished run.

        Megatron also logs the first step after a restart. That loss is omitted: the next loss includes it.
        """
        interval, start = self.interval, self.last - max(1, round(fraction * self.last))
        tail = {step: loss for step, loss in self.losses.items() if step > start}
        regular = [loss for step, loss in tail.items() if step % interval == 0] or [*tail.values()]
        return statistics.fmean(regular), len(regular)

    def add_step(self, step: int, total: str) -> None:
        """Add a logged step. If a restart repeats a step, its old loss and those of all later steps are removed."""
        if total.isdecimal():
            if self.total_steps not in (None, int(total)):
                raise LNSConfigError(
                    f"The run has {total} steps in all at step {step}, but {self.total_steps} before. Keep the logs of "
                    "one run only."
                )
            self.total_steps = int(total)
        while self.logged and self.logged[-1] >= step:
            self.logged.pop()
        self.logged.append(step)

    def add_loss(self, step: int, loss: float) -> None:
        """Add the training loss of a step. After a restart it replaces the losses of this and all later steps."""
        if step <= self.last:
            self.losses = {earlier: value for earlier, value in self.losses.items() if earlier < step}
            self.heldout = {earlier: value for earlier, value in self.heldout.items() if earlier < step}
        self.losses[step], self.has_ended = loss, False


@dataclass
class _Message:
    """The part of a message of OLMo or OLMo-core that was read so far. ``step`` is 0 if the first line has none."""

    rank: str = ""
    step: int = 0
    total: str = ""
    metrics: int = 0
    has_loss: bool = False
    heldout: float | None = None


class _Reader:
    """Read the lines of one log into a curve."""

    def __init__(self, curve: Curve) -> None:
        self.curve = curve
        self._messages: dict[str, _Message] = {}  # label -> the message that its next line may continue
        self._step = 0  # of the latest loss
        self._rank: str | None = None  # of the losses, in lines without a label
        self._labels: list[str] = []  # of the losses, in the order of their first loss
        self._has_other_line = True  # since the latest line of a loss, as when a run starts again
        self._without_loss: list[int] = []  # steps of whole messages without a loss

    def read_line(self, line: str) -> None:
        """Add the loss in a line.

        :raises LNSConfigError: if the line is cut, if the step of a loss is unknown, or if losses are of several ranks.
        """
        label, text = self._split_label(line)
        self.curve.has_ended |= ENDED in text
        if " lm loss:" in text or "lm loss value:" in text or ITERATION.search(text):
            self._read_megatron(label, text)
        elif (match := METRIC.match(text)) and (match[1] in NAMES or not any(name in text for name in NAMES)):
            self._read_metric(self._messages.setdefault(label, _Message()), label, match[1], match[2])
        elif any(f"{name}=" in text for name in NAMES):
            raise _damaged(f"The loss in {line!r} cannot be read. The line may have an unknown label.")
        else:
            self._start_message(label, text)

    def _split_label(self, line: str) -> tuple[str, str]:
        """Return the label of a line and the rest. torchrun repeats its label inside a line that came in two parts."""
        match = LABEL.match(line)
        label = match[0] if match else ""
        text = line[len(label) :]
        return label.strip(), text.replace(label[label.rindex("[") :], "") if label.endswith("]:") else text

    def _start_message(self, label: str, text: str) -> None:
        before = self._messages.get(label)
        if before and before.step and before.metrics and not before.has_loss:
            self._without_loss.append(before.step)
        if match := STEP.search(text):
            if text.count("[step=") > 1:
                raise _damaged(f"Two steps are in one line: {text!r}.")
            rank = RANK.search(text)
            self._messages[label] = _Message(f"rank {rank[1] or rank[2]}" if rank else "", int(match[1]), match[2])
        else:
            self._messages[label] = _Message()
            self._has_other_line = True

    def _read_metric(self, message: _Message, label: str, name: str, value: str) -> None:
        message.metrics += 1
        if name in LOSSES:
            if not message.step or message.has_loss:
                raise _damaged(f"The loss {value} after step {self._step} has no line with its step.")
            message.has_loss = True
            self._check_rank(label, message.rank, message.step)
            if gap := [step for step in self._without_loss if self.curve.last < step < message.step]:
                raise _damaged(f"The metrics of step {gap[0]} have no loss.")
            self._without_loss = [step for step in self._without_loss if step > message.step]
            self.curve.add_step(message.step, message.total)
            self.curve.add_loss(message.step, _parse_loss(value, message.step, PRINTED))
        elif name in HELDOUT:
            message.heldout = _parse_loss(value, message.step or self._step, PRINTED)
        if message.heldout is not None and (message.has_loss or not message.step):
            # OLMo prints it in a message of its own, OLMo-core before or after the loss of the step.
            self.curve.heldout[message.step or self._step] = message.heldout

    def _read_megatron(self, label: str, text: str) -> None:
        if text.count(" lm loss:") + text.count("lm loss value:") > 1 or len(re.findall(r"iteration\s+\d", text)) > 1:
            raise _damaged(f"Two lines were written into one: {text!r}.")
        if match := ITERATION.search(text):
            step = int(match[1])
            if match[3]:
                self._check_rank(label, "", step)
            elif " lm loss:" in text:
                raise _damaged(f"The loss in {text!r} cannot be read.")
            self.curve.add_step(step, match[2])
            if match[3]:
                self.curve.add_loss(step, _parse_loss(match[3], step, MEGATRON_PRINTED))
        elif match := VALIDATION.search(text):
            self.curve.heldout[int(match[1])] = _parse_loss(match[2], int(match[1]), MEGATRON_PRINTED)
        elif "loss at " not in text:
            raise _damaged(f"A line after step {self._step} is cut: {text!r}.")

    def _check_rank(self, label: str, rank: str, step: int) -> None:
        """Check that a loss is of the rank of the loss before. After a restart the rank may have another label."""
        if label not in self._labels:
            self._labels.append(label)
        if self._rank not in (None, rank) or label != self._labels[-1]:
            names = f"{self._rank!r} and {rank!r}" if self._rank != rank else f"{self._labels[-1]!r} and {label!r}"
            raise LNSConfigError(f"The log has the losses of several ranks, {names}. Keep the lines of one rank.")
        self._rank = rank
        if step <= self._step and not self._has_other_line:
            raise LNSConfigError(
                f"Step {step} follows step {self._step} without a restart between them. The log is damaged, or has the "
                "losses of several ranks. Restore the log, or keep the lines of one rank."
            )
        self._step, self._has_other_line = step, False


def _damaged(reason: str) -> LNSConfigError:
    return LNSConfigError(
        f"The log is damaged. {reason} Restore the log, or remove the folder of the run to train it again."
    )


def _parse_loss(text: str, step: int, printed: re.Pattern[str]) -> float:
    if not printed.fullmatch(text):
        raise _damaged(f"The loss {text!r} at step {step} is not a number as the framework prints it.")
    loss = float(text.replace(",", ""))
    if not math.isfinite(loss):
        raise LNSConfigError(
            f"The loss is {loss} at step {step}. The run diverged, and has no final loss. Remove its rate or its arm "
            "from the study."
        )
    return loss


def read_curve(folder: Path) -> Curve | None:
    """Return the losses of all attempts of a run, or None if the folder has no log.

    A log is read up to its last complete line, because a killed process may have written a part of a number.

    :raises LNSConfigError: if a log is damaged, if a loss is not a finite number, if losses are of several ranks, if
        the total number of steps changes, or if steps are missing. The message has the name of the log.
    """
    curve, logs = Curve(), find_logs(folder)
    if not all(path.name.startswith("attempt-") for path in logs):  # logs by hand, before or after the attempts
        logs.sort(key=_first_step)
    for path in logs:
        reader = _Reader(curve)
        try:
            for line in _whole_lines(path):
                reader.read_line(line)
        except LNSConfigError as error:
            raise LNSConfigError(f"{path}: {error}") from None
    _check_gaps(curve, folder)
    return curve if logs else None


def _whole_lines(path: Path) -> list[str]:
    content, _, _ = path.read_bytes().rpartition(b"\n")
    if b"\0" in content:
        raise _damaged("It has NUL bytes, as after a crash of the machine.")
    return ANSI.sub("", content.decode(errors="replace")).splitlines()


def _first_step(path: Path) -> int:
    """Return the first step in a log, or 0 if it has none."""
    text = ANSI.sub("", path.read_text(encoding="utf-8", errors="replace"))
    match = re.search(STEP.pattern, text, re.MULTILINE) or ITERATION.search(text)
    return int(match[1]) if match else 0


def _check_gaps(curve: Curve, folder: Path) -> None:
    """Raise an error if steps are missing, because a mean over the remaining steps would be wrong."""
    interval = curve.interval
    distances = [after - before for before, after in pairwise(curve.logged)]
    neighbors = distances[1:] + distances[-2:-1]  # the next distance, or the one before the last
    for step, distance, neighbor in zip(curve.logged, distances, neighbors, strict=False):
        if distance > 2 * max(interval, neighbor):  # a run may be resumed with another log interval
            raise LNSConfigError(
                f"{folder}: the log has no line between the steps {step} and {step + distance}. Expected one every "
                f"{interval} steps. Restore the missing log, or remove the folder and train the run again."
            )
