"""Check configs: a run is its arm, two arms differ in nothing else, and ``olmo-lns config`` checks any file.

``olmo-lns config`` also lists and copies the files of the pack.
"""

from __future__ import annotations

import argparse
import os.path
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any, Collection, Iterable, Mapping, Sequence

from rich.console import Console
from rich.progress import track

from olmo_lns.arguments import above_zero, at_least
from olmo_lns.errors import LNSConfigError
from olmo_lns.study import files
from olmo_lns.study.arms import ARMS, arm_named
from olmo_lns.study.engines import ENGINES, Engine, Run, settings_of
from olmo_lns.study.engines.base import GPUS, Shape
from olmo_lns.study.plan.spec import Study


def arm_problems(name: str, settings: Mapping[str, Any], engine: Engine) -> list[str]:
    """What contradicts the arm's definition in flat settings; empty when nothing does."""
    arm = arm_named(name)
    try:
        wanted = engine.defining(settings_of(arm, engine))
    except LNSConfigError as error:
        return [str(error)]
    found = engine.defining(settings)
    return [
        f"{key}={found[key]!r}, but arm {name!r} is {key}={value!r}"
        for key, value in wanted.items()
        if found[key] != value
    ]


def init_problems(settings: Mapping[str, Any], engine: Engine, arm: str = "") -> list[str]:
    """A scheme that wants plain initialization with a scaled one, unless that is what the arm is for.

    For LNS the paper (footnote 1, section 6) finds the two together worse.
    """
    scheme = engine.scheme(settings)
    if scheme.definition.initialization != "plain" or (arm in ARMS and ARMS[arm].initialization != "plain"):
        return []
    found = engine.scaled(settings)
    return [f"{scheme.definition.label} with {found}"] if found else []


def _differences(
    first: Mapping[str, Any], second: Mapping[str, Any], engine: Engine, *, rates: bool
) -> list[tuple[str, Any, Any]]:
    """``(key, first, second)`` of all keys but the arm's own, names and data; with ``rates`` not the rate's."""
    own = engine.arm_keys | (set(engine.rate_keys) if rates else set())
    keys = sorted(key for key in {*first, *second} if not _aside(key, engine, own))
    found = [(engine.start[0], start_of(first, engine), start_of(second, engine))]
    return found + [(key, first.get(key), second.get(key)) for key in keys]


def settings_identity(settings: Mapping[str, Any], engine: Engine) -> dict[str, Any]:
    """The settings that decide a run's result: with the arm's own, without names and folders."""
    kept = {key: value for key, value in sorted(settings.items()) if not _aside(key, engine)}
    return kept | {engine.start[0]: start_of(settings, engine)}


def _aside(key: str, engine: Engine, more: Collection[str] = ()) -> bool:
    return key in more or key == engine.data_key or key.startswith(engine.bookkeeping)


def start_of(settings: Mapping[str, Any], engine: Engine) -> str | None:
    """The checkpoint that a run starts from; None where it starts anew or goes on from one of its own.

    A start inside the run's own folders is a restart, any other makes another run.
    """
    key, own = engine.start
    if not (start := settings.get(key)):
        return None
    folders = [Path(os.path.normpath(str(settings[name]))) for name in own if settings.get(name)]
    path = Path(os.path.normpath(str(start)))
    return None if any(path.is_relative_to(folder) for folder in folders) else str(start)


def compare_arms(runs: Sequence[Run], identities: Mapping[str, Mapping[str, Any]]) -> None:
    """Each run must be its arm, and the arms of one size and seed must differ in the arm's keys only.

    :param identities: of the runs that are known, by name: ``settings``, ``data`` (None: not stamped), ``environment``.
    :raises LNSConfigError: the two runs, the key and both values.
    """
    firsts: dict[tuple[str, int], Run] = {}
    for run in (run for run in runs if run.name in identities):
        if found := arm_problems(run.arm, identities[run.name]["settings"], run.engine):
            raise LNSConfigError(f"run {run.name} is not its arm: {found[0]}")
        first = firsts.setdefault((run.group, run.seed), run)
        _compare(first, identities[first.name], run, identities[run.name])


def compare_planned(planned: Sequence[Run]) -> None:
    """:func:`compare_arms` before anything runs, on the settings that the configs give."""
    compare_arms(planned, {run.name: {"settings": run.settings, "data": None, "environment": {}} for run in planned})


