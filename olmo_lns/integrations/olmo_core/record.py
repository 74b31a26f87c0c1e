"""What identifies a model of OLMo-core: read from the built model, or from what a checkpoint keeps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Iterator

from olmo_lns.errors import CheckpointMismatchError, LNSError
from olmo_lns.record import RECORD_FILE, Record

__all__ = ["CLASS", "CONFIG_FILE", "from_config", "record_of", "routers_of", "saved_record", "saved_routers"]

#: The block config's name in saved configs.
CLASS = "olmo_lns.olmo_core.BlockConfig"
#: Where OLMo-core's ConfigSaverCallback writes a run's config, inside each checkpoint.
CONFIG_FILE = "config.json"


def record_of(model: Any) -> Record:
    """The record of a built model, or of one stage of it.

    :raises UpstreamChangedError: a site of its blocks is not there any more.
    """
    from olmo_lns.integrations import norm_sites
    from olmo_lns.integrations.olmo_core import blocks, initialization

    scheme = norm_sites.read_back(model)
    if scheme.is_pre_ln:
        return Record()
    found = _built_blocks(model)
    for block in found:
        blocks.require_one_factor(block)
    drawn = {initialization.initialization_of(block) for block in found}
    norm = next(module for _, module, _ in norm_sites.sites(model)).lns_base
    return Record(scheme, norm, drawn.pop() if len(drawn) == 1 else "upstream")


def routers_of(model: Any) -> dict[int, bool]:
    """``scale_router`` of each block (from 0) of a built model that has a router."""
    from olmo_lns.integrations.olmo_core.blocks import sees_factor

    routers = {b.block_idx: getattr(getattr(b, "feed_forward_moe", None), "router", None) for b in _built_blocks(model)}
    return {index: sees_factor(router) for index, router in routers.items() if router is not None}


def _built_blocks(model: Any) -> list[Any]:
    return [each for name, each in model.named_modules() if name.split(".")[-2:-1] == ["blocks"]]


def from_config(config: Any, *, source: object) -> Record:
    """The record of a run's config, as a plain dict (``model`` inside it, or the model's own).

    :raises CheckpointMismatchError: its blocks name different schemes, or one that this version does not know.
    """
    from olmo_lns.schemes.initialization import INITIALIZATIONS

    records = set()
    for block in _blocks(_model(config)):
        if block.get("_CLASS_") != CLASS:
            records.add(Record())
            continue
        try:
            scheme = _scheme(block)
        except LNSError as error:
            raise CheckpointMismatchError(f"{source}: {error}") from None
        norm = (block.get("layer_norm") or {}).get("name", "default")
        drawn = block.get("initialization") or "plain"
        records.add(Record(scheme, str(norm), drawn if drawn in INITIALIZATIONS else "upstream"))
    if len(records) > 1:
        raise CheckpointMismatchError(f"{source}: blocks of one model with different schemes: {records}")
    return records.pop() if records else Record()


def _model(config: Any) -> dict[str, Any]:
    model = config.get("model", config) if isinstance(config, dict) else None
    return model if isinstance(model, dict) else {}


def _scheme(block: dict[str, Any]) -> Any:
    from olmo_lns.integrations.olmo_core.schemes import scheme_of

    return scheme_of(block.get("scheme", "lns"), exponent=block.get("exponent"))


def _blocks(model: dict[str, Any]) -> Iterator[dict[str, Any]]:
    block = model.get("block")
    if not isinstance(block, dict):
        return
    named = "sequence_mixer" not in block and "attention" not in block
    yield from (each for each in (block.values() if named else [block]) if isinstance(each, dict))
    yield from (each for each in (model.get("block_overrides") or {}).values() if isinstance(each, dict))


def saved_record(folder: Any) -> Record:
    """The record of a checkpoint folder, local or remote: ``lns.json``, else what ``config.json`` says, else Pre-LN.

    :raises CheckpointMismatchError: either of them cannot be read.
    """
    for base in _bases(folder):
        path = _local(f"{base}/{RECORD_FILE}")
        if path is not None:
            return Record.from_json(path)
        path = _local(f"{base}/{CONFIG_FILE}")
        if path is not None:
            return from_config(_json(path), source=f"{base}/{CONFIG_FILE}")
    return Record()


def saved_routers(folder: Any) -> dict[int, bool]:
    """``scale_router`` of each block (from 0) with a scheme, of which ``lns.json`` knows nothing.

    Empty where the checkpoint has no ``config.json``.

    :raises CheckpointMismatchError: it cannot be read.
    """
    for base in _bases(folder):
        path = _local(f"{base}/{CONFIG_FILE}")
        if path is not None:
            configs = _blocks_in_order(_model(_json(path)))
            return {i: bool(b.get("scale_router", True)) for i, b in enumerate(configs) if b.get("_CLASS_") == CLASS}
    return {}


def _blocks_in_order(model: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The config of every block, as OLMo-core resolves it."""
    block, pattern, overrides = (model.get(f"block{end}") or {} for end in ("", "_pattern", "_overrides"))
    for index in range(model.get("n_layers", 0)):
        yield block[pattern[index % len(pattern)]] if pattern else overrides.get(str(index), block)


def _bases(folder: Any) -> list[str]:
    """A checkpoint's folder; the weights' own folder is one below it."""
    base = str(folder).rstrip("/")
    return [base, base.rpartition("/")[0]] if base.endswith("/model_and_optim") else [base]


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
