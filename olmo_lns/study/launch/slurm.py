"""Slurm array scripts for a study: one per size, an array over its arms and seeds, requeued runs resume.

Five minutes before its time ends a job asks to be queued again, if it has written a checkpoint.
"""

from __future__ import annotations

import math
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Sequence

from olmo_lns.errors import LNSConfigError
from olmo_lns.study.data.corpora import BUILT
from olmo_lns.study.launch.start import ENDPOINT, JOB, check, command, environment, make_folder
from olmo_lns.study.plan.cost import GPU, planned_hours, time_note
from olmo_lns.study.plan.spec import Run, Study

TEMPLATE = """#!/bin/bash
# {study}: size {size}, one array task per run. Submit with: sbatch {file}
# A task continues from its last checkpoint when it is submitted again, or queued again: by Slurm after a failure of the
# machine, by itself before its time ends.
#SBATCH --job-name={study}-{size}
#SBATCH --array=0-{last}
{options}
{setup}set -euo pipefail
{checks}
OUT={out}
RUNS=({runs})
RUN=${{RUNS[$SLURM_ARRAY_TASK_ID]}}
HEAD=$(hostname)
again() {{  # Slurm's signal, before the time ends
    if find "$OUT/$RUN"/*/ -maxdepth 0 -newermt "-$SECONDS seconds" | grep -Eq '/(step|iter_)'; then
        scontrol requeue "${{SLURM_ARRAY_JOB_ID}}_$SLURM_ARRAY_TASK_ID" || :
    else
        echo "$RUN: no checkpoint in this job's $SECONDS s: not queued again; give it more time" >&2
    fi
}}
trap again USR1
{python} -m olmo_lns study stamp {description} --out "$OUT" --only "$RUN"
ATTEMPT=$(printf %02d $(($(find "$OUT/$RUN" -maxdepth 1 -name 'attempt-*.log' | wc -l) + 1)))
case "$RUN" in
{cases}
esac
# srun does not inherit the cores of the job by itself from Slurm 22.05 on.
export SRUN_CPUS_PER_TASK=${{SLURM_CPUS_PER_TASK:-$SLURM_CPUS_ON_NODE}}
srun "${{COMMAND[@]}}" >"$OUT/$RUN/attempt-$ATTEMPT.log" 2>&1 &
STEP=$!
while CODE=0; wait $STEP || CODE=$?; kill -0 $STEP 2>/dev/null; do :; done
exit $CODE
"""

#: Cores of a job for each GPU: as many as the config files have data workers.
CORES = 8


@dataclass(frozen=True)
class Job:
    """The settings of a Slurm job, and the environment that it begins in.

    :param activate: a virtual environment's folder, or a file to source. :param modules: for ``module load``.
    :param gpu: a job's time is planned for it.
    """

    activate: str | None = None
    modules: tuple[str, ...] = ()
    partition: str | None = None
    account: str | None = None
    time: str | None = None
    gpu: str = GPU

    def lines(self) -> str:
        """Shell lines before anything runs; before ``set -u``, under which many such files fail."""
        text = f"module load {shlex.join(self.modules)} || exit 1\n" if self.modules else ""
        if self.activate is None:
            return text
        path = Path(self.activate).expanduser().resolve()
        if not (file := path / "bin" / "activate" if path.is_dir() else path).is_file():
            raise LNSConfigError(f"--activate {self.activate}: {file} does not exist: name an environment or a file")
        return f"{text}source {shlex.quote(str(file))} || exit 1\n"


def write(
    study: Study, runs: Sequence[Run], out: Path, folder: Path, *, python: str = "python", job: Job | None = None
) -> list[Path]:
    """Write ``<folder>/<size>.sbatch`` for every size, and make ``out``, where Slurm writes the tasks' output.

    ``launch.sbatch`` of the description adds ``#SBATCH`` lines or replaces one of ours; null leaves it out. ``time`` is
    the plan's (:func:`planned_hours`) unless it is given; a shorter one is named.

    The variables of the config files (``OLMO_DATA_DIR``, or ``MEGATRON_DATA``) must be set where it is submitted.

    :raises LNSConfigError: the study's data are built on one machine.
    """
    if study.data in BUILT:
        raise LNSConfigError(f"{study.path}: data: {study.data} is for one machine; name your data's folder, or none")
    check(study, runs, out, slurm=True)
    make_folder(out)
    make_folder(folder)
    written = []
    for size in dict.fromkeys(run.size for run in runs):
        path = folder / f"{size}.sbatch"
        mine = [run for run in runs if run.size == size]
        path.write_text(_script(study, size, mine, out.resolve(), path.resolve(), python, job or Job()))
        path.chmod(0o755)
        written.append(path)
    return written


def _options(study: Study, size: str, hours: float, out: Path, job: Job) -> str:
    options: dict[str, Any] = {
        "nodes": study.launch.nodes_of(size),
        "ntasks-per-node": 1,
        "cpus-per-task": CORES * study.launch.nproc,
        "gpus-per-node": study.launch.nproc,
        "exclusive": True,
        "mem": 0,  # all of the node's
        "time": f"{math.ceil(hours)}:00:00",
        "requeue": True,
        "signal": "B:USR1@300",
        "output": shlex.quote(f"{out}/slurm-%x-%A_%a.out"),
        "open-mode": "append",
        **study.launch.sbatch,
    }
    options |= {key: value for key in ("partition", "account", "time") if (value := getattr(job, key)) is not None}
    if note := time_note(size, hours, options["time"], job.gpu):
        print(note)
    kept = {key: value for key, value in options.items() if value is not None and value is not False}
    return "\n".join(f"#SBATCH --{key}" + ("" if value is True else f"={value}") for key, value in kept.items())


def _script(study: Study, size: str, runs: Sequence[Run], out: Path, path: Path, python: str, job: Job) -> str:
    needed = study.engine.data_variable
    exports = environment(study, out)
    for run in runs:
        exports |= run.engine.variables(run)
    cases = []
    for run in runs:
        words = command(study, run, out, python=python, slurm=True)
        # Two words of ours are the shell's to expand; everything else is quoted.
        quoted = " ".join(f'"{word}"' if word in (JOB, ENDPOINT) else shlex.quote(word) for word in words)
        cases.append(f"{run.name}) COMMAND=({quoted}) ;;")
    hours = max(planned_hours(study, run, job.gpu) for run in runs)
    options = _options(study, size, hours, out, job)
    if len(options.splitlines()) != options.count("#SBATCH --") or len(study.name.splitlines()) > 1:
        raise LNSConfigError(f"{study.path}: name and launch.sbatch: expected no line breaks in them")
    return TEMPLATE.format(
        study=study.name,
        size=size,
        file=shlex.quote(str(path)),
        last=len(runs) - 1,
        options=options,
        setup=job.lines(),
        out=shlex.quote(str(out)),
        checks="".join(f"export {name}={shlex.quote(value)}\n" for name, value in exports.items())
        + f': "${{{needed}:?set it to your tokenised data, see docs/data.md}}"',
        runs=" ".join(run.name for run in runs),
        python=shlex.quote(python),
        description=shlex.quote(str(study.path.resolve())),
        cases="\n".join(cases),
    )
