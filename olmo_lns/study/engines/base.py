"""What a study must know of a training framework (:class:`Engine`), and one run of it.

:class:`Shape` and :class:`Machine` estimate a run's cost in closed form. ``tests/study`` compares the parameters with
OLMo's and Megatron's own models, and the FLOPs with OLMo's own counter.

Settings are *flat*: ``{"model.d_model": 512, …}`` for OLMo and OLMo-core (dotted keys of their configs),
``{"num_layers": 8, …}`` for Megatron (names of its argument namespace).
"""

from __future__ import annotations

import re
import statistics
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Mapping

from olmo_lns.errors import LNSConfigError
from olmo_lns.schemes import Scheme
from olmo_lns.study.arms import Arm
from olmo_lns.study.files import flatten

ADAM_BYTES = 16  # per parameter, mixed precision: fp32 weight, fp32 gradient, two fp32 moments
CHECKPOINT_BYTES = 12  # per parameter: fp32 weight and two moments
BF16 = 2


@dataclass(frozen=True)
class Gpu:
    """A GPU model. :param peak: dense bf16 FLOP/s of the SXM part (vendor data sheet). :param memory: bytes."""

    peak: float
    memory: float


GPUS = {"A100": Gpu(312e12, 80e9), "H100": Gpu(989.5e12, 80e9), "H200": Gpu(989.5e12, 141e9)}


@dataclass(frozen=True)
class Shape:
    """A Pre-LN decoder with SwiGLU and no biases, and its training budget.

    :param inner: width of the SwiGLU product (OLMo's ``mlp_hidden_size`` is twice that).
    :param vocabulary: rows of the embedding table, padding included.
    :param sequence: tokens in a sequence. :param batch: sequences in an optimizer step.
    """

    layers: int
    width: int
    heads: int
    kv_heads: int
    inner: int
    vocabulary: int
    tied: bool
    gain: bool
    sequence: int
    batch: int
    steps: int
    warmup: int
    learning_rate: float
    min_learning_rate: float

    @property
    def embedding(self) -> int:
        return self.vocabulary * self.width

    @property
    def block(self) -> int:
        """Parameters of a block, without its norms."""
        kv = self.width * self.kv_heads // self.heads
        return 2 * self.width**2 + 2 * self.width * kv + 3 * self.width * self.inner

    @property
    def parameters(self) -> int:
        """All parameters, the output projection counted unless tied."""
        norms = (2 * self.layers + 1) * self.width if self.gain else 0
        return self.embedding * (1 if self.tied else 2) + self.layers * self.block + norms

    @property
    def tokens_per_step(self) -> int:
        return self.sequence * self.batch

    @property
    def tokens(self) -> int:
        return self.tokens_per_step * self.steps

    @property
    def flops(self) -> float:
        """``6 N D`` plus attention ``12 L d s D``, N without the input embedding (a lookup) but with the head,
        the full (non-causal) attention matrix: the convention of most published MFU figures.
        """
        n = self.parameters if self.tied else self.parameters - self.embedding
        return (6 * n + 12 * self.layers * self.width * self.sequence) * float(self.tokens)

    @property
    def checkpoint_bytes(self) -> float:
        """One checkpoint with optimizer state."""
        return float(CHECKPOINT_BYTES * self.parameters)


