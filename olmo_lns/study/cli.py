"""``olmo-lns study``: plan, launch, collect and report a comparison of arms."""

from __future__ import annotations

import argparse
import os
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any, Sequence

from olmo_lns.arguments import at_least
from olmo_lns.errors import LNSConfigError
from olmo_lns.study.arms import check_environment
from olmo_lns.study.collect.folder import stamp
from olmo_lns.study.collect.gather import Finished, collect, read_results, write_results
from olmo_lns.study.engines.base import GPUS
from olmo_lns.study.launch import slurm, start
from olmo_lns.study.plan import cost
from olmo_lns.study.plan.check import check_batches, compare_planned
from olmo_lns.study.plan.cost import GPU, UTILISATION
from olmo_lns.study.plan.spec import Run, Study


def main(argv: Sequence[str] | None = None) -> int:
    """:returns: 0, or 1 when a run failed. Errors of the study itself are LNSErrors."""
    args = _parser().parse_args(argv)
    code: int = args.run_command(Study.load(args.study), args)
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="olmo-lns study", description="Compare arms over sizes, rates and seeds, from one description."
    )
    commands = parser.add_subparsers(required=True, metavar="plan|launch|status|collect|report|all")

    def add(name: str, function: object, text: str, *, out: bool = True) -> argparse.ArgumentParser:
        listed: dict[str, Any] = {} if function is _stamp else {"help": text}  # a command without help is not listed
        command = commands.add_parser(name, description=text, **listed)
        command.add_argument("study", help="the description: a file, or one of the pack by its name, such as paper")
        if out:
            command.add_argument("--out", type=Path, required=True, help="folder of the study: one folder per run")
        command.set_defaults(run_command=function)
        return command

    plan = add("plan", _plan, "tokens, steps, GPU-hours, days, memory and disk, without running anything", out=False)
    plan.add_argument(
        "--mfu", type=float, default=UTILISATION, help="model FLOPs utilisation, 0…1 (default %(default)s)"
    )
    plan.add_argument("--gpus", type=at_least(1), help="GPUs of a run, instead of the description's")
    plan.add_argument("--only", nargs="+", metavar="RUN", help="these runs only")
    plan.add_argument("--csv", type=Path, help="also write one line per run to this file, FLOPs among them")
    launch = add("launch", _launch, "print the commands, run them here, or write Slurm array scripts")
    how = launch.add_mutually_exclusive_group()
    how.add_argument("--run", action="store_true", help="run here what is not finished (resumes after a kill)")
    how.add_argument("--slurm", type=Path, metavar="FOLDER", help="write Slurm array scripts to this folder")
    launch.add_argument("--workers", type=at_least(1), help="runs at a time, instead of the description's")
    launch.add_argument("--only", nargs="+", metavar="RUN", help="these runs only")
    job = launch.add_argument_group("lines of the Slurm scripts")
    job.add_argument("--activate", metavar="PATH", help="virtual environment, or file to source, at the job's start")
    job.add_argument("--modules", nargs="+", default=(), metavar="MODULE", help="for `module load`")
    for name in ("partition", "account"):
        job.add_argument(f"--{name}", help=f"#SBATCH --{name}")
    for group in (plan, job):
        group.add_argument(
            "--gpu", choices=sorted(GPUS), default=GPU, help="plan the times for this GPU (default A100)"
        )
        group.add_argument("--time", help="#SBATCH --time; a run that takes longer is named")
    status = add("status", _status, "what runs, what failed and why, and the time left")
    status.add_argument("--only", nargs="+", metavar="RUN")
    stamping = add("stamp", _stamp, "record what a run is started with (the Slurm scripts call it)")
    stamping.add_argument("--only", nargs="+", metavar="RUN")
    collecting = add("collect", _collect, "read the logs into <out>/results.csv and check that the arms are comparable")
    report = add("report", _report, "write <out>/report/: tables and figures")
    everything = add("all", _all, "launch here, collect and report")
    everything.add_argument("--workers", type=at_least(1))
    for command in (collecting, everything):
        command.add_argument("--allow-missing", action="store_true", help="report missing runs instead of refusing")
    for command in (report, everything):
        command.add_argument("--report", type=Path, help="folder of the report (default <out>/report)")
    return parser


def _selected(study: Study, only: Sequence[str] | None) -> list[Run]:
    if not only:
        return list(study.runs)
    names = {run.name: run for run in study.runs}
    if unknown := [name for name in only if name not in names]:
        raise LNSConfigError(f"{unknown[0]!r} is no run of study {study.name}; its runs: {', '.join(names)}")
    return [names[name] for name in only]


