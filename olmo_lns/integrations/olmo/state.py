"""Keeps the scheme in an OLMo checkpoint: a record beside the weights, and a mark in the trainer's state.

The record is written on every save, from the built model, and compared on every load. The mark is for an OLMo that
runs without the plugin (``OLMO_LNS_DISABLE=1``), where nothing of ours compares: OLMo's Trainer unpickles its state
(train.pt, train/rank*.pt, rank*.pt) in every restore, and under a scheme that state holds one more member, which only
:func:`needs_olmo_lns` can rebuild. Saved checkpoints hold the name of that function and of this module.
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any, Callable

import torch

from olmo_lns import environment
from olmo_lns.errors import CheckpointMismatchError, one_line
from olmo_lns.integrations.olmo import types
from olmo_lns.integrations.olmo.model import record_of
from olmo_lns.integrations.patching import is_patched
from olmo_lns.record import RECORD_FILE, Record, keep_folded, record_to_save, require_match

log = logging.getLogger("olmo_lns")

#: Of the member. No word that another part of the state could share with it in the pickle.
KEY = "trained under a scheme of olmo-lns"


class Mark:
    """:param record: of the model that was saved, in words. :param values: the record; a mark before 0.2 has none."""

    def __init__(self, record: str, values: dict[str, Any] | None = None) -> None:
        self.record, self.values = record, values

    def __reduce__(self) -> tuple[Callable[..., Mark], tuple[str, dict[str, Any] | None]]:
        return needs_olmo_lns, (self.record, self.values)


def needs_olmo_lns(record: str, values: dict[str, Any] | None = None) -> Mark:
    """Rebuild the mark. Its module and name stand in saved checkpoints and are never changed.

    :raises CheckpointMismatchError: OLMo runs in this process, and without the plugin.
    """
    config = sys.modules.get("olmo.config")
    if config is not None and not is_patched(config.BaseConfig.load):
        how = f"unset {environment.DISABLE}" if environment.is_set(environment.DISABLE) else "launch with -m olmo_lns"
        raise CheckpointMismatchError(
            f"this checkpoint was saved with {record}, but OLMo runs here without olmo-lns: its blocks would run "
            f"without the scheme it was trained with. To resume it, {how}; for stock OLMo, fold it: "
            "olmo-lns export CHECKPOINT OUT --format olmo."
        )
    return Mark(record, values)


# For torch's ``weights_only=True``, by which ai2-olmo 0.6.0 loads under torch 2.6 and newer.
torch.serialization.add_safe_globals([needs_olmo_lns])


def wrap_trainer_state(trainer_state_dict: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """Wrap ``Trainer.trainer_state_dict``, what every checkpointer of OLMo's saves beside model and optimizer."""

    def wrapped(self: Any) -> dict[str, Any]:
        state = trainer_state_dict(self)
        record = record_of(self.model)
        return {**state, KEY: Mark(str(record), record.as_dict())} if record.active else state

    return wrapped


def saved_record(folder: Any, *, local_cache: Any = None) -> Record | None:
    """The record of a checkpoint folder (local or remote, as OLMo's ``resource_path`` takes it).

    A checkpoint without a record (``unshard.py`` and averaging copy config.yaml only) is what its config.yaml says:
    the type holds every parameter. None where there is neither.

    :raises CheckpointMismatchError: lns.json is no record, or cannot be read although config.yaml names a scheme.
    """
    refused = ""
    try:
        if (path := _resource(folder, RECORD_FILE, local_cache)) is not None:
            return Record.from_json(path)
    except CheckpointMismatchError:
        raise
    except Exception as error:  # each store's client raises its own, also for a file that is only not there
        refused = f"{RECORD_FILE} cannot be read: {one_line(error)}"
    if (path := _resource(folder, "config.yaml", local_cache)) is None:
        return None
    from omegaconf import OmegaConf

    model = OmegaConf.select(OmegaConf.load(str(path)), "model", default={})
    name = model.get("layer_norm_type")
    record = types.written_record(name, model.get("init_fn"))
    if refused and record.active:
        raise CheckpointMismatchError(
            f"{folder}: config.yaml names layer_norm_type {name}, and {refused}. Give this process access to it, or "
            "load a local copy of the checkpoint."
        )
    if refused or record.active:
        level, why = (logging.WARNING, refused) if refused else (logging.INFO, f"there is no {RECORD_FILE}")
        log.log(level, "%s: %s; its config.yaml says layer_norm_type %s", folder, why, name)
    return record


