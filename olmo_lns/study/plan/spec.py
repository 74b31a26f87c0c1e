"""Read a study's description: sizes × arms × seeds over the files of the config pack, as a list of runs.

People write it by hand, so each value is checked. docs/study.md has every key.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, Callable, Iterable, Mapping

import yaml

from olmo_lns.errors import LNSConfigError, did_you_mean
from olmo_lns.study import files
from olmo_lns.study.arms import ARMS, BASELINE, arm_named
from olmo_lns.study.engines import Engine, Run, engine_named, settings_of
from olmo_lns.study.files import located, pack_folder

Fits = Callable[[Any], bool]
#: The default of a key that must be given.
NEEDED = ...


@cache
def published() -> dict[str, Any]:
    """The papers' numbers: ``tables``, ``points`` and ``batches`` of published.yaml."""
    found: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("published.yaml").read_text(encoding="utf-8"))
    return found


def check(raw: Mapping[str, Any], path: Path) -> None:
    """Check the kind of each value. Names of sizes, arms and frameworks are checked later.

    :raises LNSConfigError: a key that is missing or unknown, or the value and what is expected.
    """
    if lacking := sorted(key for key, (*_, default) in KEYS.items() if default is NEEDED and key not in raw):
        raise LNSConfigError(f"{path}: a study description needs {', '.join(lacking)}")
    _printable(raw, str(path))
    _compare(raw, KEYS, f"{path}: ")
    _compare(raw.get("launch", {}), LAUNCH, f"{path}: launch: ")
    if (name := raw.get("published")) is not None and name not in (tables := published()["tables"]):
        raise LNSConfigError(f"{path}: published {name!r}{did_you_mean(name, tables)}: expected {', '.join(tables)}")


def _printable(value: Any, where: str) -> None:
    """Text of a description stands in generated shell scripts, where a line break would begin a line of its own."""
    if isinstance(value, str) and not value.isprintable():
        raise LNSConfigError(f"{where}: {value!r}: expected text without line breaks and control characters")
    if isinstance(value, dict):
        for key, inner in value.items():
            _printable(key, where)
            _printable(inner, f"{where}: {key}")
    elif isinstance(value, list):
        for inner in value:
            _printable(inner, where)


def _compare(values: Mapping[str, Any], keys: Mapping[str, tuple[Fits, str, Any]], where: str) -> None:
    if unknown := sorted(map(str, set(values) - set(keys))):
        raise LNSConfigError(f"{where}unknown keys {', '.join(unknown)}; known: {', '.join(sorted(keys))}")
    for key, value in values.items():
        fits, expected, _ = keys[key]
        if not fits(value):
            raise LNSConfigError(f"{where}{key} {value!r}: expected {expected}")


def _text(value: Any) -> bool:
    return isinstance(value, str) and bool(value)


def _identifier(value: Any) -> bool:
    return _text(value) and re.fullmatch(r"[\w.+][\w.+-]*", value, re.ASCII) is not None


def _name(value: Any) -> bool:
    return isinstance(value, (str, int, float)) and not isinstance(value, bool)


def _between(low: float, high: float) -> Fits:
    """A number above ``low`` and no larger than ``high``; YAML takes 1e-2 for text."""

    def fits(value: Any) -> bool:
        try:
            return _name(value) and low < float(value) <= high
        except ValueError:
            return False

    return fits


def _rate(value: Any) -> bool:
    """A number, or a multiple of the config's: ``2x``."""
    return _between(0, 1e300)(value[:-1] if isinstance(value, str) and value.endswith("x") else value)


def _whole(smallest: int, largest: float = math.inf) -> Fits:
    return lambda value: type(value) is int and smallest <= value < largest


def _list(inner: Fits) -> Fits:
    return lambda value: isinstance(value, list) and all(map(inner, value))


def _of(inner: Fits, name: Fits = _name) -> Fits:
    """A mapping from names to what ``inner`` takes."""
    return lambda value: isinstance(value, dict) and all(name(key) and inner(item) for key, item in value.items())


def _or(*kinds: Fits) -> Fits:
    return lambda value: any(kind(value) for kind in kinds)


def _path_pattern(value: Any) -> bool:
    try:
        return _text(value) and bool(value.format(size="", arm=""))
    except (KeyError, IndexError, ValueError, AttributeError):
        return False


def _rates(value: Any) -> bool:
    return bool(value) and _list(_rate)(value)


def _optional(inner: Fits) -> Fits:
    return lambda value: value is None or inner(value)


_TABLE = (_or(_list(_name), _of(_optional(_of(lambda _: True)))), "a list of names, or for each name its settings")
#: What OLMo and Megatron take as a seed.
_SEEDS, _ONE_TO = _list(_whole(0, 2**32)), f"a list of whole numbers from 0 to {2**32 - 1}"

