"""``layer_norm_type`` at config load: what ``lns`` means, and errors that name the value."""

from __future__ import annotations

import difflib
import logging
from typing import Any, Callable

from omegaconf import OmegaConf

from olmo_lns.integrations.olmo.types import is_lns, resolve

__all__ = ["require_pre_ln", "wrap_load"]

log = logging.getLogger("olmo_lns")


def require_pre_ln(config: Any) -> None:
    """:raises OLMoConfigurationError: LNS is asked for in a model whose norms follow the sub-layers."""
    from olmo.exceptions import OLMoConfigurationError

    if is_lns(config.layer_norm_type) and config.norm_after:
        raise OLMoConfigurationError(
            f"layer_norm_type={config.layer_norm_type!s} with norm_after=true: LayerNorm Scaling is a Pre-LN method. "
            "Set norm_after: false, or a layer_norm_type without lns."
        )


def wrap_load(load: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``BaseConfig.load`` so that the loaded config names the resolved type."""

    def wrapped(
        cls: Any, path: Any, overrides: list[str] | None = None, key: str | None = None, validate_paths: bool = True
    ) -> Any:
        model_key = {"TrainConfig": "model.", "ModelConfig": ""}.get(cls.__name__)
        if model_key is None:
            return load(cls, path, overrides, key, validate_paths)
        named, override = _written_types(path, overrides, key, f"{model_key}layer_norm_type")
        for value in (named, override):
            _reject_unknown(value)
        config = load(cls, path, overrides, key, validate_paths)
        model = config.model if model_key else config
        if is_lns(model.layer_norm_type):
            _resolve(model, named, overridden=override is not None)
            require_pre_ln(model)
        return config

    return wrapped


def _written_types(path: Any, overrides: list[str] | None, key: str | None, name: str) -> tuple[str | None, str | None]:
    """The type that the YAML file names and the one that the command line asks for, as written."""
    raw = OmegaConf.load(str(path))
    if key is not None:
        raw = OmegaConf.select(raw, key) or OmegaConf.create()
    named = OmegaConf.select(raw, name, throw_on_missing=False)
    override = OmegaConf.select(OmegaConf.from_dotlist(overrides or []), name)
    return (None if named is None else str(named)), (None if override is None else str(override))


def _reject_unknown(value: str | None) -> None:
    from olmo.config import LayerNormType
    from olmo.exceptions import OLMoConfigurationError

    known = [str(member) for member in LayerNormType]
    if value is None or value in known:
        return
    near = difflib.get_close_matches(value, known, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    raise OLMoConfigurationError(f"unknown layer_norm_type {value!r}.{hint} Known: {', '.join(known)}")


def _resolve(model: Any, named: str | None, *, overridden: bool) -> None:
    from olmo.config import LayerNormType, ModelConfig

    asked = str(model.layer_norm_type)
    # Written in the file itself there is nothing to keep; over a file that is silent, OLMo's default is kept.
    kept = (named or str(ModelConfig.layer_norm_type)) if overridden else "rms"
    resolved = resolve(asked, kept)
    if resolved == asked:
        return
    model.layer_norm_type = LayerNormType[resolved]
    reason = f"keeps the config's base norm {kept!r}" if overridden else "means RMSNorm when a file names it"
    log.info("layer_norm_type=lns %s: using %s", reason, resolved)
