"""Read a study's description: sizes × arms × seeds over the files of the config pack, as a list of runs.

A schema checks each value; docs/descriptions.md has every key. Every scalar is read as text, and the schema sets its
type: quoted or not, ``48:00:00`` is a time and ``no`` a word.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Iterable, Literal

import yaml
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints, ValidationError

from olmo_lns.errors import LNSConfigError
from olmo_lns.study import files
from olmo_lns.study.arms import ARMS, arm_named
from olmo_lns.study.engines import ENGINES, Engine, Run, settings_of

#: Default number of GPUs of a node.
GPUS_OF_A_NODE = 8


def _none(value: Any) -> Any:
    return None if value in ("", "~", "null") else value


def _table(value: Any) -> Any:
    """Return ``[a, b]`` or ``{a: {settings}, b: }`` as ``{a: {...}, b: {}}``."""
    if isinstance(value, list):
        return {str(name): {} for name in value}
    if isinstance(value, dict):
        return {name: {} if _none(own) is None else own for name, own in value.items()}
    return value


def _rate(text: str) -> str:
    if not 0 < float(text.removesuffix("x")) < float("inf"):  # or float's ValueError
        raise ValueError("expected a learning rate above 0, or a multiple of the config's such as 2x")
    return text


#: Text without line breaks and control characters, which would start a new line in a generated shell script.
Text = Annotated[str, StringConstraints(pattern=r"^[^\x00-\x1f\x7f-\x9f]+$")]
Word = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.+][A-Za-z0-9_.+-]*$")]
Size = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9._]+$")]
Positive = Annotated[int, Field(ge=1)]
#: Seeds that OLMo and Megatron accept.
Seeds = list[Annotated[int, Field(ge=0, lt=2**32)]]
Settings = Annotated[dict[Text, Any], AfterValidator(files.resolved)]
Rates = Annotated[list[Annotated[Text, AfterValidator(_rate)]], Field(min_length=1)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Container(_Strict):
    """The image for the training processes of a Slurm job: Apptainer's ``.sif``, or one of Pyxis.

    :param mounts: folders of the host, ``/data`` or ``/data:/inside``.
    """

    image: Text
    mounts: list[Text] = []


class Launch(_Strict):
    """Launch settings of a run.

    :param command: ``train`` (``olmo-lns train``) or the path of a training script. :param nproc: GPUs of a node.
    :param nodes: number of nodes of a run, by size; the key ``""`` is for all other sizes.
    :param threads: OMP_NUM_THREADS of each run. :param args: arguments for every command.
    :param setup: shell lines at the start of a Slurm job, such as ``module load cuda``.
    :param sbatch: further ``#SBATCH`` lines; None removes a default line.
    """

    command: Text = "train"
    nproc: Positive = 1
    nodes: Annotated[
        dict[str, Positive], BeforeValidator(lambda value: value if isinstance(value, dict) else {"": value})
    ] = {}
    threads: Annotated[Positive | None, BeforeValidator(_none)] = None
    args: list[Text] = []
    setup: list[Text] = []
    sbatch: dict[Word, Annotated[Text | None, BeforeValidator(_none)]] = {}
    container: Container | None = None


class Description(_Strict):
    """The keys of a description (docs/descriptions.md)."""

    name: Word
    framework: Literal["olmo", "olmo-core", "megatron"] = "olmo"
    config: Text
    sizes: Annotated[dict[Size, Settings], BeforeValidator(_table)]
    arms: Annotated[dict[Text, Settings], BeforeValidator(_table)]
    rates: Annotated[Rates | dict[str, Rates], BeforeValidator(lambda value: {} if value == "" else value)] = {}
    seeds: Seeds | None = None
    more_seeds: dict[str, Seeds | dict[str, Seeds]] = {}
    only: dict[str, list[str]] = {}
    data: Annotated[Text | None, BeforeValidator(_none)] = None
    final_fraction: Annotated[float, Field(gt=0, le=1)] = 0.01
    published: Annotated[Text | None, BeforeValidator(_none)] = None
    launch: Launch = Launch()


@cache
def published() -> dict[str, Any]:
    """Return the papers' numbers: ``tables`` and ``points`` of published.yaml."""
    found: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("published.yaml").read_text(encoding="utf-8"))
    return found


def described(path: Path) -> Description:
    """Read and check the keys of a file.

    :raises LNSConfigError: a missing, unknown or repeated key, or a wrong value.
    """
    try:
        found = Description.model_validate(files.read_text(path))
    except ValidationError as error:
        worst = max(error.errors(), key=lambda each: len(each["loc"]))
        where = ": ".join(str(part) for part in worst["loc"] if "[" not in str(part))  # without names of types
        value = f"{worst['input']!r}: " if isinstance(worst["input"], str) else ""
        said = "unknown key" if worst["type"] == "extra_forbidden" else f"{value}{worst['msg']}"
        raise LNSConfigError(f"{path}: {where}: {said}") from None
    if found.published is not None and found.published not in (tables := published()["tables"]):
        raise LNSConfigError(f"{path}: published: {found.published!r}: expected one of {', '.join(tables)}")
    return found