def check_batches(study: Study, runs: Sequence[Run], gpus: int | None = None) -> None:
    """:raises LNSConfigError: a run whose GPUs do not divide its batch."""
    for run in runs:
        machine = run.engine.machine(run.settings)
        if problem := machine.problem(run.shape, gpus or study.gpus(run), even=run.engine.even):
            raise LNSConfigError(f"run {run.name}: {problem}")


def _compare(first: Run, one: Mapping[str, Any], second: Run, other: Mapping[str, Any]) -> None:
    engine = first.engine
    found = _differences(one["settings"], other["settings"], engine, rates=(first.rate, second.rate) != (None, None))
    # Without a stamp on both (runs started by hand) the paths must do for the data.
    pair = (one["data"], other["data"])
    if None in pair:
        pair = (one["settings"].get(engine.data_key), other["settings"].get(engine.data_key))
        key = engine.data_key
    else:
        key = "data"
    found += [(key, *pair), ("environment", one["environment"], other["environment"])]
    if different := [each for each in found if each[1] != each[2]]:
        key, here, there = different[0]
        more = f" (and {len(different) - 1} more)" if len(different) > 1 else ""
        raise LNSConfigError(
            f"{first.name} and {second.name} differ in more than the arm: {key} is {here!r} and {there!r}{more}; "
            "their losses cannot be compared"
        )


#: For the estimate where nobody says how many.
GPUS_OF_A_NODE = 8
#: Files of other commands, which check them themselves: the key that tells them -> whose they are.
ELSEWHERE = {"dataset_name": "TRL's own command", "augment": "olmo-lns vision train"}


@dataclass
class Checked:
    """One file. ``problems`` make the exit code 1, ``notes`` do not."""

    path: Path
    kind: str = "?"
    arm: str = "–"
    shape: Shape | None = None
    parameters: int = 0
    memory: str = "–"
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def find(paths: Iterable[Path]) -> list[Path]:
    """The files themselves, and every ``*.yaml``/``*.yml`` under a folder, recursively; ``configs/…`` of the pack too.

    :raises LNSConfigError: a path that does not exist, or nothing found.
    """
    found: list[Path] = []
    for path in paths:
        if not path.exists() and (packed := files.pack_folder().parent / path).exists() and path.parts[0] == "configs":
            path = packed
        if not path.exists():
            path = files.located(path, "")
        found += sorted(p for p in path.rglob("*.y*ml") if p.is_file()) if path.is_dir() else [path]
    if not found:
        raise LNSConfigError("no *.yaml file found")
    return found


def check(path: Path, *, gpus: int | None, gpu: str, budget: float | None) -> Checked:
    """Check one file. Everything wrong with it is in ``problems``; nothing is raised for a bad file.

    :param gpus: of a run, which must divide the batch; None for an estimate on :data:`GPUS_OF_A_NODE`.
    """
    result = Checked(path)
    try:
        result.kind = _kind(path)
        if result.kind in ELSEWHERE.values():
            result.notes.append(f"not checked here: {result.kind} checks its own configs")
        elif result.kind == "study":
            study = Study.load(path)
            compare_planned(study.runs)
            check_batches(study, study.runs)
            result.notes.append(f"{len(study.runs)} runs: {', '.join(study.sizes)} × {', '.join(study.arms)}")
        else:
            _config(result, ENGINES[result.kind], gpus, gpu, budget)
    except LNSConfigError as error:
        return Checked(path, problems=[str(error).removeprefix(f"{path}: ")])
    return result


def _kind(path: Path) -> str:
    raw, known = files.read(path), {engine.file_key: name for name, engine in ENGINES.items()}
    for key, kind in {**ELSEWHERE, **known, "arms": "study"}.items():
        if key in raw:
            return kind
    titles = ", ".join(f"{ENGINES[name].title}'s config ({key}:)" for key, name in known.items())
    raise LNSConfigError(f"of no known kind: expected {titles} or a study (arms:)")


