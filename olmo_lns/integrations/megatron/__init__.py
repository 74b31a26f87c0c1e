"""LayerNorm Scaling for Megatron-LM and Megatron Core.

``register()`` adds ``--layernorm-scaling`` and its relatives to an unmodified ``pretrain_gpt.py``;
``apply()`` is the one call for those who build a model themselves. Neither imports Megatron
before Megatron is imported anyway.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from olmo_lns.integrations.megatron.applying import apply

__all__ = ["apply", "register"]


def register() -> None:
    """Arrange that each Megatron module is extended right after it is imported.

    Idempotent, and inert until ``--layernorm-scaling``, ``--norm-scheme`` or ``--no-scaled-init`` is given.

    :raises UpstreamChangedError: (at the import of the module concerned) this Megatron is not one
        that was verified; the message names the override.
    """
    from olmo_lns.integrations.megatron.install import install

    install()


def __getattr__(name: str) -> object:
    if name == "apply":
        from olmo_lns.integrations.megatron.applying import apply

        return apply
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
