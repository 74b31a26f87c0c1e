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
from olmo_lns.study.files import write_whole
from olmo_lns.study.plan.spec import Study

__all__ = ["STAMP", "attempts", "environment_of", "prepare_data", "record", "stamp"]

STAMP = "run.json"


def environment_of() -> dict[str, str]:
    """What is set here and would change a run."""
    return {name: os.environ[name] for name in (SCHEME, INITIALIZATION) if os.environ.get(name)}


def prepare_data(study: Study, out: Path) -> None:
    """Build the corpus where the study names one that is built here; a no-op otherwise, and when it is there."""
    if study.data in BUILT:
        BUILT[study.data](out / "data")


def stamp(study: Study, run: Run, out: Path) -> Path:
    """Write ``run.json``: the identity the run is started with. A stamp that is there must agree.

    :raises LNSConfigError: the folder holds a run started with other settings or data.
    """
    settings = json.loads(json.dumps(run.settings, default=str))
    data = run.engine.data_files(settings)
    decisive = {
        "settings": settings,
        "data": fingerprint(data) if data else None,
        "environment": environment_of(),
        "start": run.start_checkpoint,
    }
    path = out / run.name / STAMP
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.is_file():
        names = {"study": study.name, "name": run.name, "size": run.size, "arm": run.arm, "seed": run.seed}
        names |= {"framework": run.engine.name, "version": __version__}
        write_whole(path, json.dumps({**names, **decisive}, indent=1) + "\n")
        return path
    found = record(path)
    for kind, new in decisive.items():
        if (old := found.get(kind)) != new:
            where = f"other {kind}"
            if isinstance(old, dict) and isinstance(new, dict):
                key = next(k for k in sorted({*old, *new}) if old.get(k) != new.get(k))
                where, old, new = f"{where}: {key}", old.get(key), new.get(key)
            raise LNSConfigError(
                f"{path}: was started with {where}: {old!r} then, {new!r} now; use another --out, or remove the folder "
                "to start it anew"
            )
    return path


def attempts(folder: Path, pattern: str = "attempt-*.log") -> list[Path]:
    """The console logs of a run folder, oldest first: by the numbers in their names, ``-99`` before ``-100``."""
    parts = {path: re.split(r"(\d+)", str(path)) for path in folder.glob(pattern)}
    return sorted(parts, key=lambda path: [int(part) if part.isdigit() else part for part in parts[path]])


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
