"""Vision-language models of transformers: which they are, and where the blocks of their two branches stand."""

from __future__ import annotations

from typing import Any

from olmo_lns.integrations.transformers.families import at

__all__ = ["BRANCHES", "LANGUAGE", "VISION", "branch_path", "image_token", "in_vision", "is_vision_language"]

VISION, LANGUAGE = BRANCHES = ("vision", "language")
#: model_type -> the lists of blocks, (vision, language). A path with ``|`` is of two versions of transformers. Needed
#: where a branch holds other lists, too: Qwen3-VL's mergers stand in one.
_PATHS = {
    kind: ("model.visual.blocks|visual.blocks", "model.language_model.layers|model.layers")
    for kind in ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
}


def is_vision_language(config: Any) -> bool:
    """Whether a config is of a model with a vision tower in front of a language model."""
    return getattr(config, "vision_config", None) is not None and hasattr(config, "get_text_config")


def branch_path(model: Any, branch: str) -> str | None:
    """Where a known model has the blocks of ``branch``; None for a model outside the table."""
    paths = _PATHS.get(model.config.model_type)
    path = None if paths is None else paths[BRANCHES.index(branch)]
    return path if path is not None and at(model, path) is not None else None


def in_vision(name: str) -> bool:
    """Whether a module of this name belongs to the vision tower, by the words that transformers uses."""
    return any(part.startswith(("vis", "image_encoder")) for part in name.split("."))


def image_token(model: Any) -> int | None:
    """The id that stands where an image goes; None for a model that reads text alone."""
    config = getattr(model, "config", None)
    if not is_vision_language(config):
        return None
    for name in ("image_token_id", "image_token_index"):
        if isinstance(value := getattr(config, name, None), int):
            return value
    return None
