"""``olmo-lns study``: plan, launch, collect and report a comparison of arms; plan checks any config."""

from __future__ import annotations

import argparse
import os
from dataclasses import replace
from pathlib import Path
from typing import Any, Callable, Sequence

from olmo_lns.errors import LNSConfigError
from olmo_lns.study import files, launch, planning, slurm
from olmo_lns.study.collect import COMPLETE, collect, read_results
from olmo_lns.study.describe import Study
from olmo_lns.study.engines.base import GPUS


def _above(low: float, kind: type) -> Callable[[str], Any]:
    def number(text: str) -> Any:
        try:
            if low < (value := kind(text)) < float("inf"):
                return value
        except ValueError:
            pass
        raise argparse.ArgumentTypeError(f"expected {'a whole' if kind is int else 'a'} number above {low}")

    return number


def main(argv: Sequence[str] | None = None) -> int:
    """:returns: 0, or 1 when a run failed or the plan has a problem. Errors of the study itself are LNSErrors."""
    files.degrade_output()
    args = _parser().parse_args(argv)
    code: int = args.run_command(args)
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="olmo-lns study", description="Compare arms over sizes, rates and seeds, from one description."
    )
    commands = parser.add_subparsers(required=True, metavar="plan|launch|collect|report|all")

    def add(name: str, function: object, text: str) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=text, description=text)
        command.set_defaults(run_command=function)
        if name == "plan":
            command.add_argument(
                "study", nargs="+", help="descriptions, config files or folders; names of the pack too"
            )
            return command
        command.add_argument("study", help="the description: a file, or one of the pack by its name, such as paper")
        command.add_argument("--out", type=Path, required=True, help="folder of the study: one folder per run")
        return command

    plan = add("plan", _plan, "load, count, check and price a study or config files, without running anything")
    plan.add_argument("--mfu", type=float, default=planning.UTILISATION, help="model FLOPs utilisation (default 0.4)")
    plan.add_argument("--budget", type=_above(0, float), help="tokens that a run must reach in the fewest steps")
    plan.add_argument("--csv", type=Path, help="also write one line per run to this file, FLOPs among them")
    starting = add("launch", _launch, "print the commands, run them here, or write Slurm array scripts")
    how = starting.add_mutually_exclusive_group()
    how.add_argument("--run", action="store_true", help="run here what is not done (resumes after a kill)")
    how.add_argument("--slurm", type=Path, metavar="FOLDER", help="write Slurm array scripts to this folder")
    collecting = add("collect", _collect, "read the logs into <out>/results.csv; check that the arms are comparable")
    report = add("report", _report, "write <out>/report/: tables and figures")
    everything = add("all", _all, "launch here, collect and report")
    for command in (plan, starting):
        command.add_argument("--gpus", type=_above(0, int), help="GPUs of a run, instead of the description's")
        command.add_argument("--nodes", type=_above(0, int), help="nodes of a run (default: one for each 8 GPUs)")
        command.add_argument(
            "--gpu", choices=sorted(GPUS), default=planning.GPU, help="plan for this GPU (default A100)"
        )
        command.add_argument("--only", nargs="+", metavar="RUN", help="runs by the beginning of their names: 7B-preln")
    for command in (starting, everything):
        command.add_argument("--workers", type=_above(0, int), help="runs at a time, instead of the description's")
    for command in (collecting, everything):
        command.add_argument("--allow-missing", action="store_true", help="report missing runs instead of refusing")
    for command in (report, everything):
        command.add_argument("--report", type=Path, help="folder of the report (default <out>/report)")
    return parser


def _plan(args: argparse.Namespace) -> int:
    if not 0 < args.mfu <= 1:
        raise LNSConfigError(f"--mfu {args.mfu}: expected a share in (0, 1], such as 0.4")
    studies, bad, notes = planning.targets(args.study)
    problems = len(bad)
    for study in studies:
        name = study.path.stem if study.path.is_relative_to(files.pack_folder()) else str(study.path)
        words = ["olmo-lns", "study", "launch", name, "--out", "RUNS"]
        words += [*(["--only", *args.only] if args.only else [])]
        for key in ("gpus", "nodes"):
            words += [f"--{key}", str(value)] if (value := getattr(args, key)) else []
        study = replace(study, gpus=args.gpus, nodes=args.nodes)
        problems += planning.show(
            study, only=args.only, mfu=args.mfu, gpu=args.gpu, budget=args.budget, csv_file=args.csv, command=words
        )  # fmt: skip
    print("".join([*(f"note: {text}\n" for text in notes), *(f"PROBLEM: {text}\n" for text in bad)]), end="")
    return int(problems > 0)


def _launch(args: argparse.Namespace) -> int:
    study = replace(Study.load(args.study), gpus=args.gpus, nodes=args.nodes)
    runs = study.selected(args.only)
    if args.run:
        os.environ.update(launch.environment(study, args.out))  # before the configs that read it are loaded
        launch.check(study, runs, args.out)
    planning.compare_planned(study.runs)
    if args.run:
        return min(1, launch.run_here(study, runs, args.out, workers=args.workers))
    if args.slurm:
        for path in slurm.write(study, runs, args.out, args.slurm, args.gpu):
            print(f"wrote {path}; submit with: sbatch {path}")
        return 0
    launch.print_commands(study, runs, args.out)
    return 0


def _collect(args: argparse.Namespace) -> int:
    study = Study.load(args.study)
    for row in collect(study, args.out, allow_missing=args.allow_missing).itertuples():
        loss = f"{row.loss:.4f}" if row.status == COMPLETE else row.status
        print(f"{row.run:<32} {row.step:>8,}/{row.steps:,}  {loss}")
    print(f"wrote {args.out / 'results.csv'}")
    return 0


def _report(args: argparse.Namespace) -> int:
    from olmo_lns.study import reporting

    study, results = Study.load(args.study), read_results(args.out / "results.csv")
    for path in reporting.write(study, results, args.report or args.out / "report"):
        print(f"wrote {path}")
    return 0


def _all(args: argparse.Namespace) -> int:
    nothing = dict.fromkeys(("slurm", "only", "gpus", "nodes", "gpu"))
    failed = _launch(argparse.Namespace(**{**vars(args), **nothing, "run": True}))
    return max(failed, _collect(args), _report(args))