def _plan(study: Study, args: argparse.Namespace) -> int:
    if not 0 < args.mfu <= 1:
        raise LNSConfigError(f"--mfu {args.mfu}: expected a share in (0, 1], such as 0.4")
    study = replace(study, runs=tuple(_selected(study, args.only)))
    rows = cost.rows(study, args.mfu, gpu=args.gpu, gpus=args.gpus)
    print(cost.table(rows, args.mfu, args.gpu))
    for run in {run.size: run for run in study.runs}.values():
        hours = cost.planned_hours(study, run, args.gpu, args.mfu, args.gpus)
        time = args.time or study.launch.sbatch.get("time")
        if time and (note := cost.time_note(run.size, hours, time, args.gpu)):
            print(note)
    words = ["olmo-lns", "study", "launch", args.study, "--out", "RUNS", *(["--only", *args.only] if args.only else [])]
    print(f"\n{cost.around(study, shlex.join(words))}")
    if args.csv:
        cost.write_csv(rows, args.csv)
        print(f"\nwrote {args.csv}")
    return 0


def _launch(study: Study, args: argparse.Namespace) -> int:
    check_environment()
    Finished(study)  # a table that cannot be read is an error before anything is made
    runs = _selected(study, args.only)
    if args.run:
        start.check(study, runs, args.out)
        os.environ.update(start.environment(study, args.out))  # before the configs that read it are resolved
    compare_planned(study.runs)
    check_batches(study, runs)
    if args.run:
        return min(1, start.run_here(study, runs, args.out, workers=args.workers))
    if args.slurm:
        job = slurm.Job(args.activate, tuple(args.modules), args.partition, args.account, args.time, args.gpu)
        for path in slurm.write(study, runs, args.out, args.slurm, job=job):
            print(f"wrote {path}; submit with: sbatch {path}")
        return 0
    lines = [f"export {name}={shlex.quote(value)}" for name, value in start.environment(study, args.out).items()]
    for run in runs:
        own = [f"{name}={value}" for name, value in run.engine.variables(run).items()]
        lines.append(shlex.join([*own, *start.command(study, run, args.out, python="python")]))
    print("\n".join(lines))  # only when every command could be written
    return 0


def _status(study: Study, args: argparse.Namespace) -> int:
    runs, held = _selected(study, args.only), start.locked(args.out)
    found = [start.examine(run, args.out, held=held) for run in runs]
    elsewhere = set()
    if study.finished:
        os.environ.update(start.environment(study, args.out))  # the table identifies a run by its data
        try:
            table = Finished(study)
            elsewhere = {
                r.name for r, s in zip(runs, found, strict=True) if s.state == "not started" and table.result(r)
            }
        except LNSConfigError as error:
            print(f"{study.finished} cannot be compared with these runs: {error}")
    found = [
        replace(s, state="finished", step=s.steps, reason=f"in {study.finished}") if s.run in elsewhere else s
        for s in found
    ]
    print("\n".join(map(str, found)))
    states = [status.state for status in found]
    print(", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states)))
    if not args.out.is_dir():
        print(f"{args.out} does not exist: nothing was started there")
    return int("failed" in states)


def _stamp(study: Study, args: argparse.Namespace) -> int:
    check_environment()
    for run in _selected(study, args.only):
        print(stamp(study, run, args.out))
    return 0


def _collect(study: Study, args: argparse.Namespace) -> int:
    if table := Finished(study):
        os.environ.update(start.environment(study, args.out))  # the table identifies a run by its data
    results = collect(study, args.out, allow_missing=args.allow_missing)
    path = args.out / "results.csv"
    args.out.mkdir(parents=True, exist_ok=True)
    write_results(results, path)
    if table:
        print(f"wrote {table.add(study, results)}")
    for result in results:
        loss = f"{result.loss:.4f}" if result.loss is not None else result.status
        print(f"{result.run:<32} {result.step:>8,}/{result.steps:,}  {loss}")
    print(f"wrote {path}")
    return 0


def _report(study: Study, args: argparse.Namespace) -> int:
    from olmo_lns.study.report import scaling

    for path in scaling.write(study, read_results(args.out / "results.csv"), args.report or args.out / "report"):
        print(f"wrote {path}")
    return 0


def _all(study: Study, args: argparse.Namespace) -> int:
    args.run, args.slurm, args.only = True, None, None
    failed = _launch(study, args)
    return max(failed, _collect(study, args), _report(study, args))
