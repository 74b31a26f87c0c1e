"""What makes a run an arm, and the rule that two arms may differ in nothing else."""

from __future__ import annotations

import os.path
from pathlib import Path
from typing import Any, Collection, Mapping, Sequence

from olmo_lns.errors import LNSConfigError
from olmo_lns.study.arms import ARMS, Arm, arm_named
from olmo_lns.study.engines import ENGINES, Engine, Run

__all__ = ["arm_problems", "compare_arms", "compare_planned", "identity", "init_problems", "settings_of"]


def settings_of(arm: Arm, engine: Engine) -> dict[str, Any]:
    """What makes a run of ``engine`` this arm.

    :raises LNSConfigError: there is no such arm in this framework.
    """
    found = engine.arm(arm)
    if found is None:
        others = " and ".join(other.title for other in ENGINES.values() if other.arm(arm) is not None)
        raise LNSConfigError(f"arm {arm.name!r} exists for {others} only")
    return found


def arm_problems(name: str, settings: Mapping[str, Any], engine: Engine) -> list[str]:
    """What contradicts the arm's definition in flat settings; empty when nothing does."""
    arm = arm_named(name)
    try:
        wanted = engine.defining(settings_of(arm, engine))
    except LNSConfigError as error:
        return [str(error)]
    found = engine.defining(settings)
    return [
        f"{key}={found[key]!r}, but arm {name!r} is {key}={value!r}"
        for key, value in wanted.items()
        if found[key] != value
    ]


def init_problems(settings: Mapping[str, Any], engine: Engine, arm: str = "") -> list[str]:
    """A scheme that wants plain initialization with a scaled one, unless that is what the arm is for.

    For LNS the paper (footnote 1, section 6) finds the two together worse.
    """
    scheme = engine.scheme(settings)
    if scheme.definition.initialization != "plain" or (arm in ARMS and ARMS[arm].initialization != "plain"):
        return []
    found = engine.scaled(settings)
    return [f"{scheme.definition.label} with {found}"] if found else []


def _differences(
    first: Mapping[str, Any], second: Mapping[str, Any], engine: Engine, *, rates: bool
) -> list[tuple[str, Any, Any]]:
    """``(key, first, second)`` of all but the arm's own keys (``rates``: and the learning rate's), data and names."""
    own = engine.arm_keys | (set(engine.rate_keys) if rates else set())
    keys = sorted(key for key in {*first, *second} if not _aside(key, engine, own))
    found = [(engine.start[0], start_of(first, engine), start_of(second, engine))]
    return found + [(key, first.get(key), second.get(key)) for key in keys]


def identity(settings: Mapping[str, Any], engine: Engine) -> dict[str, Any]:
    """The settings that a run's result follows from: the arm's own among them, names and folders not."""
    kept = {key: value for key, value in sorted(settings.items()) if not _aside(key, engine)}
    return kept | {engine.start[0]: start_of(settings, engine)}


def _aside(key: str, engine: Engine, more: Collection[str] = ()) -> bool:
    return key in more or key == engine.data_key or key.startswith(engine.bookkeeping)


def start_of(settings: Mapping[str, Any], engine: Engine) -> str | None:
    """The checkpoint that a run starts from; None where it starts anew or goes on from one of its own.

    A start inside the run's own folders is a restart, any other makes another run.
    """
    key, own = engine.start
    if not (start := settings.get(key)):
        return None
    folders = [Path(os.path.normpath(str(settings[name]))) for name in own if settings.get(name)]
    path = Path(os.path.normpath(str(start)))
    return None if any(path.is_relative_to(folder) for folder in folders) else str(start)


def compare_arms(runs: Sequence[Run], identities: Mapping[str, Mapping[str, Any]]) -> None:
    """Each run must be its arm, and the arms of one size and seed must differ in the arm's keys only.

    :param identities: of the runs that are known, by name: ``settings``, ``data`` (None: not stamped), ``environment``.
    :raises LNSConfigError: the two runs, the key and both values.
    """
    firsts: dict[tuple[str, int], Run] = {}
    for run in (run for run in runs if run.name in identities):
        if found := arm_problems(run.arm, identities[run.name]["settings"], run.engine):
            raise LNSConfigError(f"run {run.name} is not its arm: {found[0]}")
        first = firsts.setdefault((run.group, run.seed), run)
        _compare(first, identities[first.name], run, identities[run.name])


def compare_planned(planned: Sequence[Run]) -> None:
    """:func:`compare_arms` before anything runs, on the settings that the configs give."""
    compare_arms(planned, {run.name: {"settings": run.settings, "data": None, "environment": {}} for run in planned})


def _compare(first: Run, one: Mapping[str, Any], second: Run, other: Mapping[str, Any]) -> None:
    engine = first.engine
    found = _differences(one["settings"], other["settings"], engine, rates=(first.rate, second.rate) != (None, None))
    # Without a stamp on both (runs started by hand) the paths must do for the data.
    pair = (one["data"], other["data"])
    if None in pair:
        pair = (one["settings"].get(engine.data_key), other["settings"].get(engine.data_key))
        key = engine.data_key
    else:
        key = "data"
    found += [(key, *pair), ("environment", one["environment"], other["environment"])]
    if different := [each for each in found if each[1] != each[2]]:
        key, here, there = different[0]
        more = f" (and {len(different) - 1} more)" if len(different) > 1 else ""
        raise LNSConfigError(
            f"{first.name} and {second.name} differ in more than the arm: {key} is {here!r} and {there!r}{more}; "
            "their losses cannot be compared"
        )
