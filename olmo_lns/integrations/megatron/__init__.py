"""LayerNorm Scaling for Megatron-LM and Megatron Core.

``register()`` adds ``--layernorm-scaling`` and its relatives to an unmodified ``pretrain_gpt.py``;
``apply()`` is the one call for those who build a model themselves, ``layer_spec()`` the one for those who hand Megatron
Core a spec. Importing them does not import Megatron.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from olmo_lns.integrations.megatron.applying import apply, layer_spec

__all__ = ["apply", "layer_spec", "register"]


def register() -> None:
    """Arrange that each Megatron module is extended right after it is imported.

    Idempotent, and inert until ``--layernorm-scaling``, ``--norm-scheme`` or ``--no-scaled-init`` is given.

    :raises UpstreamChangedError: (at the import of the module concerned) this Megatron is not one
        that was verified; the message names the override.
    """
    from olmo_lns.integrations.megatron.upstream import install

    install()


def __getattr__(name: str) -> object:
    if name in ("apply", "layer_spec"):
        from olmo_lns.integrations.megatron import applying

        return getattr(applying, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
