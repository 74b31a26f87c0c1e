"""Pytest plugin for ``upstream_olmo_tests.sh``: OLMo's own tests with olmo-lns, or with LNS as the default norm.

``UPSTREAM_MODE`` is ``stock`` (olmo-lns not even imported), ``registered`` or ``lns``. In all three
``UPSTREAM_TOKENIZER`` names a tokenizer file that stands in for those of the hub.
"""

from __future__ import annotations

import importlib
import os
import re
import sys
from typing import Any

from upstream_olmo_report import DESELECTED

MODE = os.environ.get("UPSTREAM_MODE", "stock")
TOKENIZER = os.environ.get("UPSTREAM_TOKENIZER", "")


def _lns_by_default() -> None:
    """``ModelConfig()`` without a norm type has LNS, in dataclass and OmegaConf schema alike."""
    config = importlib.import_module("olmo.config")
    stock = str(config.ModelConfig.layer_norm_type)
    value = config.LayerNormType[f"lns_{stock}"]
    config.ModelConfig.layer_norm_type = value
    config.ModelConfig.__dataclass_fields__["layer_norm_type"].default = value
    init = config.ModelConfig.__init__

    def with_lns(self: Any, *args: Any, **kwargs: Any) -> None:
        if len(args) == 0:
            kwargs.setdefault("layer_norm_type", value)
        init(self, *args, **kwargs)

    config.ModelConfig.__init__ = with_lns


def _local_tokenizer() -> None:
    tokenizer = importlib.import_module("olmo.tokenizer").Tokenizer
    original = tokenizer.from_pretrained.__func__

    def from_pretrained(cls: Any, identifier: str, **kwargs: Any) -> Any:
        if os.path.exists(identifier):
            return original(cls, identifier, **kwargs)
        # A vocabulary of 50,280 fits OLMo's default embedding_size of 50,304.
        kwargs.setdefault("eos_token_id", 50256)
        return cls.from_file(TOKENIZER, **kwargs)

    tokenizer.from_pretrained = classmethod(from_pretrained)


def pytest_configure(config: Any) -> None:
    if MODE != "stock":
        importlib.import_module("olmo_lns.integrations.autoload").activate()
    olmo = importlib.import_module("olmo")
    registered = "lns" in olmo.config.LayerNormType.__members__
    if registered != (MODE != "stock"):
        raise RuntimeError(f"mode {MODE}, but the lns types are {'there' if registered else 'missing'}")
    if MODE == "lns":
        _lns_by_default()
    if TOKENIZER:
        _local_tokenizer()


def pytest_collection_modifyitems(config: Any, items: list[Any]) -> None:
    dropped = [item for item in items if any(re.search(pattern, item.nodeid) for pattern in DESELECTED)]
    config.hook.pytest_deselected(items=dropped)
    items[:] = [item for item in items if item not in dropped]
    for item in items:
        parameters = getattr(getattr(item, "callspec", None), "params", {})
        # v0.6.0 passes tensors to random.seed(), which Python 3.11 refuses; the same numbers as integers.
        if hasattr(parameters.get("seed"), "item"):
            parameters["seed"] = int(parameters["seed"])


def pytest_report_header(config: Any) -> str:
    return f"olmo-lns: mode {MODE}, OLMo from {sys.modules['olmo'].__file__}"
