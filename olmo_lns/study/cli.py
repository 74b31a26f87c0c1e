"""``olmo-lns study``: plan, launch, collect and report a comparison of arms. ``plan`` also checks config files."""

from __future__ import annotations

import argparse
import shlex
from typing import Sequence

from olmo_lns.arguments import Parser, as_path, at_least
from olmo_lns.errors import LNSConfigError
from olmo_lns.study import launch, planning, slurm
from olmo_lns.study.collect import COMPLETE, collect, read_results
from olmo_lns.study.describe import Study


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``olmo-lns study``.

    :returns: the exit code: 1 if a run failed or a plan has problems, else 0.
    :raises LNSError: for any other error.
    """
    args = _parser().parse_args(argv)
    code: int = args.run_command(args)
    return code


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="olmo-lns study", description="Compare arms over sizes, learning rates and seeds from one description."
    )
    commands = parser.add_subparsers(required=True, metavar="plan|launch|collect|report")

    def add(name: str, function: object, text: str) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=text, description=text)
        command.set_defaults(run_command=function)
        if name == "plan":
            command.add_argument("study", nargs="+", help="descriptions or config files, or names in the pack")
            return command
        command.add_argument("study", help="description: a file, or a name in the pack, such as paper")
        command.add_argument("--out", type=as_path, required=True, help="folder of the study; each run has a subfolder")
        return command

    plan = add("plan", _plan, "load, count, check and price a study or config files, without running anything")
    launching = add("launch", _launch, "print the commands, run them here, or write Slurm array scripts")
    mode = launching.add_mutually_exclusive_group()
    mode.add_argument("--run", action="store_true", help="start or resume the unfinished runs on this machine")
    mode.add_argument("--slurm", type=as_path, metavar="FOLDER", help="write Slurm array scripts to this folder")
    collecting = add("collect", _collect, "read the logs into <out>/results.csv; check that the arms are comparable")
    add("report", _report, "write <out>/report/: tables and figures")
    for command in (plan, launching):
        command.add_argument("--gpus", type=at_least(1), help="GPUs for each run (default: the description's)")
        command.add_argument("--nodes", type=at_least(1), help="nodes for each run (default: one per 8 GPUs)")
        gpu_help = "GPU of the estimates and of the time that Slurm scripts request (default: the description's, A100)"
        command.add_argument("--gpu", choices=sorted(planning.GPUS), help=gpu_help)
        command.add_argument("--only", nargs="+", metavar="RUN", help="beginnings of the names of runs: 7B-preln")
    collecting.add_argument("--allow-missing", action="store_true", help="report a run without a log as missing")
    return parser


def _plan(args: argparse.Namespace) -> int:
    problems = []
    for name in args.study:
        try:
            problems += planning.print_plan(name, args.only, gpus=args.gpus, nodes=args.nodes, gpu=args.gpu)
        except LNSConfigError as error:
            if len(args.study) == 1:
                raise
            problems.append(str(error))
    for problem in problems:
        print(f"PROBLEM: {problem}")
    return int(bool(problems))


def _launch(args: argparse.Namespace) -> int:
    study = Study.load(args.study).with_options(args.gpus, args.nodes, args.gpu)
    if args.run:
        study = study.with_variables(launch.variables_of_launch(study, args.out))
    runs = study.select_runs(args.only)
    planning.compare_arms(study.runs)
    if args.run:
        return min(1, launch.run_here(study, runs, args.out))
    if args.slurm:
        for path in slurm.write(study, runs, args.out, args.slurm):
            print(f"wrote {path}. To submit it: sbatch {shlex.quote(str(path))}")
        print(f"The requested times are for {study.gpu} GPUs. Pass --gpu for another type.")
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
    for path in reporting.write(study, results, args.out / "report"):
        print(f"wrote {path}")
    return 0
