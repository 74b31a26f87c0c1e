"""What identifies a model, kept with its weights and compared on every load.

OLMo's config schema is closed, so the record is a small ``lns.json`` beside each checkpoint's
``config.yaml``; Megatron keeps it in the saved arguments, exports keep it in their config.
"""

from __future__ import annotations

import json
import logging
import os
import reprlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Mapping

from olmo_lns import __version__, environment
from olmo_lns.errors import CheckpointMismatchError, LNSConfigError
from olmo_lns.schemes import INITIALIZATIONS, PRE_LN, Scheme, definition, names

__all__ = [
    "FORMAT", "RECORD_FILE", "Record", "accepted", "check_match", "keep_folded", "record_to_save", "require_match",
]  # fmt: skip

log = logging.getLogger("olmo_lns")

#: Version of the record's form.
FORMAT = 1
#: Name of the record inside a checkpoint folder.
RECORD_FILE = "lns.json"
_KEYS = {
    "format": int,
    "scheme": str,
    "parameters": dict,
    "norm": str,
    "scaled_init": str,
    "folded": bool,
    "plugin_version": str,
}


@dataclass(frozen=True)
class Record:
    """How a set of weights was trained.

    :param norm: base norm of the blocks in the framework's own word (``rms``, ``RMSNorm``); ``""`` where the
        framework's config says it.
    :param scaled_init: initialization of the residual output projections, one of
        :data:`~olmo_lns.schemes.INITIALIZATIONS`.
    :param folded: constants and gates have been multiplied into the weights; they run as plain Pre-LN.
    :param plugin_version: version of olmo-lns that wrote the record; informative, not compared.

    Example: ``Record.read("runs/lns/step1000").scheme`` is the scheme that the checkpoint was trained with.
    """

    scheme: Scheme = PRE_LN
    norm: str = ""
    scaled_init: str = "upstream"
    folded: bool = False
    plugin_version: str = __version__

    @property
    def active(self) -> bool:
        """Whether running these weights needs the scheme."""
        return not self.scheme.is_pre_ln and not self.folded

    @property
    def running(self) -> str:
        """Name of what has to run: the scheme, ``preln`` or ``folded``."""
        return "folded" if self.folded else self.scheme.name

    def as_dict(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "scheme": self.scheme.name,
            "parameters": self.scheme.parameters,
            "norm": self.norm,
            "scaled_init": self.scaled_init,
            "folded": self.folded,
            "plugin_version": self.plugin_version,
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], *, source: object = "record") -> Record:
        """:raises CheckpointMismatchError: another format, or keys that are missing, unknown or of a wrong type."""
        _check_form(values, source)
        if values["scaled_init"] not in INITIALIZATIONS:
            raise CheckpointMismatchError(
                f"{source}: scaled_init {values['scaled_init']!r}: expected one of {', '.join(INITIALIZATIONS)}"
            )
        try:
            scheme = _scheme(values["scheme"], values["parameters"])
        except LNSConfigError as error:
            text = f"{source} (written by olmo-lns {values['plugin_version']}): {error}"
            raise CheckpointMismatchError(text) from None
        return cls(scheme, values["norm"], values["scaled_init"], values["folded"], values["plugin_version"])

    def write(self, folder: str | os.PathLike[str]) -> Path:
        """Write ``lns.json`` into ``folder`` by rename, so that no reader sees half of it; returns its path.

        Example: ``Record(LNS, "rms", "plain").write("runs/lns/step1000")``.
        """
        path = Path(folder) / RECORD_FILE
        temporary = path.with_name(f"{RECORD_FILE}.{os.getpid()}.tmp")
        temporary.write_text(json.dumps(self.as_dict(), indent=2) + "\n", encoding="utf-8")
        os.replace(temporary, path)
        return path

    @classmethod
    def read(cls, folder: str | os.PathLike[str]) -> Record | None:
        """The record in ``folder``, or None when it holds none (a checkpoint made without us)."""
        path = Path(folder) / RECORD_FILE
        return cls.from_json(path) if path.is_file() else None

    @classmethod
    def from_json(cls, path: str | os.PathLike[str]) -> Record:
        """:raises CheckpointMismatchError: the file is not a record, or cannot be read."""
        path = Path(path)
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as error:
            raise CheckpointMismatchError(f"{path}: not valid JSON ({error})") from None
        except OSError as error:
            raise CheckpointMismatchError(f"{path} cannot be read: {error.strerror or error}") from None
        if not isinstance(values, dict):
            raise CheckpointMismatchError(f"{path}: expected a JSON object, found {reprlib.repr(values)}")
        return cls.from_dict(values, source=path)

    def __str__(self) -> str:
        what = definition(self.scheme.name).label if self.scheme.is_pre_ln else str(self.scheme)
        if self.scheme.values and not self.scheme.arguments:  # the value is what two messages differ in
            what += ":" + ",".join(f"{key}={value!r}" for key, value in self.scheme.values)
        norm = f" over {self.norm}" if self.norm and not self.scheme.is_pre_ln else ""
        return f"{'folded ' if self.folded else ''}{what}{norm} (initialization {self.scaled_init})"


