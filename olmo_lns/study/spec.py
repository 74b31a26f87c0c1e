"""A study description: sizes × arms × seeds over the files of the config pack, as a list of runs."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Mapping

import yaml

from olmo_lns.errors import LNSConfigError
from olmo_lns.study.arms import arm_named
from olmo_lns.study.shape import Shape

__all__ = ["Launch", "Run", "Study"]

KEYS = {"name", "framework", "config", "data", "sizes", "arms", "seeds", "more_seeds", "final_fraction", "launch"}
DEFAULT_SEED = {"olmo": 6198, "megatron": 1234}


@dataclass(frozen=True)
class Launch:
    """How a run is started. :param command: ``train`` (``olmo-lns train``) or the path of a training script.

    :param nproc: processes on a node. :param workers: runs at a time. :param threads: OMP_NUM_THREADS of each run.
    :param nodes: of a run, or by size. :param args: added to every command. :param sbatch: further ``#SBATCH`` lines.
    """

    command: str = "train"
    nproc: int = 1
    nodes: int | Mapping[str, int] = 1
    workers: int = 1
    threads: int | None = None
    args: tuple[str, ...] = ()
    sbatch: Mapping[str, Any] = field(default_factory=dict)

    def nodes_of(self, size: str) -> int:
        return self.nodes if isinstance(self.nodes, int) else int(self.nodes.get(size, 1))


@dataclass(frozen=True)
class Run:
    """One training run of a study; ``name`` is its folder's."""

    size: str
    arm: str
    seed: int
    framework: str
    config: Path
    overrides: Mapping[str, Any]

    @property
    def name(self) -> str:
        return f"{self.size}-{self.arm}-s{self.seed}"

    @cached_property
    def settings(self) -> dict[str, Any]:
        """Flat settings: OLMo's whole ``TrainConfig``, or the keys of the Megatron file."""
        if self.framework == "olmo":
            from olmo_lns.study import olmo_config

            return olmo_config.flatten(olmo_config.load(self.config, self.overrides))
        from olmo_lns.study import megatron_args

        return {**megatron_args.read(self.config), **{k.replace("-", "_"): v for k, v in self.overrides.items()}}

    @property
    def shape(self) -> Shape:
        return Shape.of(self.settings, self.framework)


@dataclass(frozen=True)
class Study:
    """:param final_fraction: a run's loss is the mean over this last part of its steps."""

    name: str
    framework: str
    path: Path
    runs: tuple[Run, ...]
    final_fraction: float
    data: str | None
    launch: Launch

    @property
    def sizes(self) -> list[str]:
        return list(dict.fromkeys(run.size for run in self.runs))

    @property
    def arms(self) -> list[str]:
        return list(dict.fromkeys(run.arm for run in self.runs))

    @classmethod
    def load(cls, path: str | Path) -> Study:
        """Read a description.

        :raises LNSConfigError: a missing file, unknown key, arm or framework, or a fraction outside (0, 1].
        """
        path = Path(path)
        if not path.is_file():
            raise LNSConfigError(f"{path}: no such study description (see configs/study/)")
        raw = yaml.safe_load(path.read_text())
        if not isinstance(raw, dict) or not {"name", "config", "sizes", "arms"} <= set(raw):
            raise LNSConfigError(f"{path}: a study description needs name, config, sizes and arms")
        if unknown := sorted(set(raw) - KEYS):
            raise LNSConfigError(f"{path}: unknown keys {', '.join(unknown)}; known: {', '.join(sorted(KEYS))}")
        framework = raw.get("framework", "olmo")
        if framework not in DEFAULT_SEED:
            raise LNSConfigError(f"{path}: framework {framework!r}: expected 'olmo' or 'megatron'")
        fraction = float(raw.get("final_fraction", 0.01))
        if not 0 < fraction <= 1:
            raise LNSConfigError(f"{path}: final_fraction {fraction}: expected a number in (0, 1]")
        try:
            options: dict[str, Any] = dict(raw.get("launch", {}))
            launch = Launch(**options | {"args": tuple(options.get("args", ()))})
        except TypeError as error:
            raise LNSConfigError(f"{path}: launch: {str(error).split('()')[-1].strip()}") from error
        return cls(raw["name"], framework, path, _runs(raw, path, framework), fraction, raw.get("data"), launch)


def _runs(raw: Mapping[str, Any], path: Path, framework: str) -> tuple[Run, ...]:
    """Size by size, smallest first as listed, the arms of a seed together: a study cut short still compares arms."""
    sizes, arms = _table(raw["sizes"]), _table(raw["arms"])
    seeds = [int(seed) for seed in raw.get("seeds", [DEFAULT_SEED[framework]])]
    more = raw.get("more_seeds", {})
    if unknown := sorted(set(more) - set(sizes)):
        raise LNSConfigError(f"{path}: more_seeds names {', '.join(unknown)}, which is not among the sizes")
    for name in sizes:
        if not re.fullmatch(r"[A-Za-z0-9._]+", name):
            raise LNSConfigError(f"{path}: size {name!r}: letters, digits, '.' and '_' only (it names folders)")
    runs = []
    for size, seed in [(name, int(seed)) for name in sizes for seed in (*seeds, *more.get(name, []))]:
        for arm in arms:
            runs.append(_run(raw, path, framework, size, arm, seed, {**sizes[size], **arms[arm]}))
    if len({run.name for run in runs}) != len(runs):
        raise LNSConfigError(f"{path}: a seed is listed twice for one size")
    return tuple(runs)


def _run(raw: Mapping[str, Any], path: Path, framework: str, size: str, arm: str, seed: int, extra: dict) -> Run:
    defined = arm_named(arm)
    config = path.parent / str(raw["config"]).format(size=size, arm=arm)
    per_arm_file = "{arm}" in str(raw["config"])
    arm_keys: Mapping[str, Any] = (defined.olmo if framework == "olmo" else defined.megatron) or {}
    if framework == "megatron" and defined.megatron is None:
        raise LNSConfigError(f"{path}: arm {arm!r} exists for OLMo only")
    overrides: dict[str, Any] = {**extra} if per_arm_file else {**extra, **arm_keys}
    name = f"{size}-{arm}-s{seed}"
    overrides |= {"run_name": name, "seed": seed} if framework == "olmo" else {"seed": seed}
    return Run(size, arm, seed, framework, config, overrides)


def _table(value: Any) -> dict[str, dict[str, Any]]:
    """``[a, b]`` or ``{a: {overrides}, b: }`` → ``{a: {...}, b: {}}``."""
    if isinstance(value, Mapping):
        return {str(name): dict(overrides or {}) for name, overrides in value.items()}
    return {str(name): {} for name in value}
