"""``olmo-lns study``: plan, launch, collect and report a scaling study."""

from __future__ import annotations

import argparse
import os
import shlex
from pathlib import Path
from typing import Sequence

from olmo_lns.errors import LNSConfigError
from olmo_lns.study.spec import Run, Study

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """:returns: 0, or 1 when a run failed. Errors of the study itself are LNSErrors."""
    args = _parser().parse_args(argv)
    code: int = args.run_command(Study.load(args.study), args)
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="olmo-lns study", description="A scaling study from one description.")
    commands = parser.add_subparsers(required=True, metavar="plan|launch|stamp|collect|report|all")

    def add(name: str, function: object, text: str, *, out: bool = True) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument("study", type=Path, help="the description, such as configs/study/paper.yaml")
        if out:
            command.add_argument("--out", type=Path, required=True, help="folder of the study: one folder per run")
        command.set_defaults(run_command=function)
        return command

    plan = add("plan", _plan, "tokens, steps, FLOPs, GPU-hours and disk, without running anything", out=False)
    plan.add_argument("--mfu", type=float, default=0.4, help="model FLOPs utilisation assumed, 0…1 (default 0.4)")
    plan.add_argument("--csv", type=Path, help="also write one line per run to this file")
    launch = add("launch", _launch, "print the commands, run them here, or write Slurm array scripts")
    how = launch.add_mutually_exclusive_group()
    how.add_argument("--run", action="store_true", help="run here what is not finished (resumes after a kill)")
    how.add_argument("--slurm", type=Path, metavar="FOLDER", help="write Slurm array scripts to this folder")
    launch.add_argument("--workers", type=int, help="runs at a time, instead of the description's")
    launch.add_argument("--only", nargs="+", metavar="RUN", help="these runs only")
    stamp = add("stamp", _stamp, "record what a run is started with (the Slurm scripts call it)")
    stamp.add_argument("--only", nargs="+", metavar="RUN")
    collect = add("collect", _collect, "read the logs into <out>/results.csv and check that the arms are comparable")
    report = add("report", _report, "write <out>/report/: tables, power law and figure")
    everything = add("all", _all, "launch here, collect and report")
    everything.add_argument("--workers", type=int)
    for command in (collect, everything):
        command.add_argument("--wandb-export", type=Path, help="a W&B chart export with one column per run")
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
    from olmo_lns.study import plan

    if not 0 < args.mfu <= 1:
        raise LNSConfigError(f"--mfu {args.mfu}: expected a share in (0, 1], such as 0.4")
    rows = plan.rows(study, args.mfu)
    print(plan.table(rows, args.mfu))
    if args.csv:
        plan.write_csv(rows, args.csv)
        print(f"\nwrote {args.csv}")
    return 0


def _launch(study: Study, args: argparse.Namespace) -> int:
    from olmo_lns.study import collect, launch, slurm

    runs = _selected(study, args.only)
    if args.run:
        os.environ.update(launch.environment(study, args.out))  # before the configs that read it are resolved
    collect.compare_planned(study)
    if args.run:
        return min(1, launch.run_here(study, runs, args.out, workers=args.workers))
    if args.slurm:
        for path in slurm.write(study, runs, args.out, args.slurm):
            print(f"wrote {path}; submit with: sbatch {path}")
        return 0
    for name, value in launch.environment(study, args.out).items():
        print(f"export {name}={shlex.quote(value)}")
    for run in runs:
        print(shlex.join(launch.command(study, run, args.out, python="python")))
    return 0


def _stamp(study: Study, args: argparse.Namespace) -> int:
    from olmo_lns.study import launch

    for run in _selected(study, args.only):
        print(launch.stamp(study, run, args.out))
    return 0


def _collect(study: Study, args: argparse.Namespace) -> int:
    from olmo_lns.study import collect

    results = collect.collect(study, args.out, wandb_export=args.wandb_export, allow_missing=args.allow_missing)
    path = args.out / "results.csv"
    args.out.mkdir(parents=True, exist_ok=True)
    collect.write_results(results, path)
    for result in results:
        loss = f"{result.loss:.4f}" if result.loss is not None else result.status
        print(f"{result.run:<32} {result.step:>8,}/{result.steps:,}  {loss}")
    print(f"wrote {path}")
    return 0


def _report(study: Study, args: argparse.Namespace) -> int:
    from olmo_lns.study import collect, report

    results = collect.read_results(args.out / "results.csv")
    for path in report.write(study, results, args.report or args.out / "report"):
        print(f"wrote {path}")
    return 0


def _all(study: Study, args: argparse.Namespace) -> int:
    args.run, args.slurm, args.only = True, None, None
    failed = _launch(study, args)
    return max(failed, _collect(study, args), _report(study, args))
