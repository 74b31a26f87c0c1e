"""The record beside OLMo-core's checkpoints: written on save, compared before a weight is loaded.

OLMo-core's own ``Checkpointer.load`` compares no config: a run resumed without the flags would go on as Pre-LN.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, Callable

from olmo_lns import environment
from olmo_lns.doors.olmo_core.record import record_of, saved_record
from olmo_lns.errors import CheckpointMismatchError, LNSError
from olmo_lns.record import Record, check_match

__all__ = ["check", "wrap_load", "wrap_load_model", "wrap_save", "wrap_save_hf", "wrap_save_train_state"]

log = logging.getLogger("olmo_lns")

_RECORD = "_olmo_lns_record"


def check(folder: Any, running: Record, *, training: bool) -> None:
    """:raises CheckpointMismatchError: the checkpoint and the model that runs disagree."""
    saved = _read_once(folder)
    for difference in check_match(saved, running, source=folder, training=training):
        log.warning("loading %s although it differs (%s), as %s says", folder, difference, environment.ALLOW_MISMATCH)


def _read_once(folder: Any) -> Record:
    """Rank 0 reads and tells the others: a remote folder is asked once, and all ranks stop together."""
    from olmo_core.distributed.utils import broadcast_object, get_rank

    found: Any = None
    if get_rank() == 0:
        try:
            found = saved_record(folder)
        except LNSError as error:
            found = str(error)
    found = broadcast_object(found)
    if isinstance(found, str):
        raise CheckpointMismatchError(found)
    record: Record = found
    return record


def _running(train_module: Any) -> Record:
    """The record of what a train module trains; its parts where a pipeline has split the model."""
    parts = getattr(train_module, "model_parts", None) or [getattr(train_module, "model", None)]
    records = {record_of(part) for part in parts if part is not None}
    if len(records) > 1:
        raise CheckpointMismatchError(f"parts of one model with different schemes: {records}")
    return records.pop() if records else Record()


def wrap_load(load: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``Checkpointer.load``."""

    def wrapped(self: Any, dir: Any, train_module: Any, **kwargs: Any) -> Any:
        check(dir, _running(train_module), training=True)
        return load(self, dir, train_module, **kwargs)

    return wrapped


def wrap_load_model(load: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``load_model_and_optim_state``, by which everything but a trainer reads weights."""

    def wrapped(dir: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        check(dir, record_of(model), training=False)
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
        setattr(self, _RECORD, _running(train_module))
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
