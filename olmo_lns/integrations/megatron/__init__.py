"""LayerNorm Scaling for Megatron-LM and Megatron Core.

``register()`` adds ``--layernorm-scaling`` and its relatives to an unmodified ``pretrain_gpt.py``;
``apply()`` is the one call for those who build a model themselves, ``layer_spec()`` the one for those who hand Megatron
Core a spec. Importing them does not import Megatron.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from olmo_lns.integrations.megatron.registration import register

if TYPE_CHECKING:
    from olmo_lns.integrations.megatron.applying import apply, layer_spec

__all__ = ["apply", "layer_spec", "register"]


def __getattr__(name: str) -> object:
    if name in ("apply", "layer_spec"):
        from olmo_lns.integrations.megatron import applying

        return getattr(applying, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
