"""The stamp of a run, ``run.json``: what it was started with; and its attempts."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

from olmo_lns import __version__
from olmo_lns.environment import INITIALIZATION, SCHEME
from olmo_lns.errors import LNSConfigError, one_line
from olmo_lns.study.data.corpora import BUILT, fingerprint
from olmo_lns.study.engines import Run
from olmo_lns.study.plan.spec import Study

__all__ = ["STAMP", "attempts", "environment_of", "prepare_data", "record", "stamp", "write_whole"]

STAMP = "run.json"
_NUMBER = re.compile(r"(\d+)")
LNS_VARIABLES = (SCHEME, INITIALIZATION)


def write_whole(path: Path, text: str) -> None:
    """Write ``path`` by rename: neither a kill nor a full disk leaves half of it, or costs what was there."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8", newline="")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def environment_of() -> dict[str, str]:
    """What is set here and would change a run."""
    return {name: os.environ[name] for name in LNS_VARIABLES if os.environ.get(name)}


def prepare_data(study: Study, out: Path) -> None:
    """Build the corpus where the study names one that is built here; a no-op otherwise, and when it is there."""
    if study.data in BUILT:
        BUILT[study.data].build(out / "data")


def stamp(study: Study, run: Run, out: Path) -> Path:
    """Write ``run.json``: the identity the run is started with. A stamp that is there must agree.

    :raises LNSConfigError: the folder holds a run started with other settings or data.
    """
    settings = json.loads(json.dumps(run.settings, default=str))
    data = run.engine.data_files(settings)
    started = {
        "study": study.name,
        "name": run.name,
        "size": run.size,
        "arm": run.arm,
        "seed": run.seed,
        "framework": run.engine.name,
        "settings": settings,
        "data": fingerprint(data) if data else None,
        "environment": environment_of(),
        "version": __version__,
    }
    if run.start_checkpoint:
        started["start"] = run.start_checkpoint
    folder = out / run.name
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / STAMP
    if path.is_file():
        found = record(path)
        for key in ("settings", "data", "environment", "start"):
            if found.get(key) != started.get(key):
                raise LNSConfigError(
                    f"{path}: was started with other {key}: {_first_difference(found.get(key), started.get(key))}; "
                    "use another --out, or remove the folder to start it anew"
                )
    else:
        write_whole(path, json.dumps(started, indent=1) + "\n")
    return path


def _first_difference(old: Any, new: Any) -> str:
    if isinstance(old, dict) and isinstance(new, dict):
        key = next(k for k in sorted({*old, *new}) if old.get(k) != new.get(k))
        return f"{key}: {old.get(key)!r} then, {new.get(key)!r} now"
    return f"{old!r} then, {new!r} now"


def attempts(folder: Path, pattern: str = "attempt-*.log") -> list[Path]:
    """The console logs of a run folder, oldest first: by the numbers in their names, ``-99`` before ``-100``."""
    return sorted(
        folder.glob(pattern), key=lambda path: [int(n) if n.isdigit() else n for n in _NUMBER.split(str(path))]
    )


def record(path: Path, *keys: str) -> dict[str, Any]:
    """A JSON record of ours: ``run.json``, or ``attempt-NN.json`` (how an attempt ended and what it cost).

    :raises LNSConfigError: it cannot be read, or lacks one of ``keys``.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(found, dict):
            raise ValueError(f"a {type(found).__name__}, expected a mapping")
        if lacking := [key for key in keys if key not in found]:
            raise ValueError(f"no {lacking[0]!r} in it")
    except (OSError, ValueError) as error:
        raise LNSConfigError(f"{path}: damaged: {one_line(error)}: restore it, or remove it to go on without") from None
    return found
