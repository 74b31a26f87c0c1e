"""``olmo-lns config check``: load OLMo and Megatron configs as their frameworks do, and say what they are."""

from __future__ import annotations

import argparse
import atexit
import gc
import os
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Iterable, Sequence

import yaml

from olmo_lns.arguments import above_zero, at_least
from olmo_lns.errors import LNSConfigError
from olmo_lns.study.arms import ARMS
from olmo_lns.study.engines import ENGINES, Engine
from olmo_lns.study.engines.shape import GPUS, STRATEGIES, Shape
from olmo_lns.study.launch import children as processes
from olmo_lns.study.plan.compare import arm_problems, compare_planned, init_problems

__all__ = ["Checked", "check", "find", "main"]

STUDY = "study"
#: Fewer are checked in the time in which another process imports OLMo.
FILES_A_PROCESS = 20
#: libyaml's, ten times as fast, where PyYAML was built with it.
SAFE_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
#: Files of other commands, which check them themselves: the key that tells them -> whose they are.
ELSEWHERE = {"dataset_name": "TRL's own command", "augment": "olmo-lns vision train"}


@dataclass
class Checked:
    """One file. ``problems`` make the exit code 1, ``notes`` do not."""

    path: Path
    kind: str
    arm: str = "–"
    shape: Shape | None = None
    parameters: int = 0
    memory: float = 0.0
    strategy: str = ""
    split: str = ""
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def find(paths: Iterable[Path]) -> list[Path]:
    """The files themselves, and every ``*.yaml``/``*.yml`` under a folder, recursively.

    :raises LNSConfigError: a path that does not exist, or nothing found.
    """
    found: list[Path] = []
    for path in paths:
        if not path.exists():
            raise LNSConfigError(f"{path}: no such file or folder")
        found += sorted(p for p in path.rglob("*.y*ml") if p.is_file()) if path.is_dir() else [path]
    if not found:
        raise LNSConfigError("no *.yaml file found")
    return found


def check(path: Path, *, gpus: int, gpu: str, budget: float | None) -> Checked:
    """Check one file. Everything wrong with it is in ``problems``; nothing is raised for a bad file."""
    try:
        kind = _kind(path)
        result = Checked(path, kind)
        if kind in ELSEWHERE.values():
            result.notes.append(f"a config of {kind}, which checks it itself: not looked at here")
        elif kind == STUDY:
            _study(result)
        else:
            _config(result, ENGINES[kind], gpus)
    except LNSConfigError as error:
        message = str(error).removeprefix(f"{path}: ")
        return Checked(path, "?", problems=[message])
    if result.shape is not None:
        _budget(result, budget)
        if result.memory > GPUS[gpu].memory:
            result.problems.append(
                f"estimated {result.memory / 1e9:.0f} GB on a GPU{result.split} is more than {gpu} has"
            )
    return result


