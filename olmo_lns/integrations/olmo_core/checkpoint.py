"""Compare an OLMo-core checkpoint's ``config.json`` with the built model before its weights are loaded.

OLMo-core does not compare configs. Without this check, a run that is resumed without the flags of its scheme would
continue as Pre-LN. The config is read as a plain dict, and this module does not import OLMo-core.
"""

from __future__ import annotations

import json
from typing import Any, Callable

from olmo_lns.errors import CheckpointMismatchError, LNSConfigError, LNSError, one_line
from olmo_lns.integrations.olmo_core.model import scheme_of_model
from olmo_lns.processes import on_first_rank
from olmo_lns.records import require_same
from olmo_lns.schemes import PRE_LN, Scheme, parse

#: Name of this package's block config in saved configs.
BLOCK_CONFIG_CLASS = "olmo_lns.olmo_core.BlockConfig"
#: Name of the run's config, which OLMo-core's ConfigSaverCallback writes into each checkpoint.
CONFIG_FILE = "config.json"
#: Folder of the weights in a checkpoint of OLMo-core's trainer.
WEIGHTS = "model_and_optim"


def wrap_load(load: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``Checkpointer.load``: compare the scheme in ``config.json`` with that of the model.

    OLMo-core itself does not read this file here. If it cannot be read, or is not a config of OLMo-core, an error is
    therefore raised only if the run has a scheme.
    """

    def wrapped(self: Any, dir: Any, train_module: Any, **kwargs: Any) -> Any:
        config: Any
        try:
            config = on_first_rank(lambda: read_config(dir))
        except CheckpointMismatchError as error:
            config = error
        parts = getattr(train_module, "model_parts", None) or [getattr(train_module, "model", None)]
        running = {scheme_of_model(part) for part in parts if part is not None} or {PRE_LN}
        if len(running) > 1:
            raise CheckpointMismatchError(
                f"The parts of the model have different schemes: {', '.join(sorted(map(str, running)))}. All parts of "
                "a model must have one scheme. Build them from configs that name the same scheme."
            )
        (scheme,) = running
        if config is not None and not isinstance(config, CheckpointMismatchError) and not _has_blocks(config):
            config = CheckpointMismatchError(
                f"{dir}: {CONFIG_FILE} has no block configs. The config that OLMo-core saves with a run was expected. "
                "Copy it beside the weights."
            )
        if isinstance(config, CheckpointMismatchError):
            if not scheme.is_pre_ln:
                raise config
            config = None
        saved = None if config is None else scheme_of_config(config, source=f"{dir}: {CONFIG_FILE}")
        require_same(saved, scheme, source=dir, setting=_setting)
        return load(self, dir, train_module, **kwargs)

    return wrapped


def read_config(folder: Any) -> Any:
    """Return the config of a checkpoint, or None if it has none.

    :param folder: folder of the checkpoint or of its weights, local or remote.
    :raises CheckpointMismatchError: if the config cannot be read.
    """
    from olmo_core.io import file_exists, resource_path

    base = str(folder).rstrip("/")
    for place in dict.fromkeys((base, base.removesuffix(f"/{WEIGHTS}"))):
        try:
            if file_exists(f"{place}/{CONFIG_FILE}"):
                return json.loads(resource_path(place, CONFIG_FILE).read_text(encoding="utf-8"))
        except Exception as error:  # each store's client has its own errors
            raise CheckpointMismatchError(f"{place}/{CONFIG_FILE} cannot be read: {one_line(error)}") from error
    return None


def _has_blocks(config: Any) -> bool:
    """Return true if the blocks of a config can be read. If not, another program may have written the file."""
    try:
        return all(isinstance(block, dict) for block in blocks_of(config))
    except (TypeError, ValueError, AttributeError, KeyError, IndexError):
        return False


def _setting(scheme: Scheme) -> str:
    if scheme.is_pre_ln:
        return "no --model.block._CLASS_"
    return f"--model.block._CLASS_={BLOCK_CONFIG_CLASS} --model.block.scheme={scheme}"


def scheme_of_config(config: Any, *, source: object) -> Scheme:
    """Return the scheme in a config.

    :param config: a plain dict, either the config of a run, which has the key ``model``, or that of a model.
    :param source: path of the config, for the message.
    :raises CheckpointMismatchError: if the blocks name different schemes, or one that this version does not have.
    """
    named = set()
    for block in blocks_of(config):
        try:
            is_scheme = block.get("_CLASS_") == BLOCK_CONFIG_CLASS
            named.add(scheme_of(block.get("scheme", "lns"), block.get("exponent")) if is_scheme else PRE_LN)
        except LNSError as error:
            raise CheckpointMismatchError(f"{source}: {error}") from None
        if block.get("scale_router") is False:
            raise CheckpointMismatchError(
                f"{source} has scale_router: false, which is not supported. Expected a router that reads the factor."
            )
    if len(named) > 1:
        raise CheckpointMismatchError(f"{source} has the schemes {', '.join(sorted(map(str, named)))}. Expected one.")
    return named.pop() if named else PRE_LN


def scheme_of(text: Any, exponent: Any = None) -> Scheme:
    """Return the scheme that the fields of a block config select.

    :param text: name or full spelling of the scheme.
    :param exponent: the separate field for the exponent, or None.
    :raises LNSConfigError: if the scheme or a value is unknown, if there are two different exponents, or if the scheme
        is Pre-LN.
    """
    if parse(str(text)).is_pre_ln:
        raise LNSConfigError("scheme=preln is OLMo-core's own block. Remove _CLASS_ to get it.")
    return parse(str(text), exponent)


def blocks_of(config: Any) -> list[dict[str, Any]]:
    """Return the config of every block, as OLMo-core resolves it. A config without a model has no blocks."""
    model = config.get("model", config) if isinstance(config, dict) else None
    model = model if isinstance(model, dict) else {}
    block, pattern, overrides = (model.get(f"block{end}") or {} for end in ("", "_pattern", "_overrides"))
    block_names = [pattern[i % len(pattern)] if pattern else "" for i in range(model.get("n_layers", 0))]
    overrides = {int(index): override for index, override in overrides.items()}  # JSON keys are strings
    return [overrides.get(i, block[name] if name else block) for i, name in enumerate(block_names)]
