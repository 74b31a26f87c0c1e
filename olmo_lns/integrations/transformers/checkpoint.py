"""What a folder says of its weights, compared with the model that they are loaded into.

transformers compares nothing: ``from_pretrained(folder, config=…)`` never reads the folder's config, and a resumed
``Trainer`` loads whatever weights the checkpoint holds. Both are wrapped by their public signatures. Weights that a
program loads by hand (``load_state_dict``) are its own.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, Callable, Mapping

from olmo_lns import environment
from olmo_lns.integrations.patching import Target, replace
from olmo_lns.integrations.transformers.configs import record_of
from olmo_lns.integrations.transformers.families import PREFIX
from olmo_lns.record import RECORD_FILE, Record, check_match
from olmo_lns.schemes import LNS

__all__ = ["guard_loading", "guard_resuming"]

log = logging.getLogger("olmo_lns")


def guard_loading(module: Any) -> None:
    """``transformers.modeling_utils``: no class loads or saves a folder of another scheme than it has."""

    def wrap(from_pretrained: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(cls: Any, name: Any, *args: Any, **kwargs: Any) -> Any:
            ours, config = str(getattr(cls.config_class, "model_type", "")).startswith(PREFIX), kwargs.get("config")
            saved = None
            if name is not None and not kwargs.get("gguf_file"):
                saved = _saved_record(name, kwargs if ours else {**kwargs, "local_files_only": True})
            if saved is not None and not ours:
                _compare(saved, Record(), name)
            elif saved is not None and hasattr(config, "model_type"):
                _compare(saved, record_of(config), name)
            elif saved is not None and not saved.active:  # whose config the model will have
                _compare(saved, Record(LNS, "", "plain"), name)
            return from_pretrained(cls, name, *args, **kwargs)

        return wrapped

    def saving(save_pretrained: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
            from olmo_lns.integrations.transformers.sites import require_named  # torch: not before a model is saved

            require_named(self)
            return save_pretrained(self, *args, **kwargs)

        return wrapped

    for name, make in (("from_pretrained", wrap), ("save_pretrained", saving)):
        replace(Target(f"transformers.modeling_utils:PreTrainedModel.{name}", {}), make, only_look=True)


def guard_resuming(module: Any) -> None:
    """``transformers.trainer``: a run resumes under the scheme that its checkpoint was trained with.

    Beside sharded weights (FSDP), where the Trainer writes no config, the record is written.
    """

    class KeepRecord(module.TrainerCallback):
        def on_save(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
            folder, record = Path(args.output_dir) / f"checkpoint-{state.global_step}", record_of(model.config)
            alone = folder.is_dir() and not (folder / "config.json").exists()
            if record.active and state.is_world_process_zero and alone:
                record.write(folder)

    def wrap(train: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(self: Any, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
            running, folder = record_of(getattr(self.model, "config", None)), resume_from_checkpoint
            if folder is True:
                folder = module.get_last_checkpoint(self.args.output_dir)
            if folder:
                saved = Record.read(folder) or _saved_record(str(folder), {"local_files_only": True})
                if saved is not None:
                    _compare(saved, running, folder)
                elif running.active and not Path(folder, "adapter_config.json").is_file():
                    log.warning("%s has no config.json and no %s: nothing is compared", folder, RECORD_FILE)
            if running.active:
                self.pop_callback(KeepRecord)
                self.add_callback(KeepRecord)
            return train(self, resume_from_checkpoint, *args, **kwargs)

        return wrapped

    replace(Target("transformers.trainer:Trainer.train", {}), wrap, only_look=True)


def _saved_record(name: Any, kwargs: Mapping[str, Any]) -> Record | None:
    """What ``config.json`` says; None, which is unknown and not Pre-LN, where there is none within reach.

    :param name: a folder, or a hub name. :param kwargs: of ``from_pretrained``, by which the hub is asked.
    """
    from transformers import PretrainedConfig

    known = ("cache_dir", "force_download", "local_files_only", "token", "revision", "subfolder")
    try:
        values, _ = PretrainedConfig.get_config_dict(name, **{key: kwargs[key] for key in known if key in kwargs})
    except OSError:
        return None
    if not values:  # as transformers 5 says of a folder without the file
        return None
    record = values.get("lns_record")
    return Record() if record is None else Record.from_dict(record, source=f"{name}: config.json: lns_record")


def _compare(saved: Record, running: Record, source: object) -> None:
    remedy = (
        "" if running.active else "load it by an Auto class (AutoModelForCausalLM.from_pretrained), without config="
    )
    for difference in check_match(saved, running, source=source, remedy=remedy):
        log.warning("loading %s although it differs (%s), as %s says", source, difference, environment.ALLOW_MISMATCH)
