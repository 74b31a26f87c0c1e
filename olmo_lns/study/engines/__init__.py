"""Engines: what a study has to know of a training framework, one file each."""

from __future__ import annotations

from olmo_lns.errors import LNSConfigError, did_you_mean
from olmo_lns.study.engines.base import Engine, Run
from olmo_lns.study.engines.megatron import MegatronEngine
from olmo_lns.study.engines.olmo import OLMoEngine
from olmo_lns.study.engines.olmo_core import OLMoCoreEngine

__all__ = ["ENGINES", "MEGATRON", "OLMO", "OLMO_CORE", "Engine", "Run", "engine_named"]

OLMO: Engine = OLMoEngine()
OLMO_CORE: Engine = OLMoCoreEngine()
MEGATRON: Engine = MegatronEngine()
#: OLMo-core before OLMo: its files and logs have everything by which OLMo's are known, and more.
ENGINES: dict[str, Engine] = {engine.name: engine for engine in (OLMO_CORE, OLMO, MEGATRON)}


def engine_named(name: str) -> Engine:
    """:raises LNSConfigError: an unknown framework, with the nearest known one."""
    if name not in ENGINES:
        known = " or ".join(map(repr, ENGINES))
        raise LNSConfigError(f"framework {name!r}{did_you_mean(name, ENGINES)}: expected {known}")
    return ENGINES[name]
