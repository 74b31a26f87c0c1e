"""List the runs of a study, sizes × arms × rates × seeds, from its description.

:mod:`olmo_lns.study.schema` reads the description and has its keys.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, Iterable, Mapping

from olmo_lns.arms import ARMS, arm_from_text, define_arm
from olmo_lns.errors import LNSConfigError, did_you_mean
from olmo_lns.study import bundled_configs
from olmo_lns.study.engines import ENGINES, Engine, Run, overrides_for
from olmo_lns.study.schema import Description, Launch, read_description

#: Default number of GPUs in a node.
GPUS_PER_NODE = 8


@dataclass(frozen=True)
class Study:
    """A description with its runs and their launch settings.

    :param gpus, nodes: numbers that the command line requests for each run, or None for those of the description.
        See :meth:`layout`.
    :param gpu: type of GPU, for the plan's estimates and for the launch.

    >>> Study.load("paper").arms[:2]
    ['preln', 'preln_scaled_init']
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
    gpu: str = "A100"

    @property
    def sizes(self) -> list[str]:
        """The names of the sizes, without learning rates."""
        return list(dict.fromkeys(run.size for run in self.runs))

    @property
    def arms(self) -> list[str]:
        return list(dict.fromkeys(run.arm for run in self.runs))

    def layout(self, run: Run) -> tuple[int, int]:
        """Return the number of nodes of a run, and of GPUs in a node. Numbers from the command line take precedence.

        :raises LNSConfigError: if the GPUs do not fill the nodes evenly.
        """
        nodes_by_size, nproc = self.launch.nodes, self.launch.nproc
        if self.gpus is None:
            return self.nodes or nodes_by_size.get(run.size) or nodes_by_size.get("", 1), nproc
        nodes = self.nodes or -(-self.gpus // max(nproc, GPUS_PER_NODE))
        if self.gpus % nodes:
            raise LNSConfigError(
                f"{self.gpus} GPUs do not fill {nodes} nodes evenly. --gpus must be a multiple of --nodes. Change one "
                "of them."
            )
        return nodes, self.gpus // nodes

    def select_runs(self, only: Iterable[str] | None) -> list[Run]:
        """Return the runs whose names begin with one of the prefixes ``only``, such as ``7B`` or ``7B-preln``.

        :raises LNSConfigError: if no name of a run begins with a prefix.
        """
        if only is None:
            return list(self.runs)
        selected: dict[str, Run] = {}
        for prefix in only:
            matches = {
                run.name: run
                for run in self.runs
                for name in (run.name, f"{run.size}-{run.arm}-s{run.seed}")
                if f"{name}-".startswith(f"{prefix}-")
            }
            if not matches:
                names = [run.name for run in self.runs]
                beginnings = dict.fromkeys(name[:end] for name in names for end in (*_part_ends(name), len(name)))
                raise LNSConfigError(
                    f"No run of study {self.name} begins with {prefix!r}{did_you_mean(prefix, beginnings)}. Pass the "
                    f"beginning of one of these names: {', '.join(names)}."
                )
            selected |= matches
        return list(selected.values())

    @classmethod
    def load(cls, path: str | Path) -> Study:
        """Read a description.

        :param path: a file, or the name of a description in the pack, such as ``paper``.
        :raises LNSConfigError: if there is no such file, or a value, arm, size or framework is unknown.
        """
        path = bundled_configs.find_config(path, "study")
        description = read_description(path)
        engine = ENGINES[description.framework]
        try:
            runs = tuple(_runs(description, path, engine))
            if not runs:
                raise LNSConfigError("The description has no run. Name at least one size, one arm and one seed.")
            names = [run.name for run in runs]
            if repeated := sorted({name for name in names if names.count(name) > 1}):
                raise LNSConfigError(f"Two runs would use the folder {repeated[0]}. List each arm, rate and size once.")
        except LNSConfigError as error:
            raise LNSConfigError(f"{path}: {error}") from None
        return cls(
            description.name,
            engine,
            path,
            runs,
            description.launch,
            final_fraction=description.final_fraction,
            data=description.data,
            published=description.published,
            gpu=description.launch.gpu,
        )

    def with_options(self, gpus: int | None, nodes: int | None, gpu: str | None) -> Study:
        """Return the study with the options of a command line. None keeps the value of the description."""
        return replace(self, gpus=gpus, nodes=nodes, gpu=gpu or self.gpu)

    def with_variables(self, variables: Mapping[str, str]) -> Study:
        """Return the study with environment variables for the configs of its runs."""
        return replace(self, runs=tuple(replace(run, variables=variables) for run in self.runs))

    @classmethod
    def from_config(cls, path: Path, engine: Engine) -> Study:
        """Return a study with one run from a config file. The name of the file has the arm: ``60M-lns.yaml``."""
        size, _, arm = path.stem.partition("-")
        run = Run(size, arm if arm in ARMS else "", engine.default_seed, engine, path, {})
        return cls(path.stem, engine, path, (run,), Launch(nproc=GPUS_PER_NODE))


def _runs(description: Description, path: Path, engine: Engine) -> Iterable[Run]:
    """Yield the runs by size. The arms of one seed come together, so that an unfinished study can compare them.

    New arms of the description are added to the table of arms.
    """
    for new in (arm_from_text(name) for name in description.arms):
        if new.name not in ARMS:
            define_arm(new)  # a scheme by its spelling, whose label and style the report looks up
    arms = [(arm_from_text(name).name, overrides) for name, overrides in description.arms.items()]
    arm_names = [arm for arm, _ in arms]
    rates = _by_arm("rates", description.rates, arm_names)
    _require_names("only", description.only, description.sizes)
    _require_names("more_seeds", description.more_seeds, description.sizes)
    _require_names("nodes", {*description.launch.nodes} - {""}, description.sizes)
    common_seeds = [engine.default_seed] if description.seeds is None else description.seeds
    for size, size_overrides in description.sizes.items():
        selected_arms = {arm_from_text(name).name for name in description.only.get(size, arm_names)}
        _require_names("only", selected_arms, arm_names)
        more_seeds = _by_arm("more_seeds", description.more_seeds.get(size, []), arm_names)
        seeds = {arm: [*common_seeds, *more_seeds.get(arm, [])] for arm in arm_names if arm in selected_arms}
        for seed in dict.fromkeys(chain.from_iterable(seeds.values())):
            for arm, arm_overrides in arms:
                if seed in seeds.get(arm, []):
                    for rate in rates.get(arm) or [None]:
                        yield _run(
                            path, description.config, engine, size, arm, seed, size_overrides | arm_overrides, rate
                        )


def _part_ends(name: str) -> list[int]:
    return [match.start() for match in re.finditer("-", name)]


def _require_names(key: str, names: Iterable[str], expected: Iterable[str]) -> None:
    if unknown := sorted({*names} - {*expected}):
        hint = did_you_mean(unknown[0], expected)
        raise LNSConfigError(
            f"{key} names {unknown[0]}, which the description does not have{hint}. Use {' or '.join(expected)}."
        )


def _by_arm(key: str, value: Any, arms: list[str]) -> dict[str, Any]:
    """Return the value for each arm. A list applies to every arm."""
    if not isinstance(value, dict):
        return dict.fromkeys(arms, value)
    by_arm = {arm_from_text(name).name: item for name, item in value.items()}
    _require_names(key, by_arm, arms)
    return by_arm


def _run(
    path: Path, pattern: str, engine: Engine, size: str, arm: str, seed: int, settings: dict[str, Any], rate: str | None
) -> Run:
    """Return a run with the config file of its arm, or with the stock file and the settings of the arm.

    The files are searched beside the description, and then in the pack.
    """

    def config_file(arm: str) -> Path:
        name = pattern.replace("{size}", size).replace("{arm}", arm)
        local_file, pack_file = path.parent / name, bundled_configs.configs_folder() / "study" / name
        return pack_file if pack_file.is_file() and not local_file.is_file() else local_file

    config, arm_settings = config_file(arm), overrides_for(ARMS[arm], engine)
    if "{arm}" not in pattern or not config.is_file():
        config, settings = config_file(engine.base_arm), settings | arm_settings
    run = Run(size, arm, seed, engine, config, settings)
    if rate is not None:
        value = float(rate.removesuffix("x"))
        if rate.endswith("x"):
            value = float(f"{value * run.workload.learning_rate:.6g}")
        run = replace(run, overrides=settings | engine.rate_overrides(config, value), rate=value)
    return replace(run, overrides={**run.overrides, **engine.name_and_seed_overrides(run.name, seed)})