@dataclass(frozen=True)
class Machine:
    """How a run is laid over its GPUs.

    :param strategy: how weights and optimizer state are split: ``ddp``, ``fsdp``, or ``distributed_optimizer``
        (Megatron's: bf16 weights and fp32 gradients on every GPU, the fp32 weights and moments divided).
    :param micro_batch: sequences a GPU takes at once.
    :param split: GPUs that share one model, by the setting ``split_by``.
    :param recompute: activations are computed again in the backward pass.
    """

    strategy: str
    micro_batch: int
    split: int = 1
    split_by: str = ""
    recompute: bool = False

    def memory(self, shape: Shape, gpus: int) -> float | None:
        """Estimated bytes on each of ``gpus``; None for a strategy without an estimate.

        States are 16 bytes a parameter, divided by the GPUs under fsdp, to which one gathered block and the
        embedding are added. Activations are the bf16 tensors autograd keeps in a block (with a fused attention
        kernel): 34 s b d with a 4 d MLP, in SwiGLU's terms 10 d + 4 inner per token times two bytes, plus norms in
        fp32; ``recompute`` keeps a block's input only. An estimate: allow 20 % for fragmentation and buffers.
        """
        copies, tokens = max(1, gpus // self.split), self.micro_batch * shape.sequence
        states = {
            "ddp": ADAM_BYTES * shape.parameters,
            "fsdp": ADAM_BYTES * shape.parameters / copies + BF16 * (2 * shape.block + shape.embedding),
            "distributed_optimizer": shape.parameters * (BF16 + 4 + CHECKPOINT_BYTES / copies),
        }.get(self.strategy)
        if states is None:
            return None
        kept = shape.width if self.recompute else 10 * shape.width + 4 * shape.inner + 4 * shape.width
        activations = BF16 * tokens * kept * shape.layers
        logits = tokens * shape.vocabulary * (BF16 + 4 + 4)  # bf16 logits, fp32 copy, fp32 gradient
        return (states + activations + logits) / self.split

    def problem(self, shape: Shape, gpus: int, *, even: bool) -> str | None:
        """Why the batch cannot be laid over the GPUs; None when it can.

        :param even: each GPU takes whole micro-batches.
        """
        if gpus % self.split:
            return f"{self.split_by} is more than {gpus} GPUs, or does not divide them"
        if even and shape.batch % self.micro_batch:
            return f"the batch of {shape.batch} is not a multiple of the micro-batch of {self.micro_batch}"
        copies, each = gpus // self.split, self.micro_batch if even else 1
        if shape.batch % (copies * each):
            by = f" with {self.split_by}" if self.split > 1 else ""
            times = f" × micro-batch {each}" if even else ""
            return f"{gpus} GPUs{by}{times} do not divide the batch of {shape.batch}: take another number of GPUs" + (
                " or a smaller micro-batch" if even else ""
            )
        return None


ANSI = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(frozen=True)
class Curve:
    """Loss (nats per token) by optimizer step. :param total: the steps the run was to make, None where unknown.

    :param heldout: loss on held-out data, at the steps after which it was measured.
    """

    losses: dict[int, float]
    total: int | None
    source: str
    heldout: dict[int, float] = field(default_factory=dict)

    @property
    def last(self) -> int:
        return max(self.losses, default=0)

    def final(self, fraction: float, steps: int) -> tuple[float, float, int]:
        """``(mean, standard deviation, number of points)`` of the losses in the last ``fraction`` of ``steps``."""
        tail = [loss for step, loss in self.losses.items() if step > steps - max(1, round(fraction * steps))]
        if not tail:
            raise LNSConfigError(f"{self.source}: no loss in the last {fraction:.0%} of {steps} steps: log more often")
        return statistics.fmean(tail), statistics.stdev(tail) if len(tail) > 1 else 0.0, len(tail)

    def add(self, step: int, text: str) -> None:
        """The loss that a log has for a step.

        :raises LNSConfigError: ``text`` is no number, or the log has a later step before this one.
        """
        if step <= self.last:
            raise LNSConfigError(f"{self.source}: damaged: step {step} comes after step {self.last}")
        self.losses[step] = number(self.source, step, text)


def number(path: Path | str, step: int, text: str) -> float:
    """:raises LNSConfigError: ``text`` is no number; the file and the step are named."""
    try:
        return float(text.replace(",", ""))
    except ValueError:
        raise LNSConfigError(f"{path}: damaged: loss {text!r} at step {step} is not a number") from None


def text_of(path: Path) -> str:
    """A log without its colours, up to its last whole line: a kill may cut one inside a number.

    :raises LNSConfigError: damaged.
    """
    raw = path.read_bytes()
    if b"\0" in raw:
        raise LNSConfigError(f"{path}: damaged: NUL bytes at offset {raw.index(0)}; restore it or rerun the run")
    try:
        return ANSI.sub("", raw[: raw.rfind(b"\n") + 1].decode())
    except UnicodeDecodeError as error:
        raise LNSConfigError(f"{path}: damaged: not text at byte {error.start}; restore it or rerun the run") from error


class Engine:
    """What a study must know of one framework. Methods without a body are each framework's own.

    :param name: as ``framework:`` of a description. :param title: in sentences.
    :param file_key: a key that only this framework's config files have at the top.
    :param loss: its name for the training loss.
    :param arm_keys: keys that define an arm; they may differ between two arms of one size.
    :param bookkeeping: prefixes of keys that change the loss by rounding at most: names, folders, the machine.
    :param start: the key that names the checkpoint a run starts from, and the keys of the run's own folders.
    :param save_variable, data_variable: environment variables that the config files read.
    :param data_format: the command that converts pretokenised data for it; "" where it reads OLMo's memmaps.
    :param rate_keys: the settings that follow the learning rate.
    :param data_key: the setting that lists the data files, compared by their content; ``""`` where the paths are
        settings like any other.
    :param even: GPUs × micro-batch must divide the batch; False where the GPUs alone must.
    """

    name: str
    title: str
    file_key: str
    default_seed = 6198
    loss: str
    arm_keys: frozenset[str]
    bookkeeping: tuple[str, ...]
    start: tuple[str, tuple[str, ...]]
    save_variable = "OLMO_SAVE_DIR"
    data_variable = "OLMO_DATA_DIR"
    data_format = ""
    rate_keys: tuple[str, ...]
    data_key = ""
    even = True

    def arm(self, arm: Arm) -> dict[str, Any] | None:
        """The settings that make a run this arm; None where there is no such arm."""
        raise NotImplementedError

    def defining(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """The settings that define an arm; a missing one has its default."""
        return {key: settings.get(key) for key in sorted(self.arm_keys, reverse=True)}

    def scheme(self, settings: Mapping[str, Any]) -> Scheme:
        """The scheme that flat settings select."""
        raise NotImplementedError

    def scaled(self, settings: Mapping[str, Any]) -> str | None:
        """How the settings ask for a scaled initialization, and what to write instead; None when they do not."""
        raise NotImplementedError

    def identity(self, name: str, seed: int) -> dict[str, Any]:
        """Overrides that name a run and set its seed."""
        raise NotImplementedError

    def rate(self, config: Path, rate: float) -> dict[str, Any]:
        """Overrides that set the peak learning rate; the lowest keeps its share of it."""
        return {self.rate_keys[0]: rate}

    def load(self, path: Path, overrides: Mapping[str, Any]) -> Any:
        """A file with overrides, as the framework loads it. The variables in it need not be set.

        :raises LNSConfigError: the framework refuses it.
        """
        raise NotImplementedError

    def settings(self, loaded: Any) -> dict[str, Any]:
        """Flat settings of what :meth:`load` gave."""
        return flatten(loaded)

    def shape(self, settings: Mapping[str, Any]) -> Shape:
        """:raises LNSConfigError: a key that is missing, or a duration not given in steps or tokens."""
        try:
            return self._shape(settings)
        except KeyError as error:
            raise LNSConfigError(f"the config has no {error.args[0]!r}: it must be complete") from error

    def _shape(self, settings: Mapping[str, Any]) -> Shape:
        raise NotImplementedError

    def machine(self, settings: Mapping[str, Any]) -> Machine:
        """How a run is laid over its GPUs."""
        raise NotImplementedError

    def count(self, path: Path, loaded: Any) -> tuple[int, float | None]:
        """``(parameters, training FLOPs a token)`` by the framework's own counters where it can be asked."""
        return self.shape(self.settings(loaded)).parameters, None

    def problems(self, settings: Mapping[str, Any], gpus: int) -> tuple[list[str], list[str]]:
        """``(problems, notes)`` of a file that the framework loads; a note says what could not be checked."""
        raise NotImplementedError

    def trunk(self, steps: int, every: int) -> dict[str, Any]:
        """Overrides of a run at a constant rate, with a checkpoint kept at every multiple of ``every`` steps.

        :raises LNSConfigError: a run of this framework cannot be branched.
        """
        raise LNSConfigError(f"horizons: runs of {self.title} cannot be branched here; expected framework: olmo")

    def branch(self, start: int, stop: int) -> dict[str, Any]:
        """Overrides of a run that goes on from a trunk at ``start`` with a falling rate, to ``stop`` steps in all."""
        return self.trunk(start, stop)

    def checkpoint(self, step: int) -> str:
        """The name of the folder in which a run keeps its state after ``step``."""
        return f"step{step}"

    def words(self, run: Run, folder: Path) -> list[str]:
        """Config and flags of a run in ``folder``, started or resumed, for the training script."""
        raise NotImplementedError

    def variables(self, run: Run) -> dict[str, str]:
        """Environment variables of this run, beyond those that its config file reads."""
        return {}

    def data_files(self, settings: Mapping[str, Any]) -> list[str]:
        """Files that the run reads, held-out ones too; empty where only the framework knows them."""
        return []

    def heldout(self, settings: Mapping[str, Any]) -> Any:
        """What is measured on held-out data, without its files."""
        raise NotImplementedError

    def padding(self, settings: Mapping[str, Any]) -> float:
        """The factor of a held-out loss where the framework averages over positions without a label too."""
        return 1.0

    def used(self, folder: Path) -> dict[str, Any]:
        """Flat settings that the run in ``folder`` really used, as it saved them; empty when it saved none."""
        raise NotImplementedError

    def curve(self, path: Path, text: str) -> Curve | None:
        """The losses in a console log; None when ``text`` is not this framework's."""
        raise NotImplementedError


@dataclass(frozen=True)
class Run:
    """One training run of a study; ``name`` is its folder's.

    :param start: the run of the same arm and seed that this one goes on from, and the step at which it leaves it.
    :param rate: the learning rate where the description's ``rates`` give it; then ``size`` ends in it: ``60Mx0.0006``.
    """

    size: str
    arm: str
    seed: int
    engine: Engine
    config: Path
    overrides: Mapping[str, Any]
    start: tuple[Run, int] | None = None
    rate: float | None = None

    @property
    def group(self) -> str:
        """The size without the learning rate: runs of one group and seed are compared."""
        return self.size if self.rate is None else self.size.replace(f"x{self.rate:g}", "", 1)

    @property
    def name(self) -> str:
        return f"{self.size}-{self.arm}-s{self.seed}"

    @cached_property
    def loaded(self) -> Any:
        """The config as its framework takes it, loaded once."""
        return self.engine.load(self.config, self.overrides)

    @cached_property
    def settings(self) -> dict[str, Any]:
        """Flat settings, all of them."""
        return self.engine.settings(self.loaded)

    @property
    def shape(self) -> Shape:
        return self.engine.shape(self.settings)

    @property
    def first_step(self) -> int:
        """Steps made by the run that it goes on from; 0 for a run that starts anew."""
        return self.start[1] if self.start else 0

    @property
    def own_share(self) -> float:
        """The part of its steps that it makes itself."""
        return 1 - self.first_step / self.shape.steps

    @property
    def start_checkpoint(self) -> str | None:
        """``<run>/<checkpoint>`` in the study's folder; None for a run that starts anew."""
        return f"{self.start[0].name}/{self.engine.checkpoint(self.start[1])}" if self.start else None
