"""The record of OLMo-core's checkpoints: read from the built model, written with its weights, compared on load.

OLMo-core compares no config: a run that is resumed without the flags would go on as Pre-LN. Its Hugging Face
converter copies tensors and knows no factor. Both are guarded. Weights that a program loads by hand are not checked.
"""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Callable

from olmo_lns.errors import CheckpointMismatchError, LNSError
from olmo_lns.integrations.olmo_core.config import CLASS, CONFIG_FILE, blocks_of, from_config
from olmo_lns.record import RECORD_FILE, Record, check_match, keep_folded, record_to_save, require_match

log = logging.getLogger("olmo_lns")

#: The weights' own folder in a checkpoint of OLMo-core's trainer.
WEIGHTS = "model_and_optim"
_RECORD = "_olmo_lns_record"


def saved_record(folder: Any) -> Record | None:
    """The record of a checkpoint folder, local or remote: ``lns.json``, else what ``config.json`` says.

    None where there is neither, as beside weights that were saved alone without this package.

    :raises CheckpointMismatchError: either of them cannot be read.
    """
    if (path := _find(folder, RECORD_FILE)) is not None:
        return Record.from_json(path)
    if (path := _find(folder, CONFIG_FILE)) is not None:
        return from_config(_json(path), source=f"{folder}: {CONFIG_FILE}")
    return None


def saved_routers(folder: Any) -> dict[int, bool]:
    """``scale_router`` of each block (from 0) with a scheme, of which ``lns.json`` knows nothing.

    Empty where the checkpoint has no ``config.json``.

    :raises CheckpointMismatchError: it cannot be read.
    """
    if (path := _find(folder, CONFIG_FILE)) is None:
        return {}
    blocks = enumerate(blocks_of(_json(path)))
    return {index: bool(block.get("scale_router", True)) for index, block in blocks if block.get("_CLASS_") == CLASS}


def _find(folder: Any, name: str) -> Path | None:
    """The file ``name`` of a checkpoint, in its folder or in the folder of its weights; either may be named."""
    base = str(folder).rstrip("/")
    whole = base.removesuffix(f"/{WEIGHTS}")
    for place in (base, whole if whole != base else f"{base}/{WEIGHTS}"):
        if (path := _local(f"{place}/{name}")) is not None:
            return path
    return None


def _local(path: str) -> Path | None:
    if "://" not in path:
        return Path(path) if Path(path).is_file() else None
    from olmo_core.io import file_exists

    if not file_exists(path):
        return None
    from cached_path import cached_path

    return Path(cached_path(path, quiet=True))


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointMismatchError(f"{path} cannot be read: {error}") from None


def check(folder: Any, parts: list[Any], *, group: Any = None) -> None:
    """Compare a checkpoint with the model before its weights are loaded; keep a record of folded weights for saving.

    :param group: the processes that load, default all.
    :raises CheckpointMismatchError: the checkpoint and the model that runs, in its parts, disagree.
    """
    saved, routers = _read_once(folder, group)
    running = _record_of_parts(parts)
    _compare(saved, running, folder)
    if saved is not None and saved.active and running.active:
        for part in parts:
            _require_routers(folder, routers, _blocks().routers_of(part))
    for part in parts:
        keep_folded(part, saved)


def _compare(saved: Record | None, running: Record, source: Any) -> None:
    remedy = f"--model.block._CLASS_={CLASS} --model.block.scheme={saved.scheme}" if saved and saved.active else ""
    files, allowed = f"{RECORD_FILE} nor {CONFIG_FILE}", f"preln-to-{running.running}"
    require_match(saved, running, source=source, files=files, remedy=remedy, or_allowed=allowed)


def _require_routers(folder: Any, saved: dict[int, bool], running: dict[int, bool]) -> None:
    for index in sorted(saved.keys() & running.keys()):
        if saved[index] != running[index]:
            was, now = (str(value[index]).lower() for value in (saved, running))
            raise CheckpointMismatchError(
                f"{folder} was saved with block.scale_router={was}, but this run has {now} in block {index + 1}: its "
                f"router would see another input than it was trained with. Run with block.scale_router={was}."
            )


