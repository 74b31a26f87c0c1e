"""Read the logs and saved settings of runs, and write the table of their results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd

from olmo_lns.atomic import write_atomically
from olmo_lns.errors import LNSConfigError, one_line
from olmo_lns.study.describe import Run, Study
from olmo_lns.study.logs import Curve, read_curve
from olmo_lns.study.planning import arm_problems, compare_arms

COMPLETE, INCOMPLETE, MISSING = "complete", "incomplete", "missing"
#: Columns of the results with numbers.
_NUMBERS = ["seed", "parameters", "step", "steps", "tokens", "loss", "points"]


def difference_from_saved(run: Run, folder: Path, saved: dict[str, Any] | None = None) -> str | None:
    """Describe the first difference between a run and the config saved in a folder, or return None if they agree.

    :param saved: the settings in the folder. None reads them.
    """
    engine = run.engine
    saved = engine.saved_settings(folder) if saved is None else saved
    if not saved:
        return None
    if problems := arm_problems(run.arm, saved, engine):
        return f"Run {run.name} does not match its arm. {problems[0]}"
    for key in (*engine.workload_keys.values(), *engine.rate_keys, *run.overrides):
        value = run.settings.get(key)
        if key in saved and engine.compared_keys.match(key) and str(saved[key]) != str(value):
            return (
                f"{folder} has a run with other settings. {key} is {saved[key]!r} in the folder and {value!r} in this "
                "study."
            )
    return None


def read_results(path: Path) -> pd.DataFrame:
    """Read ``results.csv``.

    :raises LNSConfigError: if ``study collect`` has not written the file, or the file is damaged.
    """
    if not path.is_file():
        raise LNSConfigError(
            f"{path} was not found. The report reads the results that `olmo-lns study collect` writes. Run that "
            "command first."
        )
    content = path.read_bytes()
    try:
        if b"\0" in content:
            raise ValueError("it has NUL bytes")
        if not content.endswith(b"\n"):  # the last number may be cut, too
            raise ValueError("its last row has no line end, as if the file was cut")
        table = pd.read_csv(path, dtype={"run": str, "size": str, "arm": str})
        table[_NUMBERS] = table[_NUMBERS].apply(pd.to_numeric)  # a second header has words there
        if table["run"].isna().any() or table["run"].duplicated().any():
            raise ValueError("a run is named twice or not at all")
    except (ValueError, KeyError) as error:  # of pandas: an empty, cut or mixed file
        raise LNSConfigError(
            f"{path} cannot be read: {one_line(error)}. Expected the table that `olmo-lns study collect` wrote. Run "
            "that command again."
        ) from None
    return table


def collect(study: Study, out: Path, *, allow_missing: bool = False) -> pd.DataFrame:
    """Read every run of a study from ``<out>/<run>/``, and write ``<out>/results.csv``.

    ``loss`` is the mean training loss over the last part of a complete run, in nats per token. Other runs have none.
    ``heldout`` is the loss on held-out data after the last step, if the config has an evaluator ``heldout``. ``size``
    includes the learning rate if the description has ``rates``.

    :param allow_missing: report a run without a log as missing instead of raising an error.
    :returns: one row for each run, in the order of the description.
    :raises LNSConfigError: if a run is missing, a log is damaged, a loss is not finite, a run has other settings than
        the description, or two arms differ in more than the arm. The message names the run and the problem.
    """
    settings: dict[str, Any] = {}
    rows = []
    for run in study.runs:
        folder = out / run.name
        curve = read_curve(folder)
        if curve is None and not allow_missing:
            raise LNSConfigError(
                f"Run {run.name} is missing. No log was found in {folder}. Launch the run, or pass --allow-missing to "
                "report it as missing."
            )
        if curve and curve.losses:
            saved = run.engine.saved_settings(folder)
            if problem := difference_from_saved(run, folder, saved):
                raise LNSConfigError(f"{problem} Pass the description and the --out of the same launch.")
            if saved:
                settings[run.name] = saved
        rows.append(_row(study, run, curve or Curve(), settings.get(run.name)))
    compare_arms(study.runs, settings)
    table = pd.DataFrame(rows)
    out.mkdir(parents=True, exist_ok=True)
    write_atomically(out / "results.csv", table.to_csv(index=False))
    return table


def _row(study: Study, run: Run, curve: Curve, saved: dict[str, Any] | None) -> dict[str, Any]:
    workload = run.workload
    if workload.steps and curve.total_steps not in (None, workload.steps):
        raise LNSConfigError(
            f"According to its log, run {run.name} has {curve.total_steps} steps, but its config has {workload.steps}. "
            "Pass the description with which the run was launched, or remove the folder of the run and train it again."
        )
    loss, points = curve.final(study.final_fraction) if curve.is_done else (None, 0)
    status = COMPLETE if curve.is_done else INCOMPLETE if curve.losses else MISSING
    heldout = curve.heldout.get(curve.total_steps or -1)
    if heldout is not None:  # nats per token with a label
        heldout *= run.engine.heldout_correction(saved or run.settings)
    return {
        "run": run.name, "size": run.size_and_rate, "arm": run.arm, "seed": run.seed, "parameters": workload.parameters,
        "status": status, "has_settings": saved is not None,
        "step": curve.last, "steps": curve.total_steps or workload.steps,
        "tokens": workload.tokens_per_step * curve.last,
        "loss": loss, "points": points, "heldout": heldout,
        "layers": workload.layers, "width": workload.hidden_size, "learning_rate": workload.learning_rate,
    }  # fmt: skip