#: The attribute of a model that holds the record of its folded weights.
_FOLDED = "_olmo_lns_folded"


def keep_folded(model: Any, saved: Record | None) -> None:
    """Note on ``model``, which is being loaded with the weights of ``saved``, whether these are folded."""
    setattr(model, _FOLDED, saved if saved is not None and saved.folded else None)


def record_to_save(model: Any, built: Record) -> Record:
    """The record to save: ``built`` is the model's own; folded weights that run as Pre-LN keep theirs."""
    folded: Record | None = getattr(model, _FOLDED, None)
    return built if folded is None or built.active else folded


def _check_form(values: Mapping[str, Any], source: object) -> None:
    """:raises CheckpointMismatchError: it is not a record of this version's form."""
    found = values.get("format")
    if found != FORMAT or isinstance(found, bool) or set(values) != set(_KEYS):
        raise CheckpointMismatchError(
            f"{source}: not a record of format {FORMAT}, the one that olmo-lns {__version__} reads: found format "
            f"{reprlib.repr(found)} and keys {sorted(values)}, expected {sorted(_KEYS)}. Upgrade olmo-lns if a newer "
            "one wrote it; write it anew if a development version before 0.2 did ('type' is 'scheme' now)."
        )
    for name, kind in _KEYS.items():
        if not isinstance(values[name], kind):
            raise CheckpointMismatchError(
                f"{source}: {name!r} must be a {kind.__name__}, found {reprlib.repr(values[name])}"
            )


def _scheme(name: str, parameters: Mapping[str, Any]) -> Scheme:
    """The scheme of a record, which must hold every parameter as a number.

    :raises LNSConfigError: a parameter is missing or is no number.
    """
    scheme = Scheme.of(name, **parameters)
    for key, value in scheme.values:
        if key not in parameters or isinstance(parameters[key], str):
            found = reprlib.repr(parameters[key]) if key in parameters else "none"
            raise LNSConfigError(f"scheme {name!r}: {key!r} must be a {type(value).__name__}, found {found}")
    return scheme


def differences(saved: Record, running: Record) -> list[str]:
    """Names of the differences that matter between two records, most severe first.

    The initialization does not: the weights are loaded. Nor do folded weights under Pre-LN, for which they are stock.
    """
    if saved.folded and running.scheme.is_pre_ln:
        return []
    if saved.running != running.running:
        return [f"{saved.running}-to-{running.running}"]
    found = []
    if saved.active:
        parameters = running.scheme.parameters
        found += ["norm"] * (saved.norm != running.norm)
        found += [key for key, value in saved.scheme.values if parameters[key] != value]
    return found


def check_match(
    saved: Record,
    running: Record,
    *,
    source: object,
    allow: str | None = None,
    remedy: str = "",
) -> list[str]:
    """Compare a checkpoint's record with the model that runs.

    :param source: the checkpoint, for the message.
    :param remedy: the flag that gives the checkpoint's setting, as it is typed; the last line of the message.
    :param allow: accepted differences, comma-separated; default ``$OLMO_LNS_ALLOW_MISMATCH``.
    :returns: the differences that were found and explicitly allowed (the caller logs them).
    :raises CheckpointMismatchError: a difference that was not allowed, with both values named.
    """
    allowed = accepted(allow)
    found = differences(saved, running)
    for name in found:
        if name not in allowed:
            raise CheckpointMismatchError(
                f"{source} was saved with {saved}, but this run has {running}: {_consequence(name)}. Run with the "
                f"checkpoint's setting, or set {environment.ALLOW_MISMATCH}={name} to go on knowingly."
                + (f" The checkpoint's setting is:\n{remedy}" if remedy else "")
            )
    return found