def _read_once(folder: Any, group: Any) -> tuple[Record | None, dict[int, bool]]:
    """The group's first rank reads and tells the others: a remote folder is read once, and all ranks stop together."""
    from olmo_core.distributed.utils import broadcast_object, get_global_rank, get_rank

    found: Any = None
    cause: Exception | None = None
    if get_rank(group) == 0:
        try:
            record = saved_record(folder)
            found = record, saved_routers(folder) if record is not None and record.active else {}
        except LNSError as error:
            found = str(error)
        except Exception as error:  # of any kind: the others wait for an answer
            cause = error
            found = (
                f"{folder}: {RECORD_FILE} and {CONFIG_FILE} cannot be looked for; expected a folder or URL that this "
                f"process can read ({type(error).__name__}: {error})"
            )
    found = broadcast_object(found, src=get_global_rank(0, group), group=group)
    if isinstance(found, str):
        raise CheckpointMismatchError(found) from cause
    result: tuple[Record | None, dict[int, bool]] = found
    return result


def _blocks() -> Any:
    """Import OLMo-core only when there is a model, not when a checkpoint is read as files."""
    from olmo_lns.integrations.olmo_core import blocks

    return blocks


def _parts(train_module: Any) -> list[Any]:
    """The models that a train module trains: several if a pipeline has split the model."""
    parts = getattr(train_module, "model_parts", None) or [getattr(train_module, "model", None)]
    return [part for part in parts if part is not None]


def _record_of_parts(parts: list[Any]) -> Record:
    records = {_blocks().record_of(part) for part in parts}
    if len(records) > 1:
        raise CheckpointMismatchError(f"parts of one model with different schemes: {records}")
    return records.pop() if records else Record()


