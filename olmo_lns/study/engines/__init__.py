"""Engines: one module for each training framework, and the table of all engines."""

from __future__ import annotations

from typing import Any

from olmo_lns.arms import Arm
from olmo_lns.errors import LNSConfigError
from olmo_lns.study.engines.base import Engine, Run
from olmo_lns.study.engines.megatron import MegatronEngine
from olmo_lns.study.engines.olmo import OLMoEngine
from olmo_lns.study.engines.olmo_core import OLMoCoreEngine

__all__ = ["ENGINES", "MEGATRON", "OLMO", "OLMO_CORE", "Engine", "Run", "overrides_for"]

OLMO: Engine = OLMoEngine()
OLMO_CORE: Engine = OLMoCoreEngine()
MEGATRON: Engine = MegatronEngine()
#: Name -> engine. A config file belongs to the first engine whose ``identifying_key`` it has. OLMo-core's files also
#: have OLMo's key, so OLMo-core comes first.
ENGINES: dict[str, Engine] = {engine.name: engine for engine in (OLMO_CORE, OLMO, MEGATRON)}


def overrides_for(arm: Arm, engine: Engine) -> dict[str, Any]:
    """Return the settings that make a run of ``engine`` this arm.

    :raises LNSConfigError: if the framework does not support the arm.
    """
    overrides = engine.arm_overrides(arm)
    if overrides is None:
        supporting = [other.title for other in ENGINES.values() if other.arm_overrides(arm) is not None]
        raise LNSConfigError(
            f"{engine.title} does not support arm {arm.name!r}. Choose another arm, or use {' or '.join(supporting)}."
        )
    return overrides