@dataclass(frozen=True)
class Study:
    """A description with its runs and their launch settings.

    >>> Study.load("paper").arms[:2]
    ['preln', 'preln_scaled_init']

    :param gpus, nodes: numbers for a run, None: the description's; see :meth:`layout`.
    """

    name: str
    engine: Engine
    path: Path
    runs: tuple[Run, ...]
    launch: Launch
    final_fraction: float = 0.01
    data: str | None = None
    published: str | None = None
    gpus: int | None = None
    nodes: int | None = None

    @property
    def groups(self) -> list[str]:
        """The sizes without their learning rates."""
        return list(dict.fromkeys(run.group for run in self.runs))

    @property
    def arms(self) -> list[str]:
        return list(dict.fromkeys(run.arm for run in self.runs))

    def layout(self, run: Run) -> tuple[int, int]:
        """Return ``(nodes, GPUs of a node)`` of a run: the requested numbers, else the description's.

        :raises LNSConfigError: GPUs that do not fill the nodes evenly.
        """
        named, nproc = self.launch.nodes, self.launch.nproc
        if self.gpus is None:
            return self.nodes or named.get(run.group) or named.get("", 1), nproc
        nodes = self.nodes or -(-self.gpus // max(nproc, GPUS_OF_A_NODE))
        if self.gpus % nodes:
            raise LNSConfigError(f"{self.gpus} GPUs do not fill {nodes} nodes: give --gpus a multiple of --nodes")
        return nodes, self.gpus // nodes

    def selected(self, only: Iterable[str] | None) -> list[Run]:
        """Return the runs whose names begin with one of ``only``: ``7B``, ``7B-preln`` or a whole name.

        :raises LNSConfigError: no run's name begins so.
        """
        if only is None:
            return list(self.runs)
        found: dict[str, Run] = {}
        for wanted in only:
            mine = {
                run.name: run
                for run in self.runs
                for name in (run.name, f"{run.group}-{run.arm}-s{run.seed}")
                if f"{name}-".startswith(f"{wanted}-")
            }
            if not mine:
                names = ", ".join(run.name for run in self.runs)
                raise LNSConfigError(f"no run of study {self.name} begins with {wanted!r}; its runs: {names}")
            found |= mine
        return [*found.values()]

    @classmethod
    def load(cls, path: str | Path) -> Study:
        """Read a description.

        :param path: a file, or the name of a description of the pack: ``paper``.
        :raises LNSConfigError: no such file, or an unknown value, arm, size or framework.
        """
        keys = described(path := files.located(path, "study"))
        try:
            engine = ENGINES[keys.framework]
            runs = tuple(_runs(keys, path, engine))
            names = [run.name for run in runs]
            if twice := sorted({name for name in names if names.count(name) > 1}):
                raise LNSConfigError(f"two runs would have the folder {twice[0]}: give each arm, rate and size once")
        except LNSConfigError as error:
            raise LNSConfigError(f"{path}: {error}") from None
        return cls(keys.name, engine, path, runs, keys.launch, keys.final_fraction, keys.data, keys.published)

    @classmethod
    def of_config(cls, path: Path, engine: Engine) -> Study:
        """Return a config file as a study; the file's name has the arm: ``60M-lns.yaml``."""
        size, _, arm = path.stem.partition("-")
        run = Run(size, arm if arm in ARMS else "", engine.default_seed, engine, path, {})
        return cls(path.stem, engine, path, (run,), Launch(nproc=GPUS_OF_A_NODE))


def _runs(keys: Description, path: Path, engine: Engine) -> Iterable[Run]:
    """Yield the runs by size; within a size the arms of a seed together, so that a partial study compares arms."""
    arms = [(arm_named(name).name, own) for name, own in keys.arms.items()]
    known = [arm for arm, _ in arms]
    rates = _by_arm("rates", keys.rates, known)
    for key, named in (("only", keys.only), ("more_seeds", keys.more_seeds), ("nodes", keys.launch.nodes)):
        _require_known(key, {*named} - {""}, keys.sizes)
    for size, own in keys.sizes.items():
        here = {arm_named(arm).name for arm in keys.only.get(size, known)}
        _require_known("only", here, known)
        more = _by_arm("more_seeds", keys.more_seeds.get(size, []), known)
        first = [engine.default_seed] if keys.seeds is None else keys.seeds
        seeds = {arm: [*first, *more.get(arm, [])] for arm in known if arm in here}
        for seed in dict.fromkeys(chain.from_iterable(seeds.values())):
            for arm, changed in arms:
                if seed in seeds.get(arm, []):
                    for rate in rates.get(arm) or [None]:
                        yield _run(path, keys.config, engine, size, arm, seed, {**own, **changed}, rate)


def _require_known(key: str, names: Iterable[str], known: Iterable[str]) -> None:
    if unknown := sorted({*names} - {*known}):
        raise LNSConfigError(f"{key} names {unknown[0]}, which the description lacks: expected {', '.join(known)}")


def _by_arm(key: str, value: Any, arms: list[str]) -> dict[str, Any]:
    """Return values by arm; a list applies to every arm."""
    if not isinstance(value, dict):
        return dict.fromkeys(arms, value)
    found = {arm_named(name).name: item for name, item in value.items()}
    _require_known(key, found, arms)
    return found


def _run(
    path: Path, pattern: str, engine: Engine, size: str, arm: str, seed: int, changed: dict[str, Any], tried: str | None
) -> Run:
    """Return the run with the arm's file, or with a stock file and the arm's keys.

    A file is searched at the description's path, then in the pack.
    """

    def file(of: str) -> Path:
        named = pattern.replace("{size}", size).replace("{arm}", of)
        here, packed = path.parent / named, files.pack_folder() / "study" / named
        return packed if packed.is_file() and not here.is_file() else here

    config, own = file(arm), settings_of(ARMS[arm], engine)
    if "{arm}" not in pattern or not config.is_file():
        config, changed = file(engine.base_arm), changed | own
    run = Run(size, arm, seed, engine, config, changed)
    if tried is not None:
        rate = float(tried.removesuffix("x"))
        if tried.endswith("x"):
            rate = float(f"{rate * run.shape.learning_rate:.6g}")
        run = Run(size, arm, seed, engine, config, changed | engine.rate(config, rate), rate)
    return Run(size, arm, seed, engine, config, {**run.overrides, **engine.identity(run.name, seed)}, run.rate)
