"""The model types of transformers under a scheme: ``lns_llama`` for ``llama``."""

from __future__ import annotations

from typing import Any

PREFIX = "lns_"


def stock_type(model_type: Any) -> str | None:
    """Return ``llama`` for ``lns_llama``; None for any other type."""
    return model_type.removeprefix(PREFIX) if isinstance(model_type, str) and model_type.startswith(PREFIX) else None
