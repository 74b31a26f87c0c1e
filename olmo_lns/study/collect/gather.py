"""Gather the runs of a study into one table, and refuse a study whose arms differ in more than the arm."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from olmo_lns.errors import LNSConfigError
from olmo_lns.study.collect import logs
from olmo_lns.study.collect.results import COMPLETE, INCOMPLETE, MISSING, Finished, Result, place
from olmo_lns.study.collect.stamp import STAMP, attempts, prepare_data, record
from olmo_lns.study.engines.base import Curve
from olmo_lns.study.plan.compare import compare_arms
from olmo_lns.study.plan.spec import Run, Study

__all__ = ["collect"]


def collect(study: Study, out: Path, *, wandb_export: Path | None = None, allow_missing: bool = False) -> list[Result]:
    """Read every run of the study from ``<out>/<run>/``: logs, CSV or TensorBoard, or from one W&B chart export.

    A run of which nothing is there is taken from the description's table of finished runs, if it has it.

    :param allow_missing: report a run of which nothing was found as missing, instead of refusing the study.
    :raises LNSConfigError: a missing run, a damaged log, a loss that is not finite, or arms that differ in more
        than the arm; each with the run and what was found.
    """
    if table := Finished(study):
        prepare_data(study, out)  # its runs are known by their data
    exported = logs.read_wandb_export(wandb_export) if wandb_export else {}
    identities: dict[str, dict[str, Any]] = {}
    results = []
    for run in study.runs:
        folder = out / run.name
        curve = exported.get(run.name) or _curve(folder)
        if curve is None and (known := table.result(run)) is not None:
            results.append(known)
            continue
        if curve is None:
            if not allow_missing:
                raise LNSConfigError(
                    f"run {run.name} is missing: nothing in {folder}; launch it, or pass --allow-missing"
                )
            curve = Curve({}, None, "no log")
        elif curve.losses and (identity := _identity(run, folder)) is not None:  # no loss, nothing to compare
            identities[run.name] = identity
        results.append(_result(study, run, curve, folder))
    compare_arms(study.runs, identities)
    return results


def _curve(folder: Path) -> Curve | None:
    """The console logs of a run folder; without any, its CSV files, then its TensorBoard files."""
    for pattern in ("*.log", "*.txt", "*.csv", "**/events.out.tfevents*"):
        if files := attempts(folder, pattern):
            return logs.merge(logs.read(path) for path in files)
    return None


def _identity(run: Run, folder: Path) -> dict[str, Any] | None:
    """What the run really used: the config that OLMo saved or the arguments that Megatron printed, else its stamp."""
    stamp, key = folder / STAMP, run.engine.start[0]
    started = record(stamp, "settings") if stamp.is_file() else {}
    settings: dict[str, Any] = run.engine.used(folder) or started.get("settings", {})
    if run.start_checkpoint and str(settings.get(key)).endswith(f"/{run.start_checkpoint}"):
        settings = settings | {key: None}  # the study's own trunk, which each arm has of its own
    if not settings:
        return None
    return {"settings": settings, "data": started.get("data"), "environment": started.get("environment", {})}


def _result(study: Study, run: Run, curve: Curve, folder: Path) -> Result:
    shape = run.shape
    if curve.total not in (None, shape.steps):
        raise LNSConfigError(
            f"run {run.name}: its log counts to {curve.total} steps, the study's config to {shape.steps}: "
            "not a run of this study"
        )
    status, mean, std, points = MISSING if curve.source == "no log" and not curve.losses else INCOMPLETE, None, None, 0
    if curve.losses and curve.last >= shape.steps:
        status, (mean, std, points) = COMPLETE, curve.final(study.final_fraction, shape.steps)
    # Nats per token with a label.
    heldout = curve.heldout.get(shape.steps)
    if heldout is not None:
        heldout *= run.engine.padding(run.engine.used(folder) or run.settings)
    return Result(
        run=run.name,
        size=run.size,
        arm=run.arm,
        seed=run.seed,
        parameters=shape.parameters,
        status=status,
        step=curve.last,
        steps=shape.steps,
        tokens=shape.tokens_per_step * curve.last,
        loss=mean,
        loss_std=std,
        points=points,
        last_loss=curve.losses[curve.last] if curve.losses else None,
        cpu_s=_cpu(folder),
        source=curve.source,
        heldout=heldout,
        **place(run),
    )


def _cpu(folder: Path) -> float | None:
    """CPU seconds of all attempts; None if the end of one was not seen (the launcher was killed)."""
    costs = [path.with_suffix(".json") for path in attempts(folder)]
    seconds = [record(path).get("cpu_s") if path.is_file() else None for path in costs]
    known = [float(each) for each in seconds if each is not None]
    return round(sum(known), 1) if known and len(known) == len(costs) else None
