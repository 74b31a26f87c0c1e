"""A study description: sizes × arms × seeds over the files of the config pack, as a list of runs."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, Mapping

import yaml

from olmo_lns.errors import LNSConfigError, did_you_mean, one_line
from olmo_lns.study import description
from olmo_lns.study.arms import arm_named, settings_of
from olmo_lns.study.engines import OLMO, Engine, engine_named
from olmo_lns.study.horizons import Horizons
from olmo_lns.study.published import PUBLISHED
from olmo_lns.study.shape import Shape

__all__ = ["Launch", "Run", "Study"]


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
    """One training run of a study; ``name`` is its folder's.

    :param start: the run of the same arm and seed that this one goes on from, and the step at which it leaves it.
    """

    size: str
    arm: str
    seed: int
    engine: Engine
    config: Path
    overrides: Mapping[str, Any]
    start: tuple[Run, int] | None = None

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
        return Shape.of(self.settings, self.engine)

    @property
    def first_step(self) -> int:
        """Steps made by the run that it goes on from; 0 for a run that starts anew."""
        return self.start[1] if self.start else 0

    @property
    def start_checkpoint(self) -> str | None:
        """``<run>/<checkpoint>`` in the study's folder; None for a run that starts anew."""
        return f"{self.start[0].name}/{self.engine.checkpoint(self.start[1])}" if self.start else None


@dataclass(frozen=True)
class Study:
    """:param final_fraction: a run's loss is the mean over this last part of its steps.

    :param finished: a committed table of finished runs (:mod:`olmo_lns.study.finished`).
    :param published: the name of the papers' table that it is to be set beside (:mod:`olmo_lns.study.published`).
    """

    name: str
    engine: Engine
    path: Path
    runs: tuple[Run, ...]
    final_fraction: float
    data: str | None
    launch: Launch
    finished: Path | None = None
    published: str | None = None

    @property
    def sizes(self) -> list[str]:
        return list(dict.fromkeys(run.size for run in self.runs))

    @property
    def arms(self) -> list[str]:
        return list(dict.fromkeys(run.arm for run in self.runs))

    @classmethod
    def load(cls, path: str | Path) -> Study:
        """Read a description.

        :raises LNSConfigError: no such file, no YAML, an unknown key, arm, size or framework, or an unfit value.
        """
        path = Path(path)
        if not path.is_file():
            raise LNSConfigError(f"{path}: no such study description (see configs/study/)")
        try:
            raw = yaml.safe_load(path.read_text(encoding="utf-8"))
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise LNSConfigError(f"{path}: not YAML: {one_line(error)}") from error
        if not isinstance(raw, dict) or not {"name", "config", "sizes", "arms"} <= set(raw):
            raise LNSConfigError(f"{path}: a study description needs name, config, sizes and arms")
        description.check(raw, path)
        try:
            engine = engine_named(raw.get("framework", OLMO.name))
        except LNSConfigError as error:
            raise LNSConfigError(f"{path}: {error}") from None
        fraction = float(raw.get("final_fraction", 0.01))
        if not 0 < fraction <= 1:
            raise LNSConfigError(f"{path}: final_fraction {fraction}: expected a number in (0, 1]")
        options = dict(raw.get("launch", {}))
        launch = Launch(**options | {"args": tuple(map(str, options.get("args", ())))})
        table = path.parent / raw["finished"] if raw.get("finished") else None
        published = raw.get("published")
        if published is not None and published not in PUBLISHED:
            known = ", ".join(PUBLISHED)
            raise LNSConfigError(
                f"{path}: published {published!r}{did_you_mean(published, PUBLISHED)}: expected one of {known}"
            )
        runs = _runs(raw, path, engine)
        if isinstance(launch.nodes, Mapping) and (unknown := {*launch.nodes} - {run.size for run in runs}):
            raise LNSConfigError(
                f"{path}: launch: nodes names {', '.join(sorted(map(str, unknown)))}, which is not among the sizes: "
                f"{', '.join(dict.fromkeys(run.size for run in runs))}"
            )
        return cls(raw["name"], engine, path, runs, fraction, raw.get("data"), launch, table, published)


