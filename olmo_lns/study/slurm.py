"""Write Slurm scripts for a study: one script per size, with an array task per run. A task resumes its run."""

from __future__ import annotations

import math
import re
import shlex
from pathlib import Path
from typing import Sequence

from olmo_lns.atomic import write_atomically
from olmo_lns.errors import LNSConfigError
from olmo_lns.study import bundled_configs
from olmo_lns.study.data.corpora import CORPUS_BUILDERS
from olmo_lns.study.describe import Run, Study
from olmo_lns.study.launch import JOB, check_launch, command, quote, variables_of_launch
from olmo_lns.study.planning import planned_hours

TEMPLATE = """#!/bin/bash
# {study}: size {size}, one array task per run. Submit with: sbatch {file}
# A task continues from its last checkpoint when it is submitted again: sbatch --dependency=singleton {file}
#SBATCH --job-name={study}-{size}
#SBATCH --array=0-{last}
{options}
{setup}set -euo pipefail
{exports}: "${{{data_variable}:?set it to your tokenized data, see docs/data.md}}"
OUT={out}
RUNS=({runs})
RUN=${{RUNS[$SLURM_ARRAY_TASK_ID]}}
HEAD=$(hostname)
case "$RUN" in
{cases}
esac
mkdir -p "$OUT/$RUN"
LAST=$(find "$OUT/$RUN" -maxdepth 1 | sed -n 's/.*attempt-0*\\([0-9]\\{{1,\\}}\\)\\.log$/\\1/p' | sort -n | tail -1)
ATTEMPT=$(printf %02d $((${{LAST:-0}} + 1)))
# srun of Slurm 22.05 and later does not inherit the cores of the job.
export SRUN_CPUS_PER_TASK=${{SLURM_CPUS_PER_TASK:-$SLURM_CPUS_ON_NODE}}
srun {container}"${{COMMAND[@]}}" >"$OUT/$RUN/attempt-$ATTEMPT.log" 2>&1
"""

#: CPU cores per GPU: the number of data workers in the config files.
CORES_PER_GPU = 8


def write(study: Study, runs: Sequence[Run], out: Path, folder: Path) -> list[Path]:
    """Write ``<folder>/<size>.sbatch`` for every size. Create ``out``, where Slurm writes the output of the tasks.

    ``launch.sbatch`` of the description adds, replaces or removes ``#SBATCH`` lines. The default ``time`` comes from
    the plan (:func:`planned_hours`). Options of the command ``sbatch`` take precedence. The variables of the
    config files (``OLMO_DATA_DIR`` or ``MEGATRON_DATA``) must be set at submission.

    :raises LNSConfigError: if the study trains on local text, which a launch writes on one machine.
    """
    if study.data in CORPUS_BUILDERS:
        raise LNSConfigError(
            f"{study.path} has data: {study.data}, a text that --run writes on one machine. A Slurm job needs a folder "
            "with data that all machines can read. Write its path into the key data, remove the key and set "
            f"{study.engine.data_variable}, or pass --run instead of --slurm."
        )
    check_launch(study)
    texts = {}
    for size in dict.fromkeys(run.size_and_rate for run in runs):
        path = folder / f"{size}.sbatch"
        texts[path] = _script(study, [run for run in runs if run.size_and_rate == size], out.resolve(), path)
    out.mkdir(parents=True, exist_ok=True)
    folder.mkdir(parents=True, exist_ok=True)
    for path, text in texts.items():
        write_atomically(path, text)
        path.chmod(0o755)
    return list(texts)


def _options(study: Study, runs: Sequence[Run], out: Path) -> str:
    nodes, nproc = study.layout(runs[0])
    hours = max(planned_hours(study, run) for run in runs)
    options: dict[str, str | None] = {
        "nodes": str(nodes),
        "ntasks-per-node": "1",
        "cpus-per-task": str(CORES_PER_GPU * nproc),
        "gpus-per-node": str(nproc),
        "exclusive": "true",
        "mem": "0",  # all memory of the node
        "time": f"{math.ceil(hours)}:00:00" if hours else None,
        "requeue": "true",
        "output": shlex.quote(f"{out}".replace("%", "%%") + "/slurm-%x-%A_%a.out"),
        "open-mode": "append",
        **study.launch.sbatch,
    }
    used = {key: value for key, value in options.items() if value not in (None, "false")}
    return "\n".join(f"#SBATCH --{key}" + ("" if value == "true" else f"={value}") for key, value in used.items())


def _container(study: Study, runs: Sequence[Run], out: Path) -> str:
    """Return the text between ``srun`` and the command: the image, and mounts for the folders of the runs."""
    if (container := study.launch.container) is None:
        return ""
    paths = [Path.cwd(), out, *(run.config.resolve().parent for run in runs)]
    if (script := Path(bundled_configs.script_path(study.launch.command))).is_file():
        paths.append(script.parent)
    if unusable := [path for path in map(str, paths) if re.search("[,:]", path)]:
        raise LNSConfigError(
            f"{unusable[0]} cannot be mounted in a container, because mounts are split at ',' and ':'. Use a path "
            "without these characters."
        )
    mounts = shlex.quote(",".join(dict.fromkeys([*map(str, paths), *container.mounts])))
    if study.engine.data_variable == "OLMO_DATA_DIR":  # MEGATRON_DATA is not a folder
        mounts = f'"$OLMO_DATA_DIR",{mounts}'
    image, folder = shlex.quote(container.image), shlex.quote(str(Path.cwd()))
    if container.image.endswith(".sif"):
        return f"apptainer exec --nv --bind {mounts} --pwd {folder} {image} "
    return f"--container-image={image} --container-mounts={mounts} --container-workdir={folder} "


def _script(study: Study, runs: Sequence[Run], out: Path, path: Path) -> str:
    exports = variables_of_launch(study, out)
    cases = []
    for run in runs:
        exports |= run.engine.variables(run)
        cases.append(f"{run.name}) COMMAND=({quote(command(study, run, out, python='python', job=JOB))}) ;;")
    return TEMPLATE.format(
        study=study.name,
        size=runs[0].size_and_rate,
        file=shlex.quote(str(path.resolve())),
        last=len(runs) - 1,
        options=_options(study, runs, out),
        setup="".join(f"{line}\n" for line in study.launch.setup),
        out=shlex.quote(str(out)),
        exports="".join(f"export {name}={shlex.quote(value)}\n" for name, value in exports.items()),
        data_variable=study.engine.data_variable,
        runs=" ".join(run.name for run in runs),
        container=_container(study, runs, out),
        cases="\n".join(cases),
    )
