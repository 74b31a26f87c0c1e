"""``olmo-lns config``: list and copy the pack; load configs as their frameworks do, and say what they are."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Iterable, Sequence

from rich.console import Console
from rich.progress import track

from olmo_lns.arguments import above_zero, at_least
from olmo_lns.errors import LNSConfigError
from olmo_lns.study import pack
from olmo_lns.study.arms import ARMS
from olmo_lns.study.engines import ENGINES, Engine
from olmo_lns.study.engines.shape import GPUS, Shape
from olmo_lns.study.files import read
from olmo_lns.study.plan.compare import arm_problems, compare_planned, init_problems
from olmo_lns.study.plan.cost import check_batches
from olmo_lns.study.plan.spec import Study

__all__ = ["Checked", "check", "find", "main"]

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
        if not path.exists() and (packed := pack.folder().parent / path).exists() and path.parts[0] == "configs":
            path = packed
        if not path.exists():
            path = pack.located(path, "")
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
            result.notes.append(f"a config of {result.kind}, which checks it itself: not looked at here")
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
    raw, known = read(path), {engine.file_key: name for name, engine in ENGINES.items()}
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
        for _, group in groupby(pack.names(), key=lambda name: Path(name).parent):
            print("\n".join(f"{name:<36} {pack.about(name)}".rstrip() for name in group), end="\n\n")
        return 0
    print(pack.copy(args.name, args.out))
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
