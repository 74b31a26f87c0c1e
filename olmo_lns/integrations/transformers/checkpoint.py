"""Compares what a folder says of its weights with the model that loads or saves them.

transformers compares nothing: ``from_pretrained(folder, config=…)`` never reads the folder's config, a resumed
``Trainer`` loads whatever weights the checkpoint holds, and ``save_pretrained`` writes the config as it is. All three
are wrapped by their public signatures. Weights that a program loads by hand (``load_state_dict``) are not checked.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, Callable, Iterator, Mapping

from olmo_lns.errors import CheckpointMismatchError
from olmo_lns.integrations.patching import Target, replace
from olmo_lns.integrations.transformers.families import PREFIX
from olmo_lns.integrations.transformers.models import own_config, record_of, record_of_model, set_folded
from olmo_lns.record import RECORD_FILE, Record, require_match
from olmo_lns.schemes import LNS

log = logging.getLogger("olmo_lns")


def guard_loading(module: Any) -> None:
    """Guard ``transformers.modeling_utils``: no class loads or saves a folder of another scheme than its own."""

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
            result = from_pretrained(cls, name, *args, **kwargs)
            model = result[0] if isinstance(result, tuple) else result  # with output_loading_info
            if record_of(model.config).folded and (saved is None or saved.folded):
                set_folded(model)
            return result

        return wrapped

    def saving(save_pretrained: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
            _require_recorded(self)
            if record_of(self.config) != record_of_model(self):
                config = vars(own_config(self))  # another model may have it, of folded weights
                del config["lns"], config["lns_record"]
            return save_pretrained(self, *args, **kwargs)

        return wrapped

    for name, make in (("from_pretrained", wrap), ("save_pretrained", saving)):
        replace(Target(f"transformers.modeling_utils:PreTrainedModel.{name}", {}), make, only_look=True)


def _require_recorded(model: Any) -> None:
    """Check that a folder of ``model``, or of a model around one of ours, will load as the model that was built.

    :raises CheckpointMismatchError: a model of ours was changed since it was built, a stock model has blocks of which
        its config does not know, or its config names a scheme that nothing inside has.
    """
    from transformers import PreTrainedModel

    from olmo_lns.integrations import norm_sites  # torch: not before a model is saved
    from olmo_lns.integrations.transformers.sites import require_as_recorded

    inside: dict[int, Any] = {}  # the outermost model of each config; fully_shard derives classes of its own
    for module in model.modules():
        if isinstance(module, PreTrainedModel) and record_of(module.config).active:
            inside.setdefault(id(module.config), module)
    built = {(record_of(each.config), each.config.num_hidden_layers) for each in inside.values()}
    said = {(record_of(each), each.num_hidden_layers) for each in _configs(model.config) if record_of(each).active}
    known = {id(carrier) for each in inside.values() for _, carrier, _ in norm_sites.sites(each)}
    if built != said or any(id(carrier) not in known for _, carrier, _ in norm_sites.sites(model)):
        found = [f"{record} on {layers} blocks" for record, layers in built] or ["none"]
        named = [f"{record} on {layers} blocks" for record, layers in said] or ["none"]
        raise CheckpointMismatchError(
            f"{type(model).__name__} has blocks under a scheme and a config without one, or the reverse (models: "
            f"{', '.join(found)}; config: {', '.join(named)}): its folder would load as another model. Apply the "
            "scheme to the whole model (olmo_lns.integrations.transformers.apply) or load such a head by its Auto "
            "class. Around a model that was changed by apply or fold, put its config into the outer one "
            "(model.config.text_config = model.language_model.config). Or fold the model inside before saving."
        )
    for each in inside.values():
        require_as_recorded(each, record_of(each.config))


def _configs(config: Any) -> Iterator[Any]:
    """A config and the configs inside it."""
    yield config
    for value in vars(config).values():
        if hasattr(value, "model_type"):
            yield from _configs(value)


def guard_resuming(module: Any) -> None:
    """Guard ``transformers.trainer``: a run resumes under the scheme that its checkpoint was trained with.

    Beside sharded weights (FSDP) the Trainer writes no config: the record is written there.
    """

    class KeepRecord(module.TrainerCallback):
        def on_save(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
            folder, record = Path(args.output_dir) / f"checkpoint-{state.global_step}", record_of(model.config)
            alone = folder.is_dir() and not (folder / "config.json").exists()
            if record.active and state.is_world_process_zero and alone:
                record.write(folder)

    def wrap(train: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(self: Any, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
            running, folder = record_of_model(self.model), resume_from_checkpoint
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
    """The record in ``config.json``. None, which means unknown and not Pre-LN, if no such file can be reached.

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
    require_match(saved, running, source=source, remedy=remedy)
