"""A training framework as a study needs it (:class:`Engine`), and one run.

Settings are *flat*: ``{"model.d_model": 512, …}`` for OLMo and OLMo-core (dotted keys of their configs),
``{"num_layers": 8, …}`` for Megatron (names of its argument namespace).
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Mapping, Protocol

from olmo_lns.errors import LNSConfigError
from olmo_lns.study.arms import Arm
from olmo_lns.study.files import flatten


@dataclass(frozen=True)
class Shape:
    """A Pre-LN decoder with SwiGLU and no biases, its training budget, and its layout over GPUs.

    :param inner: width of the SwiGLU product, half of OLMo's ``mlp_hidden_size``.
    :param vocabulary: rows of the embedding table, padding included.
    :param sequence: tokens in a sequence. :param batch: sequences in an optimizer step.
    :param steps: optimizer steps; 0 for a duration in epochs, which depends on the data.
    :param micro_batch: a GPU's part of the batch is a multiple of this. :param split: GPUs that share one model.
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
    micro_batch: int = 1
    split: int = 1

    @property
    def embedding(self) -> int:
        return self.vocabulary * self.width

    @property
    def parameters(self) -> int:
        """All parameters, the output projection counted unless tied."""
        kv = self.width * self.kv_heads // self.heads
        block = 2 * self.width**2 + 2 * self.width * kv + 3 * self.width * self.inner
        norms = (2 * self.layers + 1) * self.width if self.gain else 0
        return self.embedding * (1 if self.tied else 2) + self.layers * block + norms

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

    def problem(self, gpus: int) -> str | None:
        """Return the reason why GPUs cannot share the batch evenly; None if they can."""
        if gpus % self.split == 0 and self.batch % (gpus // self.split * self.micro_batch) == 0:
            return None
        return (
            f"{gpus} GPUs, {self.split} for each copy of the model, at a micro-batch of {self.micro_batch} do not "
            f"divide the batch of {self.batch}: take another number of GPUs or a smaller micro-batch"
        )


class Engine(Protocol):
    """One framework, whose class implements the methods without a body.

    :param name: ``framework:`` in a description. :param title: name in sentences.
    :param file_key: top-level key that identifies this framework's config files.
    :param arm_keys: keys that define an arm and may differ between two arms of one size.
    :param compared: keys that change the loss by more than rounding; not names, folders and the machine.
    :param base_arm: arm whose config file serves an arm without a file.
    :param save_variable, data_variable: environment variables that the config files read.
    :param plain_keys: field of the shape -> the setting with the same value.
    :param rate_keys: settings that scale with the learning rate, the peak first.
    """

    name: str
    title: str
    file_key: str
    default_seed: int = 6198
    arm_keys: frozenset[str]
    compared: re.Pattern[str]
    base_arm: str = "preln"
    save_variable: str = "OLMO_SAVE_DIR"
    data_variable: str = "OLMO_DATA_DIR"
    plain_keys: Mapping[str, str]
    rate_keys: tuple[str, ...]

    def arm(self, arm: Arm) -> dict[str, Any] | None:
        """Return the settings of an arm; None if the framework does not support it."""

    def defining(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Return the settings that define an arm, missing ones at their default."""
        return {key: settings.get(key) for key in sorted(self.arm_keys, reverse=True)}

    def identity(self, name: str, seed: int) -> dict[str, Any]:
        """Return overrides with a run's name and seed."""

    def rate(self, config: Path, rate: float) -> dict[str, Any]:
        """Return overrides for the peak learning rate, with the lowest rate in proportion."""
        return {self.rate_keys[0]: rate}

    def load(self, path: Path, overrides: Mapping[str, Any]) -> Any:
        """Load a file with overrides as the framework does. Its variables need not be set.

        :raises LNSConfigError: the framework refuses it.
        """

    def settings(self, loaded: Any) -> dict[str, Any]:
        """Return the flat settings of a :meth:`load` result."""
        return flatten(loaded)

    def shape(self, settings: Mapping[str, Any]) -> Shape:
        """Return the shape. :raises LNSConfigError: a missing key, or a value that is not a number."""
        try:
            plain = {name: int(settings[key]) for name, key in self.plain_keys.items()}
            return Shape(**plain | {"learning_rate": float(settings[self.rate_keys[0]])} | self.derived(settings))
        except KeyError as error:
            raise LNSConfigError(f"the config has no {error.args[0]!r}: expected a complete config") from error
        except (TypeError, ValueError) as error:
            raise LNSConfigError(f"a number of the config cannot be read: {error}") from error

    def derived(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields of the shape that need more than one setting."""

    def count(self, path: Path, loaded: Any) -> int:
        """Count the parameters, with the framework's model if it can be built."""
        return self.shape(self.settings(loaded)).parameters

    def problems(self, settings: Mapping[str, Any], gpus: int) -> list[str]:
        """Return the contradictions between the settings of a loaded file."""

    def unchecked(self) -> str:
        """Return the check that this environment does not allow, ``""`` without any."""
        return ""

    def words(self, run: Run, folder: Path) -> list[str]:
        """Return the training script's arguments for a run in ``folder``, new or resumed."""

    def variables(self, run: Run) -> dict[str, str]:
        """Return environment variables of this run besides those of its config file."""
        return {}

    def padding(self, settings: Mapping[str, Any]) -> float:
        """Return the correction factor of a held-out loss that is averaged over positions without a label too."""
        return 1.0

    def used(self, folder: Path) -> dict[str, Any]:
        """Return the flat settings that the run in ``folder`` saved; empty without any."""


def dot_list(settings: Mapping[str, Any]) -> list[str]:
    """Return ``key=value`` words for OLMo and OLMo-core, which read YAML; text that YAML would change is quoted."""
    kept = {key: isinstance(value, str) and not re.search(r"(^|\s)#|:\s", value) for key, value in settings.items()}
    return [f"{k}={v if kept[k] else json.dumps(v, ensure_ascii=False)}" for k, v in settings.items()]


@dataclass(frozen=True)
class Run:
    """One training run of a study; ``name`` is also its folder.

    :param group: size; runs of the same group and seed are compared.
    :param arm: ``""`` for a config without an arm's name.
    :param rate: learning rate from the description's ``rates``, else None.
    """

    group: str
    arm: str
    seed: int
    engine: Engine
    config: Path
    overrides: Mapping[str, Any]
    rate: float | None = None

    @property
    def size(self) -> str:
        """The group, with the learning rate if there is one: ``60Mx0.0006``."""
        return self.group if self.rate is None else f"{self.group}x{self.rate:g}"

    @property
    def name(self) -> str:
        return f"{self.size}-{self.arm}-s{self.seed}"

    @cached_property
    def loaded(self) -> Any:
        """The config as the framework loads it, cached."""
        return self.engine.load(self.config, self.overrides)

    @cached_property
    def settings(self) -> dict[str, Any]:
        """All flat settings."""
        return self.engine.settings(self.loaded)

    @cached_property
    def counted(self) -> int:
        """Number of parameters, of the framework's model if it can be built."""
        return self.engine.count(self.config, self.loaded)

    @property
    def shape(self) -> Shape:
        return self.engine.shape(self.settings)
