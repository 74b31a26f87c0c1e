"""LayerNorm Scaling (arXiv 2502.05795) and its relatives for existing launches.

``import olmo_lns`` loads neither torch nor a training framework. Each public name loads what it needs on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"
__all__ = [
    "LNSError",
    "Scheme",
    "__version__",
    "apply",
    "fold",
    "layer_norm",
    "lns_factor",
    "plain_initialization",
    "record",
    "require",
    "rms_norm",
]

_PUBLIC = {
    "LNSError": "olmo_lns.errors",
    "Scheme": "olmo_lns.schemes",
    "apply": "olmo_lns.dispatch",
    "fold": "olmo_lns.dispatch",
    "layer_norm": "olmo_lns.norm",
    "lns_factor": "olmo_lns.schemes.factor",
    "plain_initialization": "olmo_lns.dispatch",
    "record": "olmo_lns.records",
    "require": "olmo_lns.records",
    "rms_norm": "olmo_lns.norm",
}

if TYPE_CHECKING:
    from olmo_lns.dispatch import apply, fold, plain_initialization
    from olmo_lns.errors import LNSError
    from olmo_lns.norm import layer_norm, rms_norm
    from olmo_lns.records import record, require
    from olmo_lns.schemes import Scheme
    from olmo_lns.schemes.factor import lns_factor


def __getattr__(name: str) -> Any:
    if name.endswith("BlockConfig"):
        from olmo_lns.errors import LNSConfigError

        # OLMo-core would treat an AttributeError as "no such class" and silently build its own block.
        raise LNSConfigError(
            f"olmo_lns has no {name!r}. The block config is olmo_lns.olmo_core.BlockConfig. Correct the name."
        )
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_PUBLIC[name]), name)
