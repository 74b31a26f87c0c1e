"""LayerNorm Scaling (arXiv 2502.05795) and its relatives for existing launches.

``import olmo_lns`` loads neither torch nor a training framework; each public name loads its
dependencies on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"
__all__ = ["LNSError", "__version__", "apply", "layer_norm", "lns_scale", "plain_initialization", "rms_norm"]

_PUBLIC = {
    "LNSError": "olmo_lns.errors",
    "apply": "olmo_lns.dispatch",
    "layer_norm": "olmo_lns.norm",
    "lns_scale": "olmo_lns.schemes.factor",
    "plain_initialization": "olmo_lns.dispatch",
    "rms_norm": "olmo_lns.norm",
}

if TYPE_CHECKING:
    from olmo_lns.dispatch import apply, plain_initialization
    from olmo_lns.errors import LNSError
    from olmo_lns.norm import layer_norm, rms_norm
    from olmo_lns.schemes.factor import lns_scale


def __getattr__(name: str) -> Any:
    if name.endswith("BlockConfig"):
        from olmo_lns.errors import LNSConfigError

        # OLMo-core would treat an AttributeError as "no such class" and silently build its own block.
        raise LNSConfigError(f"olmo_lns has no {name!r}: the block config is olmo_lns.olmo_core.BlockConfig")
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_PUBLIC[name]), name)
