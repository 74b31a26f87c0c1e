"""Engines: one module for each training framework, and the table of them."""

from __future__ import annotations

from typing import Any

from olmo_lns.errors import LNSConfigError
from olmo_lns.study.arms import Arm
from olmo_lns.study.engines.base import Engine, Run
from olmo_lns.study.engines.megatron import MegatronEngine
from olmo_lns.study.engines.olmo import OLMoEngine
from olmo_lns.study.engines.olmo_core import OLMoCoreEngine

__all__ = ["ENGINES", "MEGATRON", "OLMO", "OLMO_CORE", "Engine", "Run", "settings_of"]

OLMO: Engine = OLMoEngine()
OLMO_CORE: Engine = OLMoCoreEngine()
MEGATRON: Engine = MegatronEngine()
#: OLMo-core before OLMo, since its files also have OLMo's ``file_key``.
ENGINES: dict[str, Engine] = {engine.name: engine for engine in (OLMO_CORE, OLMO, MEGATRON)}


def settings_of(arm: Arm, engine: Engine) -> dict[str, Any]:
    """The settings that make a run of ``engine`` this arm.

    :raises LNSConfigError: the framework does not support the arm.
    """
    found = engine.arm(arm)
    if found is None:
        others = " and ".join(other.title for other in ENGINES.values() if other.arm(arm) is not None)
        raise LNSConfigError(f"arm {arm.name!r} is supported by {others} only")
    return found