def require_match(
    saved: Record | None, running: Record, *, source: object, files: str = "", remedy: str = "", or_allowed: str = ""
) -> None:
    """Before an integration loads weights: :func:`check_match`, and a log line for each difference that was allowed.

    :param saved: None where the checkpoint says nothing. :param files: where it would say it, for the message.
    :param or_allowed: a difference that is allowed like ``missing-record``, where it says nothing.
    :raises CheckpointMismatchError: a difference that was not allowed, or a scheme over weights of unknown training.
    """
    if saved is not None:
        for name in check_match(saved, running, source=source, remedy=remedy):
            log.warning("loading %s although it differs (%s), as %s says", source, name, environment.ALLOW_MISMATCH)
    elif running.active:
        if not {"missing-record", or_allowed} & accepted():
            raise CheckpointMismatchError(
                f"{source} has neither {files}: what its weights were trained with is unknown, and this run has "
                f"{running}. Copy the missing file from the run that saved it, or set {environment.ALLOW_MISMATCH}="
                "missing-record if its weights were trained so, or are to be from here on."
            )
        log.warning("loading %s without a record, as %s says", source, environment.ALLOW_MISMATCH)


def require_same(
    saved: Scheme | None, running: Scheme, *, source: object, setting: Callable[[Scheme], str], differing: str = ""
) -> None:
    """Compare what a checkpoint's own config says with the built model, before its weights are used.

    :param saved: Pre-LN for a stock config; None where nothing says what the weights were trained with.
    :param setting: what a user types to run a scheme, such as ``--layernorm-scaling``.
    :param differing: another difference, in words, such as of the base norm.
    :raises CheckpointMismatchError: they differ and ``OLMO_LNS_ALLOW_MISMATCH`` is not 1.

    Example: ``require_same(PRE_LN, LNS, source="step1000", setting=str)`` raises.
    """
    if saved == running and not differing:
        return
    if saved is None:
        if running.is_pre_ln:
            return
        found = "nothing beside it says what its weights were trained with"
        todo = "Copy the config of the run that saved it beside the weights"
    else:
        found = f"its config says {differing or saved}"
        todo = f"Run with the checkpoint's setting ({setting(saved)})"
    message = f"{source}: {found}, but this run has {running}."
    if environment.is_set(environment.ALLOW_MISMATCH):
        log.warning("%s Loading it all the same, as %s=1 says.", message, environment.ALLOW_MISMATCH)
        return
    raise CheckpointMismatchError(f"{message} {todo}, or set {environment.ALLOW_MISMATCH}=1 to go on knowingly.")


def accepted(text: str | None = None) -> set[str]:
    """The differences named in ``text``, or in ``$OLMO_LNS_ALLOW_MISMATCH``.

    :raises CheckpointMismatchError: a name that no difference has.
    """
    text = environment.read(environment.ALLOW_MISMATCH) if text is None else text
    if text == "1":
        return set()
    found = {name.strip() for name in text.split(",")} - {""}
    known = {"norm", "scaled-init", "missing-record"} | {key for name in names() for key in definition(name).parameters}
    runs = {"folded", *names()}
    unknown = {n for n in found - known if "-to-" not in n or not set(n.split("-to-")) <= runs}
    if unknown:
        raise CheckpointMismatchError(
            f"{environment.ALLOW_MISMATCH} names {sorted(unknown)}; known differences: {', '.join(sorted(known))}, "
            f"and A-to-B with A and B of {', '.join(sorted(runs))}"
        )
    return found


def _consequence(name: str) -> str:
    if name.startswith("folded-to-"):
        return "the factor is already inside the weights and would be applied twice"
    if name.endswith("-to-preln"):
        return "its blocks would run without the scheme it was trained with"
    if name.startswith("preln-to-"):
        return "its blocks would suddenly follow a scheme it was not trained with"
    if "-to-" in name:
        return "its blocks would follow another scheme than the one it was trained with"
    if name == "norm":
        return "the base norm would change"
    return f"every block would run with another {name}"
