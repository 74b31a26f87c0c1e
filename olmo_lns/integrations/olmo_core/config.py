"""Read the scheme out of an OLMo-core config that is a plain dict; OLMo-core itself is not imported."""

from __future__ import annotations

from typing import Any

from olmo_lns.errors import CheckpointMismatchError, LNSConfigError, LNSError
from olmo_lns.schemes import PRE_LN, Scheme, parse

#: The block config's name in saved configs.
CLASS = "olmo_lns.olmo_core.BlockConfig"
#: A run's config, which OLMo-core's ConfigSaverCallback writes into each checkpoint.
CONFIG_FILE = "config.json"


def scheme_of_config(config: Any, *, source: object) -> Scheme:
    """Return the scheme of a run's config, a plain dict (``model`` inside it, or the model's own).

    :raises CheckpointMismatchError: its blocks name different schemes, or one that this version does not know.
    """
    found = set()
    for block in blocks_of(config):
        try:
            ours = block.get("_CLASS_") == CLASS
            found.add(scheme_of(block.get("scheme", "lns"), block.get("exponent")) if ours else PRE_LN)
        except LNSError as error:
            raise CheckpointMismatchError(f"{source}: {error}") from None
    if len(found) > 1:
        raise CheckpointMismatchError(f"{source}: found blocks with {', '.join(sorted(map(str, found)))}, expected one")
    return found.pop() if found else PRE_LN


def routers_of_config(config: Any) -> dict[int, bool]:
    """``scale_router`` of each block, from 0, that has a scheme."""
    blocks = enumerate(blocks_of(config))
    return {index: bool(block.get("scale_router", True)) for index, block in blocks if block.get("_CLASS_") == CLASS}


def scheme_of(text: Any, exponent: Any = None) -> Scheme:
    """Return the scheme of a block config's fields. :param text: its name, or its full spelling.

    :raises LNSConfigError: an unknown scheme or value, an exponent given twice and differently, or stock Pre-LN.
    """
    scheme = parse(str(text))
    if scheme.is_pre_ln:
        raise LNSConfigError("scheme=preln is OLMo-core's own block: leave _CLASS_ away")
    if exponent is None:
        return scheme
    # Also where it spells the default, which a scheme leaves out when it is written.
    if ":" in str(text) and scheme.parameters.get("exponent", exponent) != float(exponent):
        raise LNSConfigError(f"scheme={text} and exponent={exponent} contradict each other")
    return Scheme.of(scheme.name, **{**scheme.parameters, "exponent": exponent})


def blocks_of(config: Any) -> list[dict[str, Any]]:
    """The config of every block, as OLMo-core resolves it; none for a config without a model."""
    model = config.get("model", config) if isinstance(config, dict) else None
    model = model if isinstance(model, dict) else {}
    block, pattern, overrides = (model.get(f"block{end}") or {} for end in ("", "_pattern", "_overrides"))
    whose = [pattern[i % len(pattern)] if pattern else "" for i in range(model.get("n_layers", 0))]
    overrides = {int(index): override for index, override in overrides.items()}  # JSON has words for keys
    return [overrides.get(i, block[name] if name else block) for i, name in enumerate(whose)]
