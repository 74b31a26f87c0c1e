"""The interface between a study and a training framework (:class:`Engine`), and one run.

Settings are *flat*: ``{"model.d_model": 512, …}`` for OLMo and OLMo-core (dotted keys of their configs),
``{"num_layers": 8, …}`` for Megatron (names of its argument namespace).
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Mapping

from olmo_lns.arms import BASELINE, Arm
from olmo_lns.errors import LNSConfigError
from olmo_lns.study.yaml_files import flatten


@dataclass(frozen=True)
class Workload:
    """A Pre-LN decoder with SwiGLU and no biases, its training budget, and its layout over GPUs.

    :param ffn_hidden_size: width of the SwiGLU product, half of OLMo's ``mlp_hidden_size``.
    :param vocab_size: rows of the embedding table, padding included.
    :param sequence_length: tokens in a sequence.
    :param batch_size: sequences in an optimizer step.
    :param steps: optimizer steps, or 0 for a duration in epochs, which depends on the data.
    :param micro_batch_size: sequences in a forward pass. The batch of a GPU must be a multiple.
    :param model_parallel_size: number of GPUs for one copy of the model.
    """

    layers: int
    hidden_size: int
    heads: int
    kv_heads: int
    ffn_hidden_size: int
    vocab_size: int
    has_tied_embeddings: bool
    has_norm_weight: bool
    sequence_length: int
    batch_size: int
    steps: int
    warmup: int
    learning_rate: float
    micro_batch_size: int = 1
    model_parallel_size: int = 1

    @property
    def embedding_parameters(self) -> int:
        return self.vocab_size * self.hidden_size

    @property
    def parameters(self) -> int:
        """Number of parameters. A tied output projection is counted once."""
        kv_size = self.hidden_size * self.kv_heads // self.heads
        block = self.hidden_size * (2 * self.hidden_size + 2 * kv_size + 3 * self.ffn_hidden_size)
        norms = (2 * self.layers + 1) * self.hidden_size if self.has_norm_weight else 0
        return self.embedding_parameters * (1 if self.has_tied_embeddings else 2) + self.layers * block + norms

    @property
    def tokens_per_step(self) -> int:
        return self.sequence_length * self.batch_size

    @property
    def tokens(self) -> int:
        return self.tokens_per_step * self.steps

    @property
    def flops(self) -> float:
        """Training FLOPs by the convention of most published MFU figures: ``6 N D`` plus attention ``12 L d s D``.

        N includes the head but not the input embedding, which is a lookup. The attention matrix counts as full.
        """
        n = self.parameters if self.has_tied_embeddings else self.parameters - self.embedding_parameters
        return (6 * n + 12 * self.layers * self.hidden_size * self.sequence_length) * float(self.tokens)

    def batch_problem(self, gpus: int) -> str | None:
        """Return the reason why the GPUs cannot share the batch evenly, or None if they can."""
        copies, rest = divmod(gpus, self.model_parallel_size)
        if rest == 0 and self.batch_size % (copies * self.micro_batch_size) == 0:
            return None
        details, remedy = "", "Use another number of GPUs"
        if self.micro_batch_size > 1:
            details, remedy = f" in micro-batches of {self.micro_batch_size}", f"{remedy} or a smaller micro-batch"
        return (
            f"{gpus} GPUs, {self.model_parallel_size} for each copy of the model, cannot share a batch of "
            f"{self.batch_size} sequences evenly{details}. {remedy}."
        )


class Engine(ABC):
    """One training framework. Its class implements the abstract methods.

    :param name: value of ``framework:`` in a description.
    :param title: name in messages.
    :param identifying_key: top-level key by which a config file of the framework is recognized.
    :param arm_keys: settings that define an arm and may differ between two arms of one size.
    :param compared_keys: settings that change the loss by more than rounding. Runs that differ in one are refused.
    :param ignored_keys: settings that do not change the loss: names, folders, the machine. A new version of the
        framework may have settings of neither kind. A difference in such a setting is reported.
    :param base_arm: the arm whose config file is used for every arm without a file.
    :param save_variable, data_variable: environment variables that the config files read.
    :param workload_keys: field of :class:`Workload` -> the setting with the same value.
    :param rate_keys: settings that scale with the learning rate, the peak first.
    """

    name: str
    title: str
    identifying_key: str
    default_seed: int = 6198
    arm_keys: frozenset[str]
    compared_keys: re.Pattern[str]
    ignored_keys: re.Pattern[str]
    base_arm: str = BASELINE
    save_variable: str = "OLMO_SAVE_DIR"
    data_variable: str = "OLMO_DATA_DIR"
    workload_keys: Mapping[str, str]
    rate_keys: tuple[str, ...]

    @abstractmethod
    def arm_overrides(self, arm: Arm) -> dict[str, Any] | None:
        """Return the settings that make a run this arm, or None if the framework does not support the arm."""

    def arm_settings(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Return the settings of a run that define its arm. Missing keys have their defaults."""
        return {key: settings.get(key) for key in sorted(self.arm_keys, reverse=True)}

    @abstractmethod
    def name_and_seed_overrides(self, name: str, seed: int) -> dict[str, Any]:
        """Return the overrides for a run's name and seed."""

    def rate_overrides(self, config: Path, rate: float) -> dict[str, Any]:
        """Return the overrides for a peak learning rate. The lowest rate changes in proportion."""
        return {self.rate_keys[0]: rate}

    @abstractmethod
    def load(self, path: Path, overrides: Mapping[str, Any], variables: Mapping[str, str] | None = None) -> Any:
        """Load a config file with overrides as the framework does. Its environment variables need not be set.

        :param variables: values of environment variables that a launch will set.
        :raises LNSConfigError: if the framework refuses the config.
        """

    def flat_settings(self, loaded: Any) -> dict[str, Any]:
        """Return the flat settings of a config from :meth:`load`."""
        return flatten(loaded)

    def workload(self, settings: Mapping[str, Any]) -> Workload:
        """Return the workload of a run.

        :raises LNSConfigError: if a key is missing, or a value is not a number.
        """
        try:
            fields: dict[str, Any] = {field: int(settings[key]) for field, key in self.workload_keys.items()}
            return Workload(learning_rate=float(settings[self.rate_keys[0]]), **fields | self.derived_fields(settings))
        except KeyError as error:
            raise LNSConfigError(
                f"The config has no key {error.args[0]!r}. Expected a complete training config. Add the key."
            ) from error
        except (TypeError, ValueError) as error:
            raise LNSConfigError(f"A value in the config is not a number: {error}. Correct the value.") from error

    @abstractmethod
    def derived_fields(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields of :class:`Workload` that are not the value of one setting."""

    def count(self, path: Path, loaded: Any) -> int:
        """Return the number of parameters, counted in the framework's model if it can be built."""
        return self.workload(self.flat_settings(loaded)).parameters

    @abstractmethod
    def problems(self, settings: Mapping[str, Any], gpus: int) -> list[str]:
        """Return the contradictions between the settings of a run on this number of GPUs."""

    def missing_data(self, settings: Mapping[str, Any]) -> str:
        """Describe the first data of a run that do not exist. Return ``""`` if all exist or cannot be checked."""
        return ""

    def skipped_check(self) -> str:
        """Name the check that this environment cannot run. Return ``""`` if all checks run."""
        return ""

    @abstractmethod
    def arguments(self, run: Run, folder: Path) -> list[str]:
        """Return the training script's arguments that start or resume a run in ``folder``."""

    def variables(self, run: Run) -> dict[str, str]:
        """Return the environment variables that a run needs in addition to those of its config file."""
        return {}

    def heldout_correction(self, settings: Mapping[str, Any]) -> float:
        """Return the factor that corrects a held-out loss averaged over positions with and without a label."""
        return 1.0

    @abstractmethod
    def saved_settings(self, folder: Path) -> dict[str, Any]:
        """Return the flat settings that the run in a folder has saved. They are empty if it has saved none."""


def dot_list(settings: Mapping[str, Any]) -> list[str]:
    """Return ``key=value`` arguments for OLMo and OLMo-core. Text that YAML would change is quoted."""

    def to_yaml(value: Any) -> str:
        is_plain_text = isinstance(value, str) and not re.search(r"(^|\s)#|:\s", value)
        return value if is_plain_text else json.dumps(value, ensure_ascii=False)

    return [f"{key}={to_yaml(value)}" for key, value in settings.items()]


@dataclass(frozen=True)
class Run:
    """One training run of a study. Its ``name`` is also the name of its folder.

    :param size: name of the size in the description, such as ``60M``. Runs of one size and seed are compared.
    :param arm: name of the arm, or ``""`` for a config file that names none.
    :param rate: learning rate from the ``rates`` of the description, or None for the rate of the config.
    :param variables: environment variables that a launch sets for the config, by name.
    """

    size: str
    arm: str
    seed: int
    engine: Engine
    config: Path
    overrides: Mapping[str, Any]
    rate: float | None = None
    variables: Mapping[str, str] = field(default_factory=dict)

    @property
    def size_and_rate(self) -> str:
        """The size, followed by the learning rate if the description has ``rates``: ``60Mx0.0006``."""
        return self.size if self.rate is None else f"{self.size}x{self.rate:g}"

    @property
    def name(self) -> str:
        return f"{self.size_and_rate}-{self.arm}-s{self.seed}"

    @cached_property
    def loaded(self) -> Any:
        """The config as the framework loads it."""
        return self.engine.load(self.config, self.overrides, self.variables)

    @cached_property
    def settings(self) -> dict[str, Any]:
        """All settings of the run, flat."""
        return self.engine.flat_settings(self.loaded)

    @cached_property
    def parameter_count(self) -> int:
        """Number of parameters, counted in the framework's model if it can be built."""
        return self.engine.count(self.config, self.loaded)

    def require_model(self) -> None:
        """Check that the framework loads the config and builds its model, if the framework is installed.

        :raises LNSConfigError: if it does not.
        """
        _ = self.parameter_count  # the count is taken from the built model, and kept

    @property
    def workload(self) -> Workload:
        return self.engine.workload(self.settings)
