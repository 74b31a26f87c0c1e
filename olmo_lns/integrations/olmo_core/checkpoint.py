"""The record beside OLMo-core's checkpoints: written on save, compared before a weight is loaded.

OLMo-core's own ``Checkpointer.load`` compares no config: a run resumed without the flags would go on as Pre-LN.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, Callable

from olmo_lns import environment
from olmo_lns.errors import CheckpointMismatchError, LNSError
from olmo_lns.integrations.olmo_core.record import CONFIG_FILE, record_of, routers_of, saved_record, saved_routers
from olmo_lns.record import RECORD_FILE, Record, check_match

__all__ = ["check", "wrap_load", "wrap_load_model", "wrap_save", "wrap_save_hf", "wrap_save_train_state"]

log = logging.getLogger("olmo_lns")

_RECORD = "_olmo_lns_record"
_UNREADABLE = (
    f"{RECORD_FILE} and {CONFIG_FILE} cannot be looked for; expected a folder or URL that this process can read"
)


def check(folder: Any, parts: list[Any], *, training: bool, group: Any = None) -> None:
    """:param group: the processes that load, default all.

    :raises CheckpointMismatchError: the checkpoint and the model that runs, in its parts, disagree.
    """
    saved, routers = _read_once(folder, group)
    running = _record_of(parts)
    for difference in check_match(saved, running, source=folder, training=training):
        log.warning("loading %s although it differs (%s), as %s says", folder, difference, environment.ALLOW_MISMATCH)
    if saved.active and running.active:
        for part in parts:
            _require_routers(folder, routers, routers_of(part))


def _require_routers(folder: Any, saved: dict[int, bool], running: dict[int, bool]) -> None:
    for index in sorted(saved.keys() & running.keys()):
        if saved[index] != running[index]:
            was, now = (str(value[index]).lower() for value in (saved, running))
            raise CheckpointMismatchError(
                f"{folder} was saved with block.scale_router={was}, but this run has {now} in block {index + 1}: its "
                f"router would see another input than it was trained with. Run with block.scale_router={was}."
            )


def _read_once(folder: Any, group: Any) -> tuple[Record, dict[int, bool]]:
    """The group's first rank reads and tells the others: a remote folder is asked once, and all stop together."""
    from olmo_core.distributed.utils import broadcast_object, get_global_rank, get_rank

    found: Any = None
    cause: Exception | None = None
    if get_rank(group) == 0:
        try:
            record = saved_record(folder)
            found = record, saved_routers(folder) if record.active else {}
        except LNSError as error:
            found = str(error)
        except Exception as error:  # of any kind: the others wait for an answer
            found, cause = f"{folder}: {_UNREADABLE} ({type(error).__name__}: {error})", error
    found = broadcast_object(found, src=get_global_rank(0, group), group=group)
    if isinstance(found, str):
        raise CheckpointMismatchError(found) from cause
    result: tuple[Record, dict[int, bool]] = found
    return result


def _parts(train_module: Any) -> list[Any]:
    """What a train module trains; several parts where a pipeline has split the model."""
    parts = getattr(train_module, "model_parts", None) or [getattr(train_module, "model", None)]
    return [part for part in parts if part is not None]


def _record_of(parts: list[Any]) -> Record:
    records = {record_of(part) for part in parts}
    if len(records) > 1:
        raise CheckpointMismatchError(f"parts of one model with different schemes: {records}")
    return records.pop() if records else Record()


def wrap_load(load: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``Checkpointer.load``."""

    def wrapped(self: Any, dir: Any, train_module: Any, **kwargs: Any) -> Any:
        check(dir, _parts(train_module), training=True)
        return load(self, dir, train_module, **kwargs)

    return wrapped


def wrap_load_model(load: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``load_model_and_optim_state``, by which everything but a trainer reads weights."""

    def wrapped(dir: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        check(dir, [model], training=False, group=kwargs.get("process_group"))
        return load(dir, model, *args, **kwargs)

    return wrapped


def wrap_save_hf(save: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``save_hf_model`` and ``save_hf_hybrid_model``, which copy the gains and know of no factor."""

    def wrapped(save_dir: Any, model_state_dict: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        record = record_of(model)
        try:
            allowed = check_match(record, Record(scaled_init=record.scaled_init), source="this model", training=False)
        except CheckpointMismatchError as error:
            raise CheckpointMismatchError(
                f"OLMo-core's converter drops the factor. {error} Or: olmo-lns export CHECKPOINT OUT --format hf"
            ) from None
        for difference in allowed:
            log.warning("converting to %s although the factor is lost (%s was allowed)", save_dir, difference)
        return save(save_dir, model_state_dict, model, *args, **kwargs)

    return wrapped


def wrap_save(save: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``Checkpointer.save`` and ``save_async``: what is saved is read from the model."""

    def wrapped(self: Any, dir: Any, train_module: Any, *args: Any, **kwargs: Any) -> Any:
        setattr(self, _RECORD, _record_of(_parts(train_module)))
        return save(self, dir, train_module, *args, **kwargs)

    return wrapped


def wrap_save_train_state(save: Callable[..., None]) -> Callable[..., None]:
    """Wrap ``Checkpointer._save_train_state``, which fills the folder that is renamed when it is complete."""

    def wrapped(self: Any, dir: Any, wd: Any, train_state: Any) -> None:
        from olmo_core.distributed.utils import get_rank

        save(self, dir, wd, train_state)
        record = getattr(self, _RECORD, Record())
        if record.active and get_rank() == 0:
            record.write(Path(wd))

    return wrapped
