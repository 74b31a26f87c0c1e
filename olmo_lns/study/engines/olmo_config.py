"""Loading OLMo's ``TrainConfig`` as a launch would, flattening it, and building its model on the meta device."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import warnings
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Iterator, Mapping

from olmo_lns.errors import LNSConfigError, one_line

__all__ = ["count", "flatten", "load", "overrides_to_args", "placeholders"]

ENVIRONMENT = re.compile(r"\$\{oc\.env:([A-Za-z_][A-Za-z0-9_]*)\}")


@contextmanager
def placeholders(path: Path) -> Iterator[None]:
    """Set what ``${oc.env:NAME}`` of this file needs and is not set, so that it can be checked anywhere."""
    missing = [name for name in ENVIRONMENT.findall(path.read_text()) if name not in os.environ]
    os.environ.update({name: f"/{name}-is-not-set" for name in missing})
    try:
        yield
    finally:
        for name in missing:
            os.environ.pop(name, None)


def overrides_to_args(overrides: Mapping[str, Any]) -> list[str]:
    """``{"model.d_model": 64}`` → ``["model.d_model=64"]``, OLMo's dot list (a launch adds ``--``)."""
    words = {None: "null", True: "true", False: "false"}
    return [f"{k}={words[v] if v is None or isinstance(v, bool) else v}" for k, v in overrides.items()]


def load(path: Path, overrides: Mapping[str, Any] | None = None) -> Any:
    """The ``TrainConfig`` of a file as ``scripts/train.py file --key=value`` gets it, data paths not required to exist.

    :raises LNSConfigError: OLMo's own complaint, with the file's name.
    """
    from omegaconf.errors import OmegaConfBaseException

    from olmo_lns.integrations.olmo import register

    register()
    from olmo.config import TrainConfig
    from olmo.exceptions import OLMoConfigurationError

    if not path.is_file():
        raise LNSConfigError(f"{path}: no such file")
    with placeholders(path), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "register_new_resolver", UserWarning)  # OLMo's, at every load
        try:
            return TrainConfig.load(str(path), overrides_to_args(overrides or {}), validate_paths=False)
        except (OLMoConfigurationError, OmegaConfBaseException, TypeError, ValueError) as error:
            raise LNSConfigError(f"{path}: OLMo refuses it: {one_line(error)}") from error


def flatten(config: Any) -> dict[str, Any]:
    """A ``TrainConfig`` (or nested mapping) as ``{"model.d_model": 512, …}``, with the values that JSON has."""
    tree = dataclasses.asdict(config) if dataclasses.is_dataclass(config) else config  # type: ignore[arg-type]
    flat: dict[str, Any] = {}

    def walk(prefix: str, node: Any) -> None:
        if isinstance(node, Mapping):
            for key, value in node.items():
                walk(f"{prefix}.{key}" if prefix else str(key), value)
        else:
            flat[prefix] = node

    walk("", json.loads(json.dumps(tree, default=str)))
    return flat


def count(config: Any) -> tuple[int, float]:
    """``(parameters, OLMo's training FLOPs per token)`` of the config's model, built on the meta device."""
    from olmo.model import OLMo

    from olmo_lns.integrations.olmo.config import check_sizes

    check_sizes(config.model)
    model = OLMo(config.model.update_with(init_device="meta"), init_params=False)
    return model.num_params(), float(model.num_fwd_flops + model.num_bck_flops)