def _runs(raw: Mapping[str, Any], path: Path, engine: Engine) -> tuple[Run, ...]:
    """Size by size, smallest first as listed, the arms of a seed together: a study cut short still compares arms."""
    sizes, arms = _table(raw["sizes"]), _table(raw["arms"])
    seeds = raw.get("seeds", [engine.default_seed])
    more, only = ({str(size): value for size, value in raw.get(key, {}).items()} for key in ("more_seeds", "only"))
    for key, named in (("more_seeds", more), ("only", only)):
        if unknown := sorted(set(named) - set(sizes)):
            raise LNSConfigError(f"{path}: {key} names {', '.join(unknown)}, which is not among the sizes")
    if unknown := sorted({arm for wanted in only.values() for arm in wanted} - set(arms)):
        raise LNSConfigError(f"{path}: only names {', '.join(unknown)}, which is not among the arms")
    for name in sizes:
        if not re.fullmatch(r"[A-Za-z0-9._]+", name):
            raise LNSConfigError(f"{path}: size {name!r}: letters, digits, '.' and '_' only (it names folders)")
    horizons = Horizons.of(raw, path)
    runs: list[Run] = []
    for size in sizes:
        here = more.get(size, [])
        by_arm = here if isinstance(here, Mapping) else dict.fromkeys(arms, here)
        if unknown := sorted(set(by_arm) - set(arms)):
            raise LNSConfigError(f"{path}: more_seeds names {', '.join(unknown)}, which is not among the arms")
        wanted = {arm: [*seeds, *by_arm.get(arm, [])] for arm in only.get(size, arms)}
        if any(len(set(found)) != len(found) for found in wanted.values()):
            raise LNSConfigError(f"{path}: a seed is listed twice for one size")
        for seed in dict.fromkeys(chain.from_iterable(wanted.values())):
            for arm in (arm for arm in wanted if seed in wanted[arm]):
                extra = {**sizes[size], **arms[arm]}
                if horizons is None:
                    runs.append(_run(raw, path, engine, size, arm, seed, extra))
                else:
                    runs += _branched(raw, path, engine, size, arm, seed, extra, horizons)
    return tuple(runs)


def _run(raw: Mapping[str, Any], path: Path, engine: Engine, size: str, arm: str, seed: int, extra: dict) -> Run:
    try:
        arm_keys = settings_of(arm_named(arm), engine)
    except LNSConfigError as error:
        raise LNSConfigError(f"{path}: {error}") from None
    config = path.parent / str(raw["config"]).format(size=size, arm=arm)
    per_arm_file = "{arm}" in str(raw["config"])
    overrides: dict[str, Any] = {**extra} if per_arm_file else {**extra, **arm_keys}
    name = f"{size}-{arm}-s{seed}"
    overrides |= engine.identity(name, seed)
    return Run(size, arm, seed, engine, config, overrides)


def _branched(
    raw: Mapping[str, Any], path: Path, engine: Engine, size: str, arm: str, seed: int, extra: dict, horizons: Horizons
) -> list[Run]:
    """The trunk ``<size>_trunk`` and its branches ``<size>to<steps>``."""
    length = engine.trunk(horizons.starts[-1], horizons.every)
    trunk = _run(raw, path, engine, f"{size}_trunk", arm, seed, {**extra, **length})
    branches = [
        _run(raw, path, engine, f"{size}to{stop}", arm, seed, {**extra, **engine.branch(start, stop)})
        for start, stop in zip(horizons.starts, horizons.steps, strict=True)
    ]
    return [trunk, *(replace(run, start=(trunk, start)) for run, start in zip(branches, horizons.starts, strict=True))]


def _table(value: Any) -> dict[str, dict[str, Any]]:
    """``[a, b]`` or ``{a: {overrides}, b: }`` → ``{a: {...}, b: {}}``."""
    if isinstance(value, Mapping):
        return {str(name): dict(overrides or {}) for name, overrides in value.items()}
    return {str(name): {} for name in value}
