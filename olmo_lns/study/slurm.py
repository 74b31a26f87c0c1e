"""Slurm array scripts for a study: one per size, an array over its arms and seeds, requeued runs resume."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Sequence

from olmo_lns.errors import LNSConfigError
from olmo_lns.study.launch import command, environment
from olmo_lns.study.spec import Run, Study

__all__ = ["write"]

TEMPLATE = """#!/bin/bash
# {study}: size {size}, one array task per run. Submit with: sbatch {file}
# A requeued or resubmitted task continues from its last checkpoint.
#SBATCH --job-name={study}-{size}
#SBATCH --array=0-{last}
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node={nproc}
#SBATCH --requeue
#SBATCH --output={out}/slurm-%x-%A_%a.out
{extra}set -euo pipefail
{checks}
OUT={out}
RUNS=({runs})
RUN=${{RUNS[$SLURM_ARRAY_TASK_ID]}}
HEAD=${{SLURMD_NODENAME:-$(hostname)}}
{python} -m olmo_lns study stamp {description} --out "$OUT" --only "$RUN"
ATTEMPT=$(printf %02d $(($(find "$OUT/$RUN" -maxdepth 1 -name 'attempt-*.log' | wc -l) + 1)))
case "$RUN" in
{cases}
esac
srun "${{COMMAND[@]}}" >"$OUT/$RUN/attempt-$ATTEMPT.log" 2>&1
"""


def write(study: Study, runs: Sequence[Run], out: Path, folder: Path, *, python: str = "python") -> list[Path]:
    """Write ``<folder>/<size>.sbatch`` for every size. ``launch.sbatch`` of the description adds ``#SBATCH`` lines.

    The variables of the config files (``OLMO_DATA_DIR``, or ``MEGATRON_DATA``) must be set where it is submitted.

    :raises LNSConfigError: the study's data are the demo's, which are built on one machine.
    """
    if study.data == "demo":
        raise LNSConfigError(f"{study.path}: data: demo is for one machine; name the folder of your data, or none")
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for size in dict.fromkeys(run.size for run in runs):
        path = folder / f"{size}.sbatch"
        mine = [run for run in runs if run.size == size]
        path.write_text(_script(study, size, mine, out.resolve(), path.resolve(), python))
        path.chmod(0o755)
        written.append(path)
    return written


def _script(study: Study, size: str, runs: Sequence[Run], out: Path, path: Path, python: str) -> str:
    needed = "OLMO_DATA_DIR" if study.framework == "olmo" else "MEGATRON_DATA"
    exports = environment(study, out)
    cases = []
    for run in runs:
        words = command(study, run, out, python=python, slurm=True)
        # $SLURM_JOB_ID and $HEAD are the shell's to expand; everything else is quoted.
        quoted = " ".join(f'"{word}"' if word.startswith("$") else shlex.quote(word) for word in words)
        cases.append(f"{run.name}) COMMAND=({quoted}) ;;")
    return TEMPLATE.format(
        study=study.name,
        size=size,
        file=shlex.quote(str(path)),
        last=len(runs) - 1,
        nodes=study.launch.nodes_of(size),
        nproc=study.launch.nproc,
        out=shlex.quote(str(out)),
        extra="".join(f"#SBATCH --{key}={value}\n" for key, value in study.launch.sbatch.items()),
        checks="".join(f"export {name}={shlex.quote(value)}\n" for name, value in exports.items())
        + f': "${{{needed}:?set it to your tokenised data, see docs/data.md}}"',
        runs=" ".join(run.name for run in runs),
        python=shlex.quote(python),
        description=shlex.quote(str(study.path.resolve())),
        cases="\n".join(cases),
    )
