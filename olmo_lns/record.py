"""Compare the scheme that a checkpoint's own config names with the built model.

The framework's saved config is the record: OLMo's config.yaml, Megatron's arguments, OLMo-core's and transformers'
config.json. Each integration reads its own; this is the one comparison.
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
    """Compare what a checkpoint's own config says with the built model, before its weights are used.

    :param saved: Pre-LN for a stock config; None where nothing says what the weights were trained with.
    :param setting: what a user types to run a scheme, such as ``--layernorm-scaling``.
    :param differing: another difference, in words, such as of the base norm.
    :raises CheckpointMismatchError: they differ and ``OLMO_LNS_ALLOW_MISMATCH`` is not 1.

    Example: ``require_same(PRE_LN, LNS, source="step1000", setting=str)`` raises.
    """
    if saved == running and not differing:
        return
    if saved is None:
        if running.is_pre_ln:
            return
        found = "nothing beside it says what its weights were trained with"
        todo = "Copy the config of the run that saved it beside the weights"
    else:
        found = f"its config says {differing or saved}"
        todo = f"Run with the checkpoint's setting ({setting(saved)})"
    message = f"{source}: {found}, but this run has {running}."
    if settings.is_set(settings.ALLOW_MISMATCH):
        log.warning("%s Loading it all the same, as %s=1 says.", message, settings.ALLOW_MISMATCH)
        return
    raise CheckpointMismatchError(f"{message} {todo}, or set {settings.ALLOW_MISMATCH}=1 to go on knowingly.")
