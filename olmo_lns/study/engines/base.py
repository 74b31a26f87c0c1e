"""What a study has to know of a training framework, and one run of it.

Settings are *flat*: ``{"model.d_model": 512, …}`` for OLMo and OLMo-core (dotted keys of their configs),
``{"num_layers": 8, …}`` for Megatron (names of its argument namespace).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Mapping, Protocol

from olmo_lns.errors import LNSConfigError
from olmo_lns.schemes import Scheme
from olmo_lns.study.arms import Arm
from olmo_lns.study.engines.curves import Curve
from olmo_lns.study.engines.shape import Shape

__all__ = ["Config", "Engine", "Run", "shape_of"]


@dataclass
class Config:
    """One config file as its framework takes it.

    :param settings: flat. :param parameters: by the framework's own count where it can be asked.
    :param strategy: how weights and optimizer state are split; ``""`` or an unknown one has no memory estimate.
    :param micro_batch: sequences a GPU takes at once.
    :param split: GPUs that share one model, by the setting ``split_by``.
    :param recompute: activations are computed again in the backward pass.
    """

    settings: dict[str, Any]
    shape: Shape
    parameters: int
    strategy: str
    micro_batch: int
    split: int = 1
    split_by: str = ""
    recompute: bool = False
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


class Engine(Protocol):
    """:param name: as ``framework:`` of a description. :param title: in sentences.

    :param file_key: a key that only this framework's config files have at the top.
    :param default_seed: the framework's own. :param loss: its name for the training loss.
    :param arm_keys: what defines an arm, and so may differ between two arms of one size.
    :param bookkeeping: prefixes of keys without effect on the loss but rounding: names, folders, the machine.
    :param start: the key that names the checkpoint a run starts from, and the keys of the run's own folders.
    :param save_variable, data_variable: environment names that the config files read.
    :param rate_keys: the settings that follow the learning rate.
    :param data_key: the setting that lists the data files, compared by their content; ``""`` where the paths are
        settings like any other.
    """

    name: str
    title: str
    file_key: str
    default_seed: int
    loss: str
    arm_keys: frozenset[str]
    bookkeeping: tuple[str, ...]
    start: tuple[str, tuple[str, ...]]
    save_variable: str
    data_variable: str
    rate_keys: tuple[str, ...]
    data_key: str

    def arm(self, arm: Arm) -> dict[str, Any] | None:
        """The settings that make a run this arm; None where there is no such arm."""

    def defining(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """The settings that define an arm, those that are left out at their default."""

    def scheme(self, settings: Mapping[str, Any]) -> Scheme:
        """The scheme that flat settings select."""

    def scaled(self, settings: Mapping[str, Any]) -> str | None:
        """How the settings ask for a scaled initialization, and what to write instead; None when they do not."""

    def identity(self, name: str, seed: int) -> dict[str, Any]:
        """Overrides that name a run and set its seed."""

    def rate(self, config: Path, rate: float) -> dict[str, Any]:
        """Overrides that set the peak learning rate; the lowest keeps its share of it."""

    def load(self, run: Run) -> Any:
        """The run's config as the framework takes it; a run keeps it, for it costs half a second."""

    def settings(self, run: Run) -> dict[str, Any]:
        """Flat settings of a planned run: its file with its overrides."""

    def shape(self, settings: Mapping[str, Any]) -> Shape:
        """:raises KeyError: a setting that is missing (:func:`shape_of` says which in words)."""

    def count(self, run: Run) -> tuple[int, float | None]:
        """``(parameters, training FLOPs a token by the framework's own counter)``."""

    def trunk(self, steps: int, every: int) -> dict[str, Any]:
        """Overrides of a run at a constant rate, with a checkpoint kept at every multiple of ``every`` steps.

        :raises LNSConfigError: a run of this framework cannot be branched.
        """

    def branch(self, start: int, stop: int) -> dict[str, Any]:
        """Overrides of a run that goes on from a trunk at ``start`` with a falling rate, to ``stop`` steps in all."""

    def checkpoint(self, step: int) -> str:
        """The name of the folder in which a run keeps its state after ``step``."""

    def words(self, run: Run, folder: Path) -> list[str]:
        """Config and flags of a run in ``folder``, started or resumed, for the training script."""

    def variables(self, run: Run) -> dict[str, str]:
        """What the framework wants in the environment of this run, beyond what its config file reads."""

    def data_files(self, settings: Mapping[str, Any]) -> list[str]:
        """Files that the run reads, held-out ones too; empty where only the framework can tell."""

    def heldout(self, settings: Mapping[str, Any]) -> Any:
        """What is measured on held-out data, without its files."""

    def padding(self, settings: Mapping[str, Any]) -> float:
        """What a held-out loss is multiplied by, for positions without a label that the framework averages over."""

    def used(self, folder: Path) -> dict[str, Any]:
        """Flat settings that a run in ``folder`` left as those it really used; empty when it left none."""

    def curve(self, path: Path, text: str) -> Curve | None:
        """The losses in a console log; None when ``text`` is not this framework's."""

    def config(self, path: Path, gpus: int) -> Config:
        """Read and check one config file.

        :raises LNSConfigError: the framework refuses it.
        """


def shape_of(settings: Mapping[str, Any], engine: Engine) -> Shape:
    """The numbers of an engine's flat settings.

    :raises LNSConfigError: a key that is missing, or a duration not given in steps or tokens.
    """
    try:
        return engine.shape(settings)
    except KeyError as error:
        raise LNSConfigError(f"the config has no {error.args[0]!r}: it must be complete") from error


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
        return self.engine.load(self)

    @cached_property
    def settings(self) -> dict[str, Any]:
        """Flat settings, all of them."""
        return self.engine.settings(self)

    @property
    def shape(self) -> Shape:
        return shape_of(self.settings, self.engine)

    @property
    def first_step(self) -> int:
        """Steps made by the run that it goes on from; 0 for a run that starts anew."""
        return self.start[1] if self.start else 0

    @property
    def start_checkpoint(self) -> str | None:
        """``<run>/<checkpoint>`` in the study's folder; None for a run that starts anew."""
        return f"{self.start[0].name}/{self.engine.checkpoint(self.start[1])}" if self.start else None
