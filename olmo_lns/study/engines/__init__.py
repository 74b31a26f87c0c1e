"""Engines: what a study has to know of a training framework, one file each.

Settings are *flat*: ``{"model.d_model": 512, …}`` for OLMo and OLMo-core (dotted keys of their configs),
``{"num_layers": 8, …}`` for Megatron (names of its argument namespace).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Mapping, Protocol

from olmo_lns.errors import LNSConfigError, did_you_mean
from olmo_lns.schemes import Scheme
from olmo_lns.study.curves import Curve
from olmo_lns.study.engines.megatron import MegatronEngine
from olmo_lns.study.engines.olmo import OLMoEngine
from olmo_lns.study.engines.olmo_core import OLMoCoreEngine

if TYPE_CHECKING:
    from olmo_lns.study.arms import Arm
    from olmo_lns.study.shape import Shape
    from olmo_lns.study.spec import Run

__all__ = ["ENGINES", "MEGATRON", "OLMO", "OLMO_CORE", "Config", "Engine", "engine_named"]


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

    def load(self, run: Run) -> Any:
        """The run's config as the framework takes it; a run keeps it, for it costs half a second."""

    def settings(self, run: Run) -> dict[str, Any]:
        """Flat settings of a planned run: its file with its overrides."""

    def shape(self, settings: Mapping[str, Any]) -> Shape:
        """:raises KeyError: a setting that is missing (:meth:`Shape.of` says which in words)."""

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


OLMO: Engine = OLMoEngine()
OLMO_CORE: Engine = OLMoCoreEngine()
MEGATRON: Engine = MegatronEngine()
#: OLMo-core before OLMo: its files and logs have everything by which OLMo's are known, and more.
ENGINES: dict[str, Engine] = {engine.name: engine for engine in (OLMO_CORE, OLMO, MEGATRON)}


def engine_named(name: str) -> Engine:
    """:raises LNSConfigError: an unknown framework, with the nearest known one."""
    if name not in ENGINES:
        known = " or ".join(map(repr, ENGINES))
        raise LNSConfigError(f"framework {name!r}{did_you_mean(name, ENGINES)}: expected {known}")
    return ENGINES[name]
