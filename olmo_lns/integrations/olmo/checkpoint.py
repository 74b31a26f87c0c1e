"""Compare the type in a checkpoint's ``config.yaml``, with every parameter, with the model that runs."""

from __future__ import annotations

import logging
from typing import Any, Callable

from olmo_lns import sites
from olmo_lns.errors import one_line
from olmo_lns.integrations.olmo import norm_types
from olmo_lns.processes import on_first_rank
from olmo_lns.records import require_same
from olmo_lns.schemes import Scheme

log = logging.getLogger("olmo_lns")


def wrap_restore(restore: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function with which a Trainer loads a checkpoint: compare the schemes before weights are loaded.

    The wrapped function raises a ``CheckpointMismatchError`` if the checkpoint has another scheme, another parameter of
    the scheme or another base norm. It also raises one if the model has a scheme and the folder has no config. With
    ``OLMO_LNS_ALLOW_MISMATCH=1`` it logs a warning instead.
    """

    def wrapped(self: Any, load_path: Any, *args: Any, **kwargs: Any) -> Any:
        running = sites.read_back(self.model)
        local_cache = args[0] if args else kwargs.get("local_cache")
        saved_type = on_first_rank(lambda: _saved_type(load_path, local_cache, running))
        saved_scheme, differing = None if saved_type is None else norm_types.scheme_of_type(saved_type), ""
        base = norm_types.base_type(self.model.config.layer_norm_type)
        if saved_scheme == running and not running.is_pre_ln and norm_types.base_type(saved_type) != base:
            differing = f"layer_norm_type {saved_type}, another base norm than {base}"
        setting = f"--model.layer_norm_type={saved_type}"
        require_same(saved_scheme, running, source=load_path, setting=lambda _: setting, differing=differing)
        return restore(self, load_path, *args, **kwargs)

    return wrapped


def _saved_type(folder: Any, local_cache: Any, running: Scheme) -> str | None:
    """Return the ``layer_norm_type`` in a checkpoint's config.yaml, found as OLMo finds it, or None without a config.

    A config that cannot be read is logged if the run has a scheme. OLMo itself does not read it.
    """
    from olmo.config import ModelConfig
    from olmo.util import resource_path
    from omegaconf import OmegaConf

    try:
        model = OmegaConf.load(str(resource_path(folder, "config.yaml", local_cache=local_cache)))["model"]
        return str(OmegaConf.select(model, "layer_norm_type") or ModelConfig.layer_norm_type)
    except Exception as error:  # each store's client raises its own, also for a missing file
        if not (running.is_pre_ln or isinstance(error, FileNotFoundError)):
            log.warning("%s: the scheme is not compared, since config.yaml cannot be read: %s", folder, one_line(error))
        return None