#: Key -> whether a value will do, what is expected, and the default; None where there is none or the framework has one.
KEYS: dict[str, tuple[Fits, str, Any]] = {
    "name": (_identifier, "letters, digits, '.', '_', '+' and '-' (it names Slurm's jobs)", NEEDED),
    "framework": (_text, "the name of a framework", "olmo"),
    "config": (_path_pattern, "a path, with {size} and {arm} where they belong and no other braces", NEEDED),
    "sizes": (*_TABLE, NEEDED),
    "arms": (*_TABLE, NEEDED),
    "rates": (
        _or(_rates, _of(_or(_rates, _of(_rates)))),
        "a list of learning rates above 0, or of multiples such as 2x, or one for each arm, or for each size",
        None,
    ),
    "seeds": (_SEEDS, _ONE_TO, None),
    "more_seeds": (_of(_or(_SEEDS, _of(_SEEDS))), f"for a size, or a size's arms, {_ONE_TO}", None),
    "only": (_of(_list(_name)), "for a size a list of arms", None),
    "data": (_optional(_text), "a name or nothing", None),
    "final_fraction": (_between(0, 1), "a number in (0, 1]", 0.01),
    "horizons": (_list(_whole(1)), "rising numbers of steps", None),
    "decay": (_between(0, 1 - 1e-9), "a share of the steps between 0 and 1", 0.1),
    "finished": (_optional(_text), "the path of a table", None),
    "published": (_optional(_text), "the name of a published table", None),
    "launch": (_of(lambda _: True), "a mapping of settings", None),
}
LAUNCH: dict[str, tuple[Fits, str, Any]] = {
    "command": (_text, "`train` or the path of a script", "train"),
    "nproc": (_whole(1), "a number of processes", 1),
    "nodes": (_or(_whole(1), _of(_whole(1))), "a number of nodes, or for a size its own", 1),
    "workers": (_whole(1), "a number of runs", 1),
    "threads": (_optional(_whole(1)), "a number of threads", None),
    "args": (_list(_name), "a list of arguments", None),
    "sbatch": (
        _of(lambda value: not isinstance(value, (list, dict)), _identifier),
        "a mapping of #SBATCH options, such as qos, to text, numbers, true, false or null",
        None,
    ),
}


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
class Horizons:
    """Several budgets from one run: a trunk at a constant rate, and branches from its checkpoints whose rate falls.

    :param steps: optimizer steps of each budget, rising.
    :param decay: the last part of each, in which the rate falls: in (0, 1).
    """

    steps: tuple[int, ...]
    decay: float

    @property
    def starts(self) -> tuple[int, ...]:
        """The step of the trunk at which each branch leaves it."""
        return tuple(round(step * (1 - self.decay)) for step in self.steps)

    @property
    def every(self) -> int:
        """Steps between the trunk's checkpoints, so that there is one at every start."""
        return math.gcd(*self.starts)

    def runs(self, run: Run) -> list[Run]:
        """The trunk ``<size>_trunk`` and its branches ``<size>to<steps>``."""

        def part(size: str, own: dict[str, Any]) -> Run:
            named = run.engine.identity(f"{size}-{run.arm}-s{run.seed}", run.seed)
            return replace(run, size=size, overrides={**run.overrides, **own, **named})

        trunk = part(f"{run.size}_trunk", run.engine.trunk(self.starts[-1], self.every))
        pairs = zip(self.starts, self.steps, strict=True)
        ends = [(part(f"{run.size}to{stop}", run.engine.branch(start, stop)), start) for start, stop in pairs]
        return [trunk, *(replace(end, start=(trunk, start)) for end, start in ends)]


