"""Loading OLMo's ``TrainConfig`` as a launch would, flattening it, and building its model on the meta device."""

from __future__ import annotations

import dataclasses
import enum
import os
import pickle
import re
import warnings
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, Iterator, Mapping, Sequence

from olmo_lns.errors import LNSConfigError, one_line

__all__ = ["count", "flatten", "load", "overrides_to_args"]

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
    from olmo_lns.integrations.olmo.config import wrap_load

    register()
    from olmo.config import TrainConfig
    from olmo.exceptions import OLMoConfigurationError

    if not path.is_file():
        raise LNSConfigError(f"{path}: no such file")
    with placeholders(path), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "register_new_resolver", UserWarning)  # OLMo's, at every load
        try:
            return wrap_load(_load)(TrainConfig, str(path), overrides_to_args(overrides or {}), None, False)
        except (OLMoConfigurationError, OmegaConfBaseException, TypeError, ValueError) as error:
            raise LNSConfigError(f"{path}: OLMo refuses it: {one_line(error)}") from error


def _load(cls: Any, path: str, overrides: list[str], _key: None, validate_paths: bool) -> Any:
    """OLMo's ``BaseConfig.load``, but what all runs of one file share is made once (a study loads it for each run)."""
    from omegaconf import OmegaConf

    cls._register_resolvers(validate_paths=validate_paths)
    own = pickle.loads(_schema_and_file(cls, Path(path).read_text(encoding="utf-8")))
    return OmegaConf.to_object(OmegaConf.unsafe_merge(own, OmegaConf.from_dotlist(overrides)))


@lru_cache(maxsize=64)
def _schema_and_file(cls: Any, text: str) -> bytes:
    """Pickled, since OmegaConf's own copies take eight times as long."""
    from omegaconf import OmegaConf

    from olmo_lns.integrations.olmo.config import written

    raw = cls.update_legacy_settings(written(text))  # a copy
    return pickle.dumps(OmegaConf.unsafe_merge(pickle.loads(_schema(cls)), raw))


@lru_cache
def _schema(cls: Any) -> bytes:
    from omegaconf import OmegaConf

    return pickle.dumps(OmegaConf.structured(cls))


def flatten(config: Any) -> dict[str, Any]:
    """A ``TrainConfig`` (or nested mapping) as ``{"model.d_model": 512, …}``; enums as their values."""
    flat: dict[str, Any] = {}

    def walk(prefix: str, node: Any) -> None:
        if dataclasses.is_dataclass(node):
            node = vars(node)  # dataclasses.asdict copies every value
        if isinstance(node, Mapping):
            for key, value in node.items():
                walk(f"{prefix}.{key}" if prefix else str(key), value)
        else:
            flat[prefix] = _plain(node)

    walk("", config)
    return flat


def _plain(value: Any) -> Any:
    if isinstance(value, enum.Enum):
        return str(value.value)
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_plain(item) for item in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    return value


def count(config: Any) -> tuple[int, float]:
    """``(parameters, OLMo's training FLOPs per token)`` of the config's model, built on the meta device."""
    from olmo.model import OLMo

    from olmo_lns.integrations.olmo.config import check_sizes

    check_sizes(config.model)
    model = OLMo(config.model.update_with(init_device="meta"), init_params=False)
    return model.num_params(), float(model.num_fwd_flops + model.num_bck_flops)