def _each(paths: Sequence[Path], **options: Any) -> list[Checked]:
    """:func:`check` of each; of many in several processes, which import OLMo at the same time."""
    workers = min(processes.cores(), len(paths) // FILES_A_PROCESS)
    if workers < 2:
        return [check(path, **options) for path in paths]
    with ProcessPoolExecutor(workers, get_context("spawn"), _short_lived) as pool:
        return list(pool.map(partial(check, **options), paths))


def _short_lived() -> None:
    """A process of the pool holds nothing but what it has read: no use to clear up while it works, or when it leaves.

    With torch and OLMo loaded each costs about a tenth of the command's time.
    """
    gc.disable()
    atexit.register(os._exit, 0)


def _kind(path: Path) -> str:
    try:
        raw = yaml.load(path.read_text(), SAFE_LOADER)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise LNSConfigError(f"not YAML: {' '.join(str(error).split())}") from error
    if isinstance(raw, dict):
        keys = {**ELSEWHERE, **{engine.file_key: name for name, engine in ENGINES.items()}, "arms": STUDY}
        for key, kind in keys.items():
            if key in raw:
                return kind
    known = ", ".join(f"{engine.title}'s config ({engine.file_key}:)" for engine in ENGINES.values())
    raise LNSConfigError(f"of no known kind: expected {known} or a study (arms:)")


def _arm(result: Checked, settings: dict[str, Any], engine: Engine) -> None:
    """The arm is the part of the file's name after the size; a file named otherwise has none to check."""
    _, _, name = result.path.stem.partition("-")
    if name in ARMS:
        result.arm = name
        result.problems += arm_problems(name, settings, engine)
    elif not (scheme := engine.scheme(settings)).is_pre_ln:
        result.arm = f"({scheme})"
    result.problems += init_problems(settings, engine, name)


def _config(result: Checked, engine: Engine, gpus: int) -> None:
    found = engine.config(result.path, gpus)
    shape = result.shape = found.shape
    _arm(result, found.settings, engine)
    result.parameters, result.strategy, copies = found.parameters, found.strategy, max(1, gpus // found.split)
    if found.strategy in STRATEGIES:
        memory = shape.memory(found.strategy, copies, found.micro_batch, recompute=found.recompute)["total"]
        result.memory = memory / found.split
    if found.split_by:
        result.split = f" with {found.split_by}, as the file has it (see its header for this GPU),"
    result.problems += found.problems
    result.notes += found.notes
    _batch(result, shape.batch, copies, found.micro_batch)


def _study(result: Checked) -> None:
    from olmo_lns.study.plan.spec import Study

    study = Study.load(result.path)
    compare_planned(study.runs)
    result.notes.append(f"{len(study.runs)} runs: {', '.join(study.sizes)} × {', '.join(study.arms)}")


def _batch(result: Checked, batch: int, gpus: int, micro: int) -> None:
    if batch % micro:
        result.problems.append(f"the batch of {batch} is not a multiple of the micro-batch of {micro}")
    elif batch % (gpus * micro):
        result.notes.append(
            f"{gpus} GPUs × micro-batch {micro} do not divide the batch of {batch}: use fewer or a smaller one"
        )


def _budget(result: Checked, budget: float | None) -> None:
    shape = result.shape
    assert shape is not None
    if shape.warmup >= shape.steps:
        result.problems.append(f"warm-up of {shape.warmup} steps in a run of {shape.steps}: it never ends")
    if budget is None:
        return
    fewest = -(-int(budget) // shape.tokens_per_step)
    if shape.steps != fewest:
        result.problems.append(
            f"{shape.steps} steps of {shape.tokens_per_step:,} tokens: expected {fewest}, the fewest for {budget:.3g}"
        )


def _row(result: Checked) -> list[str]:
    verdict = "ok" if not result.problems else f"{len(result.problems)} problem{'s' * (len(result.problems) > 1)}"
    if result.shape is None:
        return [str(result.path), result.kind, result.arm, "–", "–", "–", "–", "–", verdict]
    memory = f"{result.memory / 1e9:.0f} GB {result.strategy}" if result.memory else "–"
    shape = result.shape
    return [
        str(result.path),
        result.kind,
        result.arm,
        f"{result.parameters:,}",
        f"{shape.tokens:,}",
        f"{shape.steps:,}",
        f"{shape.warmup_share:.1%}",
        memory,
        verdict,
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """:returns: 1 when a file has a problem."""
    parser = argparse.ArgumentParser(prog="olmo-lns config", description="Check OLMo and Megatron training configs.")
    command = parser.add_subparsers(required=True, metavar="check").add_parser(
        "check", help="load, count, estimate; exit code 1 when something is wrong"
    )
    command.add_argument("paths", nargs="+", type=Path, help="files, or folders searched recursively")
    command.add_argument("--gpus", type=at_least(1), default=8, help="GPUs for the memory estimate (default 8)")
    command.add_argument("--gpu", choices=sorted(GPUS), default="H100")
    command.add_argument("--budget", type=above_zero, help="tokens a run must reach in the fewest steps, such as 20e9")
    args = parser.parse_args(argv)
    results = _each(find(args.paths), gpus=args.gpus, gpu=args.gpu, budget=args.budget)
    head = [
        "file",
        "kind",
        "arm",
        "parameters",
        "tokens",
        "steps",
        "warm-up",
        f"memory on 1 of {args.gpus} (est.)",
        "check",
    ]
    table = [head, *map(_row, results)]
    widths = [max(len(row[i]) for row in table) for i in range(len(head))]
    for row in table:
        print("  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip())
    for result in results:
        for text in result.problems:
            print(f"{result.path}: PROBLEM: {text}")
    for text in dict.fromkeys(text for result in results for text in result.notes):
        files = [result.path.name for result in results if text in result.notes]
        print(f"note ({files[0]}{f' and {len(files) - 1} more' if len(files) > 1 else ''}): {text}")
    bad = sum(bool(result.problems) for result in results)
    print(f"{len(results)} files, {bad} with problems")
    return int(bad > 0)
