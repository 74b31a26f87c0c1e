"""Compare an OLMo-core checkpoint's ``config.json`` with the built model before its weights are loaded.

OLMo-core compares no config: a run that is resumed without the flags of its scheme would go on as Pre-LN.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Callable

from olmo_lns.errors import CheckpointMismatchError, one_line
from olmo_lns.integrations.olmo_core.config import CLASS, CONFIG_FILE, routers_of_config, scheme_of_config
from olmo_lns.record import require_same
from olmo_lns.schemes import PRE_LN, Scheme

#: The weights' own folder in a checkpoint of OLMo-core's trainer.
WEIGHTS = "model_and_optim"


def read_config(folder: Any) -> Any:
    """Return the run's config of a checkpoint folder, or of its folder of weights, local or remote; None without one.

    :raises CheckpointMismatchError: it cannot be read.
    """
    base = str(folder).rstrip("/")
    for place in dict.fromkeys((base, base.removesuffix(f"/{WEIGHTS}"))):
        path = f"{place}/{CONFIG_FILE}"
        try:
            if "://" in path:
                from cached_path import cached_path
                from olmo_core.io import file_exists

                if not file_exists(path):
                    continue
                path = str(cached_path(path, quiet=True))
            elif not Path(path).is_file():
                continue
            return json.loads(Path(path).read_text(encoding="utf-8"))
        except Exception as error:  # each store's client raises its own
            raise CheckpointMismatchError(f"{path} cannot be read: {one_line(error)}") from error
    return None


def wrap_load(load: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``Checkpointer.load``."""

    def wrapped(self: Any, dir: Any, train_module: Any, **kwargs: Any) -> Any:
        from olmo_core.distributed.utils import broadcast_object, get_rank

        parts = getattr(train_module, "model_parts", None) or [getattr(train_module, "model", None)]
        found: Any = None
        if get_rank() == 0:  # one process reads, and all stop together
            try:
                found = read_config(dir)
            except CheckpointMismatchError as error:
                found = error
        found = broadcast_object(found)
        if isinstance(found, CheckpointMismatchError):
            raise found
        compare(found, [part for part in parts if part is not None], source=dir)
        return load(self, dir, train_module, **kwargs)

    return wrapped


def compare(config: Any, parts: list[Any], *, source: object) -> None:
    """Compare a checkpoint's config with the parts of the model that runs.

    :param config: a plain dict, or None where the checkpoint has none.
    :raises CheckpointMismatchError: they differ.
    """
    from olmo_lns.integrations.olmo_core import blocks

    running = {blocks.scheme_of_model(part) for part in parts} or {PRE_LN}
    if len(running) > 1:
        raise CheckpointMismatchError(f"found parts of one model with {', '.join(map(str, running))}, expected one")
    saved, differing = None, ""
    if config is not None:
        saved = scheme_of_config(config, source=f"{source}: {CONFIG_FILE}")
        routers = {index: scaled for part in parts for index, scaled in blocks.routers_of(part).items()}
        kept = routers_of_config(config)
        if wrong := [index for index in routers.keys() & kept.keys() if routers[index] != kept[index]]:
            differing = f"block.scale_router={str(kept[wrong[0]]).lower()} in block {wrong[0] + 1}"
    require_same(saved, running.pop(), source=source, setting=_setting, differing=differing)


def _setting(scheme: Scheme) -> str:
    if scheme.is_pre_ln:
        return "no --model.block._CLASS_"
    return f"--model.block._CLASS_={CLASS} --model.block.scheme={scheme}"
