"""A study description: sizes × arms × seeds over the files of the config pack, as a list of runs."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any, Mapping

import yaml

from olmo_lns.errors import LNSConfigError, did_you_mean, one_line
from olmo_lns.study.arms import ARMS, BASELINE, arm_named
from olmo_lns.study.engines import OLMO, Engine, Run, engine_named
from olmo_lns.study.pack import located
from olmo_lns.study.plan import description
from olmo_lns.study.plan.compare import settings_of
from olmo_lns.study.plan.horizons import Horizons
from olmo_lns.study.plan.published import PUBLISHED

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
        """:param size: of a run; nodes of a size are those of its runs at every rate (``60Mx0.0006``)."""
        if isinstance(self.nodes, int):
            return self.nodes
        without_rate = re.sub(r"x[0-9.e-]+(?=(_trunk|to\d+)?$)", "", size)
        return int(self.nodes.get(size, self.nodes.get(without_rate, 1)))


@dataclass(frozen=True)
class Study:
    """:param final_fraction: a run's loss is the mean over this last part of its steps.

    :param finished: a committed table of finished runs (:mod:`olmo_lns.study.collect.finished`).
    :param published: the name of the papers' table that it is to be set beside (:mod:`olmo_lns.study.plan.published`).
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

        :param path: a file, or a description of the pack by its name: ``paper``.
        :raises LNSConfigError: no such file, no YAML, an unknown key, arm, size or framework, or an unfit value.
        """
        path = located(path, "study")
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
        if isinstance(launch.nodes, Mapping) and (
            unknown := {*launch.nodes} - {name for run in runs for name in (run.size, run.group)}
        ):
            raise LNSConfigError(
                f"{path}: launch: nodes names {', '.join(sorted(map(str, unknown)))}, which is not among the sizes: "
                f"{', '.join(dict.fromkeys(run.size for run in runs))}"
            )
        return cls(raw["name"], engine, path, runs, fraction, raw.get("data"), launch, table, published)


def _runs(raw: Mapping[str, Any], path: Path, engine: Engine) -> tuple[Run, ...]:
    """Size by size, smallest first as listed, the arms of a seed together: a study cut short still compares arms."""
    sizes, arms = _table(raw["sizes"]), {_arm(name, path): own for name, own in _table(raw["arms"]).items()}
    only = _by_size(raw, "only", sizes, path)
    more = _by_size(raw, "more_seeds", sizes, path)
    for name in sizes:
        if not re.fullmatch(r"[A-Za-z0-9._]+", name):
            raise LNSConfigError(f"{path}: size {name!r}: letters, digits, '.' and '_' only (it names folders)")
    horizons = Horizons.of(raw, path)
    runs: list[Run] = []
    for size in sizes:
        here = [_arm(name, path) for name in only.get(size, arms)]
        seeds = _by_arm(more.get(size, []), arms, "more_seeds", path)
        wanted = {arm: [*raw.get("seeds", [engine.default_seed]), *seeds.get(arm, [])] for arm in arms if arm in here}
        if unknown := sorted(set(here) - set(arms)):
            raise LNSConfigError(f"{path}: only names {', '.join(unknown)}, which is not among the arms")
        if any(len(set(found)) != len(found) for found in wanted.values()):
            raise LNSConfigError(f"{path}: a seed is listed twice for one size")
        rates = raw.get("rates", {})
        if isinstance(rates, Mapping) and any(str(name) in sizes for name in rates):
            rates = _by_size(raw, "rates", sizes, path).get(size, {})
        tried = _by_arm(rates or {}, arms, "rates", path)
        for seed in dict.fromkeys(chain.from_iterable(wanted.values())):
            for arm in (arm for arm in wanted if seed in wanted[arm]):
                for rate in tried.get(arm, [None]):
                    run = _run(raw, path, engine, size, arm, seed, {**sizes[size], **arms[arm]}, rate)
                    runs += [run] if horizons is None else _branched(run, horizons)
    return tuple(runs)


def _arm(name: str, path: Path) -> str:
    try:
        return arm_named(name).name
    except LNSConfigError as error:
        raise LNSConfigError(f"{path}: {error}") from None


def _by_size(raw: Mapping[str, Any], key: str, sizes: Mapping[str, Any], path: Path) -> dict[str, Any]:
    found = {str(size): value for size, value in raw.get(key, {}).items()}
    if unknown := sorted(set(found) - set(sizes)):
        raise LNSConfigError(f"{path}: {key} names {', '.join(unknown)}, which is not among the sizes")
    return found


def _by_arm(value: Any, arms: Mapping[str, Any], key: str, path: Path) -> dict[str, Any]:
    """A list is for every arm."""
    if not isinstance(value, Mapping):
        return dict.fromkeys(arms, value)
    found = {_arm(str(name), path): item for name, item in value.items()}
    if unknown := sorted(set(found) - set(arms)):
        raise LNSConfigError(f"{path}: {key} names {', '.join(unknown)}, which is not among the arms")
    return found


def _run(
    raw: Mapping[str, Any], path: Path, engine: Engine, size: str, arm: str, seed: int, extra: dict, rate: float | None
) -> Run:
    """The file of the arm, or where it has none the baseline's with the arm's keys."""
    pattern = str(raw["config"])
    config = path.parent / pattern.format(size=size, arm=arm)
    overrides = dict(extra)
    try:
        own = settings_of(ARMS[arm], engine)
        if "{arm}" not in pattern:
            overrides |= own
        elif not config.is_file() and (stock := path.parent / pattern.format(size=size, arm=BASELINE)).is_file():
            config = stock
            overrides |= dict.fromkeys(settings_of(ARMS[BASELINE], engine)) | own
    except LNSConfigError as error:
        raise LNSConfigError(f"{path}: {error}") from None
    if rate is not None:
        rate = float(rate)
        overrides |= engine.rate(config, rate)
        size = f"{size}x{rate:g}"
    overrides |= engine.identity(f"{size}-{arm}-s{seed}", seed)
    return Run(size, arm, seed, engine, config, overrides, rate=rate)


def _branched(run: Run, horizons: Horizons) -> list[Run]:
    """The trunk ``<size>_trunk`` and its branches ``<size>to<steps>``."""

    def part(size: str, own: dict[str, Any]) -> Run:
        named = run.engine.identity(f"{size}-{run.arm}-s{run.seed}", run.seed)
        return replace(run, size=size, overrides={**run.overrides, **own, **named})

    trunk = part(f"{run.size}_trunk", run.engine.trunk(horizons.starts[-1], horizons.every))
    pairs = zip(horizons.starts, horizons.steps, strict=True)
    ends = [(part(f"{run.size}to{stop}", run.engine.branch(start, stop)), start) for start, stop in pairs]
    return [trunk, *(replace(end, start=(trunk, start)) for end, start in ends)]


def _table(value: Any) -> dict[str, dict[str, Any]]:
    """``[a, b]`` or ``{a: {overrides}, b: }`` → ``{a: {...}, b: {}}``."""
    if isinstance(value, Mapping):
        return {str(name): dict(overrides or {}) for name, overrides in value.items()}
    return {str(name): {} for name in value}
