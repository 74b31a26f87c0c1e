"""Start the runs of a study on this machine, or print their commands. :mod:`olmo_lns.study.slurm` writes array scripts.

The framework trains and resumes. A run with a complete log is skipped.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Sequence

from olmo_lns.arms import check_environment
from olmo_lns.errors import LNSConfigError
from olmo_lns.study import bundled_configs, yaml_files
from olmo_lns.study.collect import difference_from_saved
from olmo_lns.study.data.corpora import CORPUS_BUILDERS
from olmo_lns.study.describe import Run, Study
from olmo_lns.study.locking import exclusive_lock
from olmo_lns.study.logs import next_log, read_curve

DATA_HELP = "docs/data.md has the commands that make the training data and the held-out text."
#: Number of lines shown from the log of a failed run.
TAIL = 12
#: Commands that run as one process without torchrun's environment variables. Megatron's and OLMo's scripts need these.
STANDALONE = ("train", "configs/olmo_core/train.py")
#: Arguments that the shell expands.
JOB, ENDPOINT = "$SLURM_JOB_ID", "$HEAD:29500"


def command(study: Study, run: Run, out: Path, *, python: str = sys.executable, job: str = "") -> list[str]:
    """Return the command line that starts a run or resumes the run from its last checkpoint.

    :param job: rendezvous id, the same on all nodes of a run. The default has the names of the study and the run.
    :raises LNSConfigError: if the GPUs of the run cannot share its batch evenly.
    """
    nodes, nproc = study.layout(run)
    if problem := run.workload.batch_problem(nodes * nproc):
        raise LNSConfigError(f"Run {run.name} cannot start. {problem}")
    arguments = run.engine.arguments(run, (out / run.name).resolve())
    program = ["-m", "olmo_lns", bundled_configs.script_path(study.launch.command), *arguments, *study.launch.args]
    if nproc == nodes == 1 and study.launch.command in STANDALONE:
        return [python, *program]
    torchrun = [python, "-m", "torch.distributed.run", "--nproc-per-node", str(nproc)]
    if nodes == 1:
        return [*torchrun, "--standalone", *program]
    torchrun += ["--nnodes", str(nodes), "--rdzv-backend", "c10d", "--rdzv-id", job or f"{study.name}-{run.name}"]
    return [*torchrun, "--rdzv-endpoint", ENDPOINT, *program]


def quote(argv: Sequence[str]) -> str:
    """Quote a command for a shell, which still expands :data:`JOB` and :data:`ENDPOINT`."""
    return " ".join(f'"{item}"' if item in (JOB, ENDPOINT) else shlex.quote(item) for item in argv)


def variables_of_launch(study: Study, out: Path) -> dict[str, str]:
    """Return the environment variables that a launch sets for its config files and processes."""
    variables = {study.engine.save_variable: str(out.resolve())}
    if study.launch.threads:
        variables["OMP_NUM_THREADS"] = str(study.launch.threads)
    if study.data:
        data = out / "data" if study.data in CORPUS_BUILDERS else study.path.parent / study.data
        variables[study.engine.data_variable] = str(data.resolve())
    return variables


def print_commands(study: Study, runs: Sequence[Run], out: Path) -> None:
    """Print one command for each run. A run over several nodes needs the command on each node.

    If the study trains on local text, the text is written now, so that the commands find it.
    """
    check_environment()
    lines = [f"export {name}={shlex.quote(value)}" for name, value in variables_of_launch(study, out).items()]
    for run in runs:
        if (nodes := study.layout(run)[0]) > 1:
            lines.append(f"# on each of {nodes} nodes, with HEAD set to the host name of one of them:")
        variables = [f"{name}={value}" for name, value in run.engine.variables(run).items()]
        lines.append(" ".join([*variables, quote(command(study, run, out, python="python"))]))
    if study.data in CORPUS_BUILDERS:
        lines.insert(0, f"# data: {CORPUS_BUILDERS[study.data](out / 'data')}")
    print("\n".join(lines))  # only now: command() may raise


def check_launch(study: Study) -> None:
    """Check the environment and the training script of a study.

    :raises LNSConfigError: if an environment variable would change the arms, or the script is missing.
    """
    check_environment()
    script = study.launch.command
    if script != "train" and not os.path.isfile(bundled_configs.script_path(script)):
        raise LNSConfigError(
            f"{study.path}: the training script {script!r} (launch.command) is not in this folder. Run the command in "
            "a checkout of the framework, or write the path of the script into the description."
        )


def run_here(study: Study, runs: Sequence[Run], out: Path) -> int:
    """Run the unfinished runs one after the other. The same call resumes a killed study.

    SIGINT and SIGTERM also end the current run. If the launcher is killed and a run survives, the study stays locked.
    If a run fails, the end of its log is printed.

    :returns: the number of failed runs.
    :raises LNSConfigError: if a run cannot start. The error is raised before the first run starts.
    """

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    check_launch(study)
    variables = {**os.environ, **variables_of_launch(study, out)}
    for run in runs:
        command(study, run, out)
        if (nodes := study.layout(run)[0]) > 1:
            raise LNSConfigError(
                f"Run {run.name} needs {nodes} nodes, but --run uses this machine only. Omit --run to print the "
                "commands, write Slurm scripts with --slurm FOLDER, or pass --nodes 1."
            )
        if missing := [name for name in yaml_files.required_variables(run.config) if not variables.get(name)]:
            problem = f"{run.config} reads the environment variable {missing[0]}, which is not set."
            raise LNSConfigError(f"Run {run.name} cannot start. {problem} Export {missing[0]}. {DATA_HELP}")
        if study.data not in CORPUS_BUILDERS and (problem := run.engine.missing_data(run.settings)):
            raise LNSConfigError(f"Run {run.name} cannot start. Its config is {run.config}. {problem} {DATA_HELP}")
    out.mkdir(parents=True, exist_ok=True)
    problem = f"Another launch of this study is running in {out}. Wait until it ends, or pass another --out."
    with exclusive_lock(out / ".lock", problem) as lock:
        if study.data in CORPUS_BUILDERS:
            CORPUS_BUILDERS[study.data](out / "data")
        unfinished = _unfinished_runs(runs, out)
        previous_handler = signal.signal(signal.SIGTERM, interrupt)
        try:
            return sum(_run_fails(study, run, out, lock) for run in unfinished)
        finally:
            signal.signal(signal.SIGTERM, previous_handler)


def _unfinished_runs(runs: Sequence[Run], out: Path) -> list[Run]:
    """Return the unfinished runs.

    :raises LNSConfigError: if a folder has a run with other settings.
    """
    unfinished = []
    for run in runs:
        if problem := difference_from_saved(run, out / run.name):
            raise LNSConfigError(f"{problem} Pass another --out, or remove the folder to start the run again.")
        curve = read_curve(out / run.name)
        if curve is not None and curve.is_done:
            print(f"{run.name}: done", flush=True)
        else:
            unfinished.append(run)
    return unfinished


def start(study: Study, run: Run, out: Path, lock: int) -> tuple[Path, subprocess.Popen[bytes]]:
    """Start a run, or resume it from its last checkpoint. Return its log file and its process.

    :param lock: file descriptor of the study's lock. The run inherits it, so the study is locked until the run ends.
    """
    folder = out / run.name
    folder.mkdir(parents=True, exist_ok=True)
    log = next_log(folder)
    env = {**os.environ, **variables_of_launch(study, out), **run.engine.variables(run)}
    with log.open("xb") as file:
        return log, subprocess.Popen(
            command(study, run, out), stdout=file, stderr=subprocess.STDOUT, env=env, start_new_session=True,
            stdin=subprocess.DEVNULL, pass_fds=(lock,),
        )  # fmt: skip


def _run_fails(study: Study, run: Run, out: Path, lock: int) -> bool:
    """Start a run, wait for its end, and return true if the run failed."""
    log, process = start(study, run, out, lock)
    print(f"{run.name}: {log}", flush=True)
    try:
        code = process.wait()
    except BaseException:
        with suppress(ProcessLookupError):  # if the run has just ended
            os.killpg(process.pid, signal.SIGTERM)
        process.wait()
        raise
    print(f"{run.name}: exit {code}", flush=True)
    if code:
        text = log.read_text(encoding="utf-8", errors="replace")
        # The rest of torchrun's report would hide the error of the run.
        report = re.search(r"^.*/distributed/elastic/.*failed \(exitcode.*$", text, re.MULTILINE)
        last_lines = text[: report.end() if report else None].splitlines()[-TAIL:]
        print(
            "\n  ".join([f"Run {run.name} failed. The last lines of {log} are:", *last_lines]),
            file=sys.stderr,
            flush=True,
        )
    return code != 0