def _config(result: Checked, engine: Engine, given: int | None, gpu: str, budget: float | None) -> None:
    gpus = given or GPUS_OF_A_NODE
    loaded = engine.load(result.path, {})
    settings = engine.settings(loaded)
    shape = result.shape = engine.shape(settings)
    # The arm is the part of the file's name after the size; a file named otherwise has none to check.
    name = result.path.stem.partition("-")[2]
    if name in ARMS:
        result.arm = name
        result.problems += arm_problems(name, settings, engine)
    elif not (scheme := engine.scheme(settings)).is_pre_ln:
        result.arm = f"({scheme})"
    result.problems += init_problems(settings, engine, name)
    result.parameters = engine.count(result.path, loaded)[0]
    problems, result.notes = engine.problems(settings, gpus)
    result.problems += problems
    machine = engine.machine(settings)
    if (memory := machine.memory(shape, gpus)) is not None:
        result.memory = f"{memory / 1e9:.0f} GB {machine.strategy}"
        if memory > GPUS[gpu].memory:
            by = machine.split_by
            split = f" with {by}, as the file has it (see its header for this GPU)," if by else ""
            result.problems.append(f"estimated {memory / 1e9:.0f} GB on a GPU{split} is more than {gpu} has")
    if given and (problem := machine.problem(shape, given, even=engine.even)):
        result.problems.append(problem)
    if shape.warmup >= shape.steps:
        result.problems.append(f"warm-up of {shape.warmup} steps in a run of {shape.steps}: it never ends")
    if budget is not None and shape.steps != (fewest := -(-int(budget) // shape.tokens_per_step)):
        result.problems.append(
            f"{shape.steps} steps of {shape.tokens_per_step:,} tokens: expected {fewest}, the fewest for {budget:.3g}"
        )


def _row(result: Checked) -> list[str]:
    verdict = "ok" if not result.problems else f"{len(result.problems)} problem{'s' * (len(result.problems) > 1)}"
    numbers = ["–"] * 4
    if (shape := result.shape) is not None:
        share = f"{shape.warmup / shape.steps:.1%}"
        numbers = [f"{result.parameters:,}", f"{shape.tokens:,}", f"{shape.steps:,}", share]
    return [str(result.path), result.kind, result.arm, *numbers, result.memory, verdict]


def main(argv: Sequence[str] | None = None) -> int:
    """``list``, ``copy NAME``, or ``check PATH``. :returns: 1 when a checked file has a problem."""
    parser = argparse.ArgumentParser(
        prog="olmo-lns config",
        description="List and copy the configs that come with the package, check those of anybody.",
    )
    commands = parser.add_subparsers(required=True, dest="command")
    commands.add_parser("list", help="the files of the pack")
    copying = commands.add_parser("copy", help="copy a file, or a folder such as 'study', to here")
    copying.add_argument("name")
    copying.add_argument("-o", "--out", type=Path, default=Path("."), help="folder or file name (default: here)")
    checking = commands.add_parser("check", help="load, count, estimate; exit code 1 when something is wrong")
    checking.add_argument("paths", nargs="+", type=Path, help="files, or folders searched recursively")
    checking.add_argument(
        "--gpus", type=at_least(1), help="GPUs of a run: they must divide the batch (default: 8, for the estimate)"
    )
    checking.add_argument("--gpu", choices=sorted(GPUS), default="H100")
    checking.add_argument("--budget", type=above_zero, help="tokens a run must reach in the fewest steps, such as 20e9")
    args = parser.parse_args(argv)
    if args.command == "check":
        return _check_all(args)
    if args.command == "list":
        for _, group in groupby(files.pack_names(), key=lambda name: Path(name).parent):
            print("\n".join(f"{name:<36} {files.about(name)}".rstrip() for name in group), end="\n\n")
        return 0
    print(files.pack_copy(args.name, args.out))
    return 0


def _check_all(args: argparse.Namespace) -> int:
    console = Console(stderr=True)
    paths: Iterable[Path] = find(args.paths)
    if console.is_terminal:  # elsewhere rich ends even a disabled bar with an empty line
        paths = track(paths, "checking", console=console, transient=True)
    results = [check(path, gpus=args.gpus, gpu=args.gpu, budget=args.budget) for path in paths]
    head = ["file", "kind", "arm", "parameters", "tokens", "steps", "warm-up"]
    rows = [[*head, f"1 of {args.gpus or GPUS_OF_A_NODE} GPUs (est.)", "check"], *map(_row, results)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip())
    for result in results:
        for text in result.problems:
            print(f"{result.path}: PROBLEM: {text}")
    for text in dict.fromkeys(text for result in results for text in result.notes):
        named = [result.path.name for result in results if text in result.notes]
        print(f"note ({named[0]}{f' and {len(named) - 1} more' if len(named) > 1 else ''}): {text}")
    bad = sum(bool(result.problems) for result in results)
    print(f"{len(results)} files, {bad} with problems")
    return int(bad > 0)
