"""Gather the runs of a study into one table, and refuse a study whose arms differ in more than the arm."""

from __future__ import annotations

import csv
import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Mapping, Sequence

from olmo_lns.errors import LNSConfigError
from olmo_lns.study import logs
from olmo_lns.study.arms import arm_problems, differences
from olmo_lns.study.launch import STAMP
from olmo_lns.study.logs import Curve
from olmo_lns.study.spec import Run, Study

__all__ = ["Result", "collect", "compare_arms", "compare_planned", "read_results", "write_results"]

COMPLETE, INCOMPLETE, MISSING = "complete", "incomplete", "missing"


@dataclass(frozen=True)
class Result:
    """One run. ``loss`` (mean over the last part of the run, nats per token) is None unless ``status`` is complete.

    :param last_loss: the latest loss seen, of an incomplete run too.
    :param cpu_s: CPU seconds, where ``study launch --run`` ran it.
    """

    run: str
    size: str
    arm: str
    seed: int
    parameters: int
    status: str
    step: int
    steps: int
    tokens: int
    loss: float | None
    loss_std: float | None
    points: int
    last_loss: float | None
    cpu_s: float | None
    source: str


def collect(study: Study, out: Path, *, wandb_export: Path | None = None, allow_missing: bool = False) -> list[Result]:
    """Read every run of the study from ``<out>/<run>/``: logs, CSV or TensorBoard, or from one W&B chart export.

    :param allow_missing: report a run of which nothing was found as missing, instead of refusing the study.
    :raises LNSConfigError: a missing run, a damaged log, a loss that is not finite, or arms that differ in more
        than the arm; each with the run and what was found.
    """
    exported = logs.read_wandb_export(wandb_export) if wandb_export else {}
    identities: dict[str, dict[str, Any]] = {}
    results = []
    for run in study.runs:
        folder = out / run.name
        curve = exported.get(run.name) or _curve(folder)
        if curve is None:
            if not allow_missing:
                raise LNSConfigError(
                    f"run {run.name} is missing: nothing in {folder}; launch it, or pass --allow-missing"
                )
            curve = Curve({}, None, "no log")
        elif (identity := _identity(run, folder)) is not None:
            identities[run.name] = identity
        results.append(_result(study, run, curve, folder))
    compare_arms(study, identities)
    return results


def _curve(folder: Path) -> Curve | None:
    """The console logs of a run folder; without any, its CSV files, then its TensorBoard files."""
    for pattern in ("*.log", "*.txt", "*.csv", "**/events.out.tfevents*"):
        files = sorted(folder.glob(pattern))
        if files:
            return logs.merge(logs.read(path) for path in files)
    return None


def _identity(run: Run, folder: Path) -> dict[str, Any] | None:
    """What the run really used: the config that OLMo saved or the arguments that Megatron printed, else its stamp."""
    stamp = folder / STAMP
    record = json.loads(stamp.read_text()) if stamp.is_file() else {}
    settings: dict[str, Any] = record.get("settings", {})
    saved = folder / "config.yaml"
    if run.framework == "olmo" and saved.is_file():
        from olmo_lns.study import olmo_config

        settings = olmo_config.flatten(olmo_config.load(saved))
    elif run.framework == "megatron":
        for path in sorted(folder.glob("*.log")):
            settings = logs.megatron_arguments(path) or settings
    if not settings:
        return None
    return {"settings": settings, "data": record.get("data"), "environment": record.get("environment", {})}


def _result(study: Study, run: Run, curve: Curve, folder: Path) -> Result:
    shape = run.shape
    if curve.total not in (None, shape.steps):
        raise LNSConfigError(
            f"run {run.name}: its log counts to {curve.total} steps, the study's config to {shape.steps}: "
            "not a run of this study"
        )
    status = MISSING if curve.source == "no log" and not curve.losses else INCOMPLETE
    mean = std = None
    points = 0
    if curve.losses and curve.last >= shape.steps:
        status = COMPLETE
        mean, std, points = curve.final(study.final_fraction, shape.steps)
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
    )


def _cpu(folder: Path) -> float | None:
    """CPU seconds of all attempts; None if the end of one was not seen (the launcher was killed)."""
    costs = [path.with_suffix(".json") for path in sorted(folder.glob("attempt-*.log"))]
    if not costs or not all(path.is_file() for path in costs):
        return None
    return round(sum(json.loads(path.read_text())["cpu_s"] for path in costs), 1)


def compare_arms(study: Study, identities: Mapping[str, Mapping[str, Any]]) -> None:
    """Each run must be its arm, and the arms of one size and seed must differ in the arm's keys only.

    :raises LNSConfigError: the two runs, the key and both values.
    """
    for run in study.runs:
        if run.name in identities and (
            found := arm_problems(run.arm, _typed(identities[run.name]["settings"]), run.framework)
        ):
            raise LNSConfigError(f"run {run.name} is not its arm: {found[0]}")
    groups: dict[tuple[str, int], list[Run]] = {}
    for run in study.runs:
        if run.name in identities:
            groups.setdefault((run.size, run.seed), []).append(run)
    for first, *others in groups.values():
        for other in others:
            _compare(study.framework, first.name, identities[first.name], other.name, identities[other.name])


def compare_planned(study: Study) -> None:
    """:func:`compare_arms` before anything runs, on the settings that the configs give."""
    compare_arms(study, {run.name: {"settings": run.settings, "data": None, "environment": {}} for run in study.runs})


def _compare(framework: str, name: str, one: Mapping[str, Any], other_name: str, other: Mapping[str, Any]) -> None:
    found = differences(one["settings"], other["settings"], framework, ignore={"data.paths"})
    for kind in ("data", "environment"):
        # Without a stamp on both (runs started by hand) the paths must do for the data.
        if kind == "data" and (one["data"] is None or other["data"] is None):
            key = "data.paths"
            pair = one["settings"].get(key), other["settings"].get(key)
        else:
            key, pair = kind, (one[kind], other[kind])
        if pair[0] != pair[1]:
            found.append((key, *pair))
    if found:
        key, here, there = found[0]
        more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
        raise LNSConfigError(
            f"{name} and {other_name} differ in more than the arm: {key} is {here!r} and {there!r}{more}; "
            "their losses cannot be compared"
        )


def _typed(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Megatron prints its arguments as text: give the booleans back."""
    words = {"True": True, "False": False, "None": None}
    return {key: words.get(value, value) if isinstance(value, str) else value for key, value in settings.items()}


def write_results(results: Sequence[Result], path: Path) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(Result)])
        writer.writeheader()
        writer.writerows(asdict(result) for result in results)


def read_results(path: Path) -> list[Result]:
    """:raises LNSConfigError: no such file, or not one that ``study collect`` wrote."""
    if not path.is_file():
        raise LNSConfigError(f"{path}: not there; run `olmo-lns study collect` first")
    kinds = {f.name: str(f.type) for f in fields(Result)}
    with path.open(newline="") as file:
        table = list(csv.DictReader(file))
    if table and set(table[0]) != set(kinds):
        raise LNSConfigError(f"{path}: not a table of `olmo-lns study collect`: columns {', '.join(table[0])}")
    return [Result(**{key: _value(kinds[key], text) for key, text in row.items()}) for row in table]


def _value(kind: str, text: str) -> Any:
    if kind == "float | None":
        return float(text) if text else None
    return int(text) if kind == "int" else text
