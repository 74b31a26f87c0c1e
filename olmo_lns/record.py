"""What identifies an LNS model, kept beside its weights and compared on every load.

OLMo's config schema is closed and environment variables are gone on resume, so the record is a
small ``lns.json`` beside each checkpoint's ``config.yaml``; Megatron keeps it in the saved
arguments and exports keep it in their config.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Mapping

from olmo_lns import __version__
from olmo_lns.errors import CheckpointMismatchError
from olmo_lns.scale import DEFAULT_EXPONENT

__all__ = ["OVERRIDE_VARIABLE", "PRE_LN", "RECORD_FILE", "LNSRecord", "check_match"]

#: Name of the record inside a checkpoint folder.
RECORD_FILE = "lns.json"
#: ``type`` of a model without LayerNorm Scaling.
PRE_LN = "none"
#: Comma-separated names of differences that the user accepts knowingly.
OVERRIDE_VARIABLE = "OLMO_LNS_ALLOW_MISMATCH"


@dataclass(frozen=True)
class LNSRecord:
    """How LayerNorm Scaling was used for a set of weights.

    :param type: ``"none"`` (Pre-LN), or the norm that carries the factor: ``"lns_rms"``,
        ``"lns_default"``, ``"lns_low_precision"`` (OLMo), ``"lns"`` (Megatron, where the norm is
        an argument of its own).
    :param exponent: exponent of the factor, 0.5 in the paper; 0.0 for Pre-LN.
    :param scaled_init: policy for the residual output projections: ``"auto"`` (off with LNS,
        the framework's own without), ``"keep"`` or ``"off"``.
    :param folded: the factor has been multiplied into the weights; they run as plain Pre-LN.
    :param plugin_version: version of olmo-lns that wrote the record; informative, not compared.
    """

    type: str = PRE_LN
    exponent: float = 0.0
    scaled_init: str = "auto"
    folded: bool = False
    plugin_version: str = __version__

    @classmethod
    def lns(cls, type: str, exponent: float = DEFAULT_EXPONENT, **kwargs: Any) -> LNSRecord:
        """The record of a model whose block norms carry the factor."""
        return cls(type=type, exponent=exponent, **kwargs)

    @property
    def active(self) -> bool:
        """Whether running these weights needs the factor."""
        return self.type != PRE_LN and not self.folded

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], *, source: object = "record") -> LNSRecord:
        """:raises CheckpointMismatchError: keys are missing, unknown or of a wrong type."""
        expected = {f.name: type(f.default) for f in fields(cls)}
        if set(values) != set(expected):
            raise CheckpointMismatchError(
                f"{source}: not an LNS record: found keys {sorted(values)}, expected {sorted(expected)}"
            )
        for name, kind in expected.items():
            if not isinstance(values[name], (float, int) if kind is float else kind):
                raise CheckpointMismatchError(f"{source}: {name!r} must be a {kind.__name__}, found {values[name]!r}")
        return cls(**values)

    def write(self, folder: str | os.PathLike[str]) -> Path:
        """Write ``lns.json`` into ``folder`` by rename, so that no reader sees half of it."""
        path = Path(folder) / RECORD_FILE
        temporary = path.with_name(f"{RECORD_FILE}.{os.getpid()}.tmp")
        temporary.write_text(json.dumps(self.as_dict(), indent=2) + "\n", encoding="utf-8")
        os.replace(temporary, path)
        return path

    @classmethod
    def read(cls, folder: str | os.PathLike[str]) -> LNSRecord | None:
        """The record in ``folder``, or None when it holds none (a checkpoint made without us)."""
        path = Path(folder) / RECORD_FILE
        return cls.from_json(path) if path.is_file() else None

    @classmethod
    def from_json(cls, path: str | os.PathLike[str]) -> LNSRecord:
        """:raises CheckpointMismatchError: the file is not a record."""
        path = Path(path)
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise CheckpointMismatchError(f"{path}: not valid JSON ({error})") from None
        if not isinstance(values, dict):
            raise CheckpointMismatchError(f"{path}: expected a JSON object, found {values!r:.80}")
        return cls.from_dict(values, source=path)


#: Name of each difference (as given to the override variable) and why it matters.
_CONSEQUENCE = {
    "lns-to-preln": "its blocks would run without the factor it was trained with",
    "preln-to-lns": "its blocks would suddenly be scaled by a factor it was not trained with",
    "folded-to-lns": "the factor is already inside the weights and would be applied twice",
    "folded-to-preln": "the weights run as they are, but training on would no longer be LNS "
    "(gain and gradients differ); unfold them to continue under LNS",
    "norm": "the base norm would change",
    "exponent": "every block would be scaled by another factor",
    "scaled-init": "the run would continue under another initialization policy than it was started with",
    "missing-record": "its exponent is unknown",
}


def differences(saved: LNSRecord, running: LNSRecord) -> list[str]:
    """Names of the differences that matter between two records, most severe first."""
    if saved.folded != running.folded or saved.active != running.active:
        if saved.folded:
            return ["folded-to-lns" if running.active else "folded-to-preln"]
        return ["preln-to-lns" if running.active else "lns-to-preln"]
    found = []
    if saved.active:
        found += ["norm"] * (saved.type != running.type)
        found += ["exponent"] * (saved.exponent != running.exponent)
    found += ["scaled-init"] * (saved.scaled_init != running.scaled_init)
    return found


def check_match(
    saved: LNSRecord,
    running: LNSRecord,
    *,
    source: object,
    training: bool = True,
    allow: str | None = None,
) -> list[str]:
    """Compare a checkpoint's record with the running configuration.

    :param source: the checkpoint, for the message.
    :param training: False when the weights are only evaluated or converted: then folded weights
        under plain Pre-LN and another initialization policy are both fine.
    :param allow: accepted differences, comma-separated; default ``$OLMO_LNS_ALLOW_MISMATCH``.
    :returns: the differences that were found and explicitly allowed (the caller logs them).
    :raises CheckpointMismatchError: a difference that was not allowed, with both values named.
    """
    text = allow if allow is not None else os.environ.get(OVERRIDE_VARIABLE, "")
    allowed = {name.strip() for name in text.split(",")}
    if unknown := allowed - set(_CONSEQUENCE) - {""}:
        raise CheckpointMismatchError(
            f"{OVERRIDE_VARIABLE} names {sorted(unknown)}; known differences: {', '.join(sorted(_CONSEQUENCE))}"
        )
    found = differences(saved, running)
    if not training:
        found = [name for name in found if name not in ("folded-to-preln", "scaled-init")]
    for name in found:
        if name not in allowed:
            raise CheckpointMismatchError(
                f"{source} was saved with {_describe(saved)}, but this run has {_describe(running)}: "
                f"{_CONSEQUENCE[name]}. Run with the checkpoint's setting, or set "
                f"{OVERRIDE_VARIABLE}={name} to go on knowingly."
            )
    return found


def _describe(record: LNSRecord) -> str:
    if record.type == PRE_LN:
        return f"Pre-LN (no LNS, scaled_init={record.scaled_init})"
    state = "folded " if record.folded else ""
    return f"{state}{record.type} (exponent {record.exponent:g}, scaled_init={record.scaled_init})"
