"""Compare the scheme of a checkpoint, or of trained weights, with the built model.

The record is the config that the framework saves: OLMo's config.yaml, Megatron's arguments, OLMo-core's and
transformers' config.json. Each integration reads its record; all share this comparison.
"""

from __future__ import annotations

import logging
from typing import Callable

from olmo_lns import settings
from olmo_lns.errors import CheckpointMismatchError
from olmo_lns.schemes import Scheme

log = logging.getLogger("olmo_lns")


def require_same(
    saved: Scheme | None, running: Scheme, *, source: object, setting: Callable[[Scheme], str], differing: str = ""
) -> None:
    """Compare a checkpoint's config with the built model, before the weights are used.

    :param saved: scheme of the checkpoint, Pre-LN for a stock config; None if no config was saved.
    :param setting: scheme -> the option that a user types for it, such as ``--layernorm-scaling``.
    :param differing: description of another difference, such as the base norm.
    :raises CheckpointMismatchError: the two differ and ``OLMO_LNS_ALLOW_MISMATCH`` is not 1.

    Example: ``require_same(PRE_LN, LNS, source="step1000", setting=str)`` raises.
    """
    if saved == running and not differing:
        return
    if saved is None:
        if running.is_pre_ln:
            return
        finding = "no config beside it names the scheme of its weights"
        remedy = "Copy the config of its run beside the weights"
    else:
        finding = f"its config says {differing or saved}"
        remedy = f"Run with the checkpoint's setting ({setting(saved)})"
    message = f"{source}: {finding}, but this run has {running}."
    if settings.is_set(settings.ALLOW_MISMATCH):
        log.warning("%s Loading it anyway because of %s=1.", message, settings.ALLOW_MISMATCH)
        return
    raise CheckpointMismatchError(f"{message} {remedy}, or set {settings.ALLOW_MISMATCH}=1 to load it anyway.")


def require_fresh(trained_norm: str, running: Scheme, *, source: object, trained: bool | None) -> None:
    """Refuse weights that were trained before a scheme is applied to their model. All integrations share this rule.

    :param trained_norm: a norm whose weights are not at their start, from
        :func:`olmo_lns.initialization.trained_norm`; ``""`` for fresh weights.
    :param trained: True: the weights were trained under ``running``. False: they are fresh. None: not said.
    :raises CheckpointMismatchError: trained weights, ``trained`` is None and ``OLMO_LNS_ALLOW_MISMATCH`` is not 1.
    """
    if not trained_norm or trained is not None:
        return
    message = (
        f"{source}: the weights of its norm {trained_norm} are not at their start, so the model was trained before, or "
        f"its weights hold a factor. {running} expects fresh weights, or weights that were trained under {running}."
    )
    if settings.is_set(settings.ALLOW_MISMATCH):
        log.warning("%s It is applied anyway because of %s=1.", message, settings.ALLOW_MISMATCH)
        return
    raise CheckpointMismatchError(
        f"{message} If they were, apply it with trained=True. If these norms start in this way, use trained=False. "
        f"{settings.ALLOW_MISMATCH}=1 applies it to any weights."
    )
