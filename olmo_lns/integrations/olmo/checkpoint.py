"""The LNS record beside every OLMo checkpoint: written on save, compared on load."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any, Callable

from olmo_lns.errors import CheckpointMismatchError
from olmo_lns.integrations.olmo.types import is_lns, resolve
from olmo_lns.record import OVERRIDE_VARIABLE, RECORD_FILE, LNSRecord, check_match
from olmo_lns.settings import Settings

__all__ = ["check_checkpoint", "running_record", "saved_record", "wrap_from_checkpoint", "wrap_restore", "wrap_save"]

log = logging.getLogger("olmo_lns")

#: Accepted in the override variable for an LNS checkpoint whose record was lost.
MISSING_RECORD = "missing-record"


def running_record(model_config: Any) -> LNSRecord:
    """What this process does for ``model_config`` (an OLMo ``ModelConfig``) under the current settings."""
    settings = Settings.current()
    if not is_lns(model_config.layer_norm_type):
        # Without LNS upstream's initialization is kept, whether asked for ("keep") or not ("auto").
        return LNSRecord(scaled_init="off" if settings.scaled_init == "off" else "auto")
    name = resolve(str(model_config.layer_norm_type), "rms")
    return LNSRecord.lns(name, settings.exponent, scaled_init="keep" if settings.scaled_init == "keep" else "auto")


def saved_record(folder: Any, *, local_cache: Any = None) -> LNSRecord:
    """The record of a checkpoint folder (local or remote, as OLMo's ``resource_path`` takes it).

    A checkpoint without a record is what its config.yaml says, which for Pre-LN is everything.

    :raises CheckpointMismatchError: its config.yaml names LNS but the record is gone, so that the
        exponent is unknown (OLMo's ``unshard.py`` copies config.yaml only).
    """
    path = _resource(folder, RECORD_FILE, local_cache)
    if path is not None:
        return LNSRecord.from_json(path)
    config = _resource(folder, "config.yaml", local_cache)
    if config is None:
        return LNSRecord()
    from omegaconf import OmegaConf

    name = OmegaConf.select(OmegaConf.load(str(config)), "model.layer_norm_type")
    if not is_lns(name):
        return LNSRecord()
    if MISSING_RECORD not in os.environ.get(OVERRIDE_VARIABLE, ""):
        raise CheckpointMismatchError(
            f"{folder}: config.yaml names layer_norm_type {name}, but {RECORD_FILE} is missing, so the exponent is "
            f"unknown. Copy {RECORD_FILE} from the checkpoint it was made from, or set "
            f"{OVERRIDE_VARIABLE}={MISSING_RECORD} to assume exponent 0.5."
        )
    return LNSRecord.lns(resolve(str(name), "rms"))


def _resource(folder: Any, name: str, local_cache: Any) -> Path | None:
    if "://" not in str(folder):
        for base in (local_cache, folder):
            if base is not None and (path := Path(base) / name).is_file():
                return path
        return None
    from olmo.util import resource_path

    try:
        return resource_path(folder, name, local_cache=local_cache)
    except FileNotFoundError:
        return None


def check_checkpoint(folder: Any, model_config: Any, *, training: bool, local_cache: Any = None) -> None:
    """:raises CheckpointMismatchError: the checkpoint and the running configuration disagree."""
    saved = saved_record(folder, local_cache=local_cache)
    for accepted in check_match(saved, running_record(model_config), source=folder, training=training):
        log.warning("loading %s although it differs (%s), as %s says", folder, accepted, OVERRIDE_VARIABLE)


def wrap_save(save_config: Callable[..., None]) -> Callable[..., None]:
    """Wrap ``Checkpointer._save_config``, which writes into the folder that is renamed when complete."""

    def wrapped(self: Any, dir: Any, *, upload_to: str | None = None) -> None:
        from olmo.torch_util import get_global_rank
        from olmo.util import upload

        save_config(self, dir, upload_to=upload_to)
        record = running_record(self.cfg.model)
        if record == LNSRecord() or get_global_rank() != 0:
            return
        path = record.write(dir)
        if upload_to is not None:
            upload(path, f"{upload_to}/{RECORD_FILE}", save_overwrite=self.cfg.save_overwrite)

    return wrapped


def wrap_restore(restore: Callable[..., None]) -> Callable[..., None]:
    """Wrap ``Trainer.restore_checkpoint``: compare before a single weight is loaded."""

    def wrapped(self: Any, load_path: Any, **kwargs: Any) -> None:
        check_checkpoint(load_path, self.cfg.model, training=True, local_cache=kwargs.get("local_cache"))
        restore(self, load_path, **kwargs)

    return wrapped


def wrap_from_checkpoint(from_checkpoint: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``OLMo.from_checkpoint``, which takes the type from config.yaml and the rest from settings."""

    def wrapped(cls: Any, checkpoint_dir: Any, *args: Any, **kwargs: Any) -> Any:
        from olmo.config import ModelConfig
        from olmo.util import resource_path

        config = ModelConfig.load(resource_path(checkpoint_dir, "config.yaml"), key="model", validate_paths=False)
        check_checkpoint(checkpoint_dir, config, training=False)
        return from_checkpoint(cls, checkpoint_dir, *args, **kwargs)

    return wrapped