@dataclass(frozen=True)
class Study:
    """A description, read: its runs and how they are started.

    >>> Study.load("paper").arms[:2]
    ['preln', 'preln_scaled_init']

    :param final_fraction: a run's loss is the mean over this last part of its steps.

    :param finished: a committed table of finished runs (:class:`olmo_lns.study.collect.gather.Finished`).
    :param published: the name of the papers' table that it is to be set beside.
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
    def groups(self) -> list[str]:
        """The sizes without their learning rates."""
        return list(dict.fromkeys(run.group for run in self.runs))

    @property
    def arms(self) -> list[str]:
        return list(dict.fromkeys(run.arm for run in self.runs))

    def gpus(self, run: Run) -> int:
        return self.launch.nproc * self.launch.nodes_of(run.size)

    @classmethod
    def load(cls, path: str | Path) -> Study:
        """Read a description.

        :param path: a file, or a description of the pack by its name: ``paper``.
        :raises LNSConfigError: no such file, no YAML, an unknown key, arm, size or framework, or an unfit value.
        """
        raw = files.read(path := located(path, "study"))
        check(raw, path)
        options = raw.get("launch", {})
        launch = Launch(**options | {"args": tuple(map(str, options.get("args", ())))})
        try:
            engine = engine_named(raw.get("framework", "olmo"))
            runs = tuple(_runs(raw, path, engine))
            if isinstance(launch.nodes, Mapping):
                _known("launch: nodes", launch.nodes, {name for run in runs for name in (run.size, run.group)}, "sizes")
        except LNSConfigError as error:
            raise LNSConfigError(f"{path}: {error}") from None
        table = path.parent / raw["finished"] if raw.get("finished") else None
        fraction = float(raw.get("final_fraction", 0.01))
        return cls(raw["name"], engine, path, runs, fraction, raw.get("data"), launch, table, raw.get("published"))


def _runs(raw: Mapping[str, Any], path: Path, engine: Engine) -> Iterable[Run]:
    """Size by size as listed, and within a size the arms of a seed together: a study cut short still compares arms."""
    sizes, horizons = _table(raw["sizes"]), _horizons(raw)
    arms = {arm_named(name).name: own for name, own in _table(raw["arms"]).items()}
    rates = raw.get("rates") or {}
    by_size = isinstance(rates, Mapping) and set(map(str, rates)) & set(sizes)
    of_sizes = {"rates": rates if by_size else dict.fromkeys(sizes, rates)}
    for key in ("only", "more_seeds", "rates"):
        values = of_sizes.setdefault(key, raw.get(key, {}))
        _known(key, values, sizes, "sizes")
        of_sizes[key] = {str(size): value for size, value in values.items()}
    for size, own in sizes.items():
        if not re.fullmatch(r"[A-Za-z0-9._]+", size):
            raise LNSConfigError(f"size {size!r}: letters, digits, '.' and '_' only (it names folders)")
        here = _known("only", [arm_named(str(a)).name for a in of_sizes["only"].get(size, arms)], arms, "arms")
        more = _by_arm(of_sizes["more_seeds"].get(size, []), arms, "more_seeds")
        tried = _by_arm(of_sizes["rates"].get(size) or {}, arms, "rates")
        seeds = {a: [*raw.get("seeds", [engine.default_seed]), *more.get(a, [])] for a in arms if a in here}
        if any(len(set(found)) != len(found) for found in seeds.values()):
            raise LNSConfigError("a seed is listed twice for one size")
        for seed in dict.fromkeys(chain.from_iterable(seeds.values())):
            for arm in (arm for arm in seeds if seed in seeds[arm]):
                for rate in tried.get(arm) or [None]:
                    run = _run(path, str(raw["config"]), engine, size, arm, seed, {**own, **arms[arm]}, rate)
                    yield from [run] if horizons is None else horizons.runs(run)


def _known(key: str, names: Iterable[Any], known: Iterable[str], what: str) -> list[str]:
    found, known = [str(name) for name in names], list(known)
    if unknown := sorted(set(found) - set(known)):
        raise LNSConfigError(f"{key} names {', '.join(unknown)}, which is not among the {what}: {', '.join(known)}")
    return found


def _by_arm(value: Any, arms: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Values by arm; a list holds for every arm."""
    if not isinstance(value, Mapping):
        return dict.fromkeys(arms, value)
    found = {arm_named(str(name)).name: item for name, item in value.items()}
    _known(key, found, arms, "arms")
    return found


def _horizons(raw: Mapping[str, Any]) -> Horizons | None:
    if "horizons" not in raw:
        if "decay" in raw:
            raise LNSConfigError("decay belongs to horizons: list their steps, or remove it")
        return None
    found = Horizons(tuple(raw["horizons"]), float(raw.get("decay", 0.1)))
    if not found.steps or any(later <= earlier for earlier, later in pairwise((0, *found.starts))):
        raise LNSConfigError(f"horizons {list(found.steps)}: expected rising numbers of steps, such as [100, 200]")
    return found


def _run(
    path: Path, pattern: str, engine: Engine, size: str, arm: str, seed: int, extra: dict[str, Any], rate: Any
) -> Run:
    """The file of the arm, or where it has none the baseline's with the arm's keys.

    It is looked for where the description says, then in the pack.
    """

    def file(of: str) -> Path:
        named = pattern.format(size=size, arm=of)
        packed = pack_folder() / "study" / named
        return packed if packed.is_file() and not (path.parent / named).is_file() else path.parent / named

    config, overrides = file(arm), dict(extra)
    own = settings_of(ARMS[arm], engine)
    if "{arm}" not in pattern:
        overrides |= own
    elif not config.is_file() and (stock := file(BASELINE)).is_file():
        config = stock
        overrides |= dict.fromkeys(settings_of(ARMS[BASELINE], engine)) | own
    if rate is not None:
        times = float(rate[:-1]) if str(rate).endswith("x") else None
        own_rate = Run(size, arm, seed, engine, config, overrides).shape.learning_rate if times else 0.0
        rate = float(f"{times * own_rate:.6g}") if times else float(rate)
        overrides |= engine.rate(config, rate)
        size = f"{size}x{rate:g}"
    overrides |= engine.identity(f"{size}-{arm}-s{seed}", seed)
    return Run(size, arm, seed, engine, config, overrides, rate=rate)


def _table(value: Any) -> dict[str, dict[str, Any]]:
    """``[a, b]`` or ``{a: {overrides}, b: }`` → ``{a: {...}, b: {}}``."""
    if isinstance(value, Mapping):
        return {str(name): dict(overrides or {}) for name, overrides in value.items()}
    return {str(name): {} for name in value}