def _resource(folder: Any, name: str, local_cache: Any) -> Path | None:
    if "://" not in str(folder):
        places = (Path(base) / name for base in (local_cache, folder) if base is not None)
        return next((path for path in places if path.is_file()), None)
    from olmo.util import resource_path

    try:
        return resource_path(folder, name, local_cache=local_cache)
    except FileNotFoundError:
        return None


def check_checkpoint(folder: Any, running: Record, *, local_cache: Any = None) -> Record | None:
    """:returns: the checkpoint's record.

    :raises CheckpointMismatchError: the checkpoint and the model that runs disagree, or a scheme runs and the folder
        says nothing.
    """
    if "://" not in str(folder) and not Path(folder).exists():
        return None  # OLMo says so
    saved = saved_record(folder, local_cache=local_cache)
    _compare(saved, running, folder)
    return saved


def _compare(saved: Record | None, running: Record, folder: Any) -> None:
    kind = running.norm or "rms"
    if saved is not None and saved.active:
        kept = running.norm in ("", saved.norm)
        kind = str(saved.scheme) if kept else types.spell(saved.scheme, saved.norm)
    files, remedy = f"config.yaml nor {RECORD_FILE}", f"--model.layer_norm_type={kind}"
    require_match(saved, running, source=folder, files=files, remedy=remedy)


def wrap_save(save: Callable[..., None]) -> Callable[..., None]:
    """Wrap a checkpointer's ``save_checkpoint``: what is saved is read from the model, before anything is written."""

    def wrapped(self: Any, dir: Any, dist_model: Any, *args: Any, **kwargs: Any) -> None:
        model = getattr(dist_model, "module", dist_model)
        record = record_of(model)
        kind = self.cfg.model.layer_norm_type
        if types.scheme_of(kind) != record.scheme or (record.active and types.base_type(kind) != record.norm):
            raise CheckpointMismatchError(
                f"{dir}: the model to be saved has {record}, but the config saved with it names layer_norm_type "
                f"{kind!s}. Give the checkpointer the config that the model was built from."
            )
        self.lns_record = record_to_save(model, record)  # for _save_config
        save(self, dir, dist_model, *args, **kwargs)

    return wrapped


def wrap_save_config(save_config: Callable[..., None]) -> Callable[..., None]:
    """Wrap ``Checkpointer._save_config``, which writes into the folder that is renamed when complete."""

    def wrapped(self: Any, dir: Any, *, upload_to: str | None = None) -> None:
        from olmo.torch_util import get_global_rank
        from olmo.util import upload

        save_config(self, dir, upload_to=upload_to)
        record = getattr(self, "lns_record", Record())
        if record != Record() and get_global_rank() == 0:
            path = record.write(dir)
            if upload_to is not None:
                upload(path, f"{upload_to}/{RECORD_FILE}", save_overwrite=self.cfg.save_overwrite)

    return wrapped


def wrap_restore(restore: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """Wrap a checkpointer's ``restore_checkpoint``: compare with the built model before a single weight is loaded."""

    def wrapped(self: Any, load_path: Any, dist_model: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        model = getattr(dist_model, "module", dist_model)
        running = record_of(model)
        saved = check_checkpoint(load_path, running, local_cache=kwargs.get("local_cache"))
        found = restore(self, load_path, dist_model, *args, **kwargs)
        mark = found.get(KEY)
        if mark is not None and mark.values is not None:  # what the folder's files may have lost
            _compare(Record.from_dict(mark.values, source="the trainer's state"), running, load_path)
        keep_folded(model, saved)
        return found

    return wrapped


def wrap_from_checkpoint(from_checkpoint: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``OLMo.from_checkpoint``, which takes the type from config.yaml and the rest from settings."""

    def wrapped(cls: Any, checkpoint_dir: Any, *args: Any, **kwargs: Any) -> Any:
        from olmo.config import ModelConfig
        from olmo.util import resource_path

        config = ModelConfig.load(resource_path(checkpoint_dir, "config.yaml"), key="model", validate_paths=False)
        check_checkpoint(checkpoint_dir, types.asked_record(config))
        return from_checkpoint(cls, checkpoint_dir, *args, **kwargs)

    return wrapped