def wrap_load(load: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``Checkpointer.load``."""

    def wrapped(self: Any, dir: Any, train_module: Any, **kwargs: Any) -> Any:
        check(dir, _parts(train_module))
        return load(self, dir, train_module, **kwargs)

    return wrapped


def wrap_load_model(load: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``load_model_and_optim_state``, by which everything but a trainer reads weights."""

    def wrapped(dir: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        check(dir, [model], group=kwargs.get("process_group"))
        return load(dir, model, *args, **kwargs)

    return wrapped


def wrap_load_generation(load: Callable[..., None]) -> Callable[..., None]:
    """Wrap ``TransformerGenerationModule.load_checkpoint``, whose model may have a config of the caller's."""

    def wrapped(self: Any, checkpoint_dir: Any, *args: Any, **kwargs: Any) -> None:
        check(checkpoint_dir, [self.model], group=kwargs.get("process_group"))
        load(self, checkpoint_dir, *args, **kwargs)

    return wrapped


def wrap_average(from_checkpoints: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``TransformerGenerationModule.from_checkpoints``, which averages weights, each by its own config."""

    def wrapped(cls: Any, checkpoint_dirs: list[Any], *args: Any, **kwargs: Any) -> Any:
        found = [(each, _read_once(each, kwargs.get("process_group"))[0]) for each in checkpoint_dirs]
        if len({(saved.scheme, saved.norm) if saved.active else None for _, saved in found if saved is not None}) > 1:
            has = ", ".join(f"{folder} has {saved}" for folder, saved in found)
            raise CheckpointMismatchError(f"{has}: different models have no average. Average those of one scheme.")
        return from_checkpoints(cls, checkpoint_dirs, *args, **kwargs)

    return wrapped


def wrap_save(save: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``Checkpointer.save`` and ``save_async``: what is saved is read from the model."""

    def wrapped(self: Any, dir: Any, train_module: Any, *args: Any, **kwargs: Any) -> Any:
        parts = _parts(train_module)
        record = _record_of_parts(parts)
        setattr(self, _RECORD, record_to_save(parts[0], record) if parts else record)
        return save(self, dir, train_module, *args, **kwargs)

    return wrapped


def wrap_save_train_state(save: Callable[..., None]) -> Callable[..., None]:
    """Wrap ``Checkpointer._save_train_state``, which fills the folder that is renamed when it is complete."""

    def wrapped(self: Any, dir: Any, wd: Any, train_state: Any) -> None:
        from olmo_core.distributed.utils import get_rank

        save(self, dir, wd, train_state)
        record = getattr(self, _RECORD, Record())
        if (record.active or record.folded) and get_rank() == 0:
            record.write(Path(wd))

    return wrapped


def wrap_save_model(save: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``save_model_and_optim_state`` and its async form: the record goes into the weights' own folder."""

    def wrapped(dir: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        from olmo_core.distributed.utils import get_fs_local_rank, get_rank
        from olmo_core.io import copy_file, is_url, normalize_path

        record, group = record_to_save(model, _blocks().record_of(model)), kwargs.get("process_group")
        known = record.active or record.folded
        result = save(dir, model, *args, **kwargs)
        folder = normalize_path(dir)
        if known and not is_url(folder) and get_fs_local_rank(group) == 0:
            record.write(folder)
        elif known and is_url(folder) and get_rank(group) == 0:
            with TemporaryDirectory() as here:
                copy_file(record.write(here), f"{folder}/{RECORD_FILE}", save_overwrite=True)
        return result

    return wrapped


def wrap_save_hf(save: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``save_hf_model`` and ``save_hf_hybrid_model``, which copy the gains and know of no factor."""

    def wrapped(save_dir: Any, model_state_dict: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        record = _blocks().record_of(model)
        try:
            allowed = check_match(record, Record(scaled_init=record.scaled_init), source="this model")
        except CheckpointMismatchError as error:
            raise CheckpointMismatchError(
                f"OLMo-core's converter drops the factor. {error} Or: olmo-lns export CHECKPOINT OUT --format hf"
            ) from None
        for difference in allowed:
            log.warning("converting to %s although the factor is lost (%s was allowed)", save_dir, difference)
        return save(save_dir, model_state_dict, model, *args, **kwargs)

    return wrapped


def wrap_load_hf(load: Callable[..., None]) -> Callable[..., None]:
    """Wrap ``load_hf_model``: a folder whose weights need a scheme is refused, and others' tensors are marked.

    It fills a plain dict and does not know the model. A block with a scheme looks for the mark when the dict is loaded
    into it (:func:`compare_converted`).
    """

    def wrapped(model_name_or_path: Any, model_state_dict: Any, **kwargs: Any) -> None:
        saved = _converted_record(model_name_or_path, kwargs.get("revision", "main"))
        try:
            _compare(saved, Record(), model_name_or_path)
        except CheckpointMismatchError as error:
            raise CheckpointMismatchError(
                f"OLMo-core's converter copies tensors and knows no factor, whatever model they are for. {error} Or "
                f"fold it first: olmo-lns export {model_name_or_path} OUT --format hf"
            ) from None
        before = dict(model_state_dict)
        load(model_name_or_path, model_state_dict, **kwargs)
        for name, tensor in model_state_dict.items():
            if tensor is not before.get(name):
                setattr(tensor, _RECORD, saved)

    return wrapped


def _converted_record(name: Any, revision: str) -> Record:
    """The record of a Hugging Face folder, URL or hub name."""
    if (path := _local(f"{name}/{CONFIG_FILE}")) is not None:
        values = _json(path)
    else:
        from transformers import PretrainedConfig

        values, _ = PretrainedConfig.get_config_dict(name, revision=revision)
    record = values.get("lns_record")
    return Record() if record is None else Record.from_dict(record, source=f"{name}: {CONFIG_FILE}: lns_record")


def compare_converted(block: Any, state_dict: dict[str, Any], *_: Any) -> None:
    """A hook that runs before ``load_state_dict`` of a block with a scheme.

    :raises CheckpointMismatchError: the weights came through :func:`wrap_load_hf` and are of another model.
    """
    for tensor in state_dict.values():
        if (saved := getattr(tensor, _RECORD, None)) is not None:
            _compare(saved, replace(_blocks().record_of(block), norm=saved.norm), "what load_hf_model read")
            return
