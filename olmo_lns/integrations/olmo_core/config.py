"""Reads the scheme out of an OLMo-core config that is a plain dict; OLMo-core itself is not imported."""

from __future__ import annotations

import re
from typing import Any, Callable, Iterator

from olmo_lns.errors import CheckpointMismatchError, LNSConfigError, LNSError
from olmo_lns.record import Record
from olmo_lns.schemes import Scheme, parse

#: The block config's name in saved configs.
CLASS = "olmo_lns.olmo_core.BlockConfig"
#: Where OLMo-core's ConfigSaverCallback writes a run's config, inside each checkpoint.
CONFIG_FILE = "config.json"


def from_config(config: Any, *, source: object) -> Record:
    """The record of a run's config, as a plain dict (``model`` inside it, or the model's own).

    :raises CheckpointMismatchError: its blocks name different schemes, or one that this version does not know.
    """
    records = set()
    for block in blocks_of(config):
        if block.get("_CLASS_") != CLASS:
            records.add(Record())
            continue
        try:
            scheme = scheme_of(block.get("scheme", "lns"), exponent=block.get("exponent"))
        except LNSError as error:
            raise CheckpointMismatchError(f"{source}: {error}") from None
        norm = (block.get("layer_norm") or {}).get("name", "default")
        records.add(Record(scheme, str(norm), str(block.get("initialization") or "plain")))
    if len(records) > 1:
        raise CheckpointMismatchError(f"{source}: blocks of one model with different schemes: {records}")
    return records.pop() if records else Record()


def scheme_of(text: Any, exponent: Any = None) -> Scheme:
    """The scheme that a block config's fields say. :param text: its name, or its full spelling.

    :raises LNSConfigError: an unknown scheme or value, an exponent said twice and differently, or stock Pre-LN.
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
    """The config of every block, as OLMo-core resolves it; none where ``config`` is of no model."""
    model = config.get("model", config) if isinstance(config, dict) else None
    model = model if isinstance(model, dict) else {}
    block, pattern, overrides = (model.get(f"block{end}") or {} for end in ("", "_pattern", "_overrides"))
    whose = [pattern[i % len(pattern)] if pattern else "" for i in range(model.get("n_layers", 0))]
    overrides = {int(index): override for index, override in overrides.items()}  # JSON has words for keys
    return [overrides.get(i, block[name] if name else block) for i, name in enumerate(whose)]


def wrap_from_dict(from_dict: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``Config.from_dict``, which silently builds its own class if a module lacks the one that is named."""

    def wrapped(cls: Any, data: Any, overrides: list[str] | None = None) -> Any:
        for name in (*_classes(data), *re.findall(r"(?m)_CLASS_=(.*)$", "\n".join(overrides or ()))):
            if name.startswith("olmo_lns.") and name != CLASS:
                raise LNSConfigError(f"_CLASS_={name}: the block config of olmo-lns is {CLASS}")
        return from_dict(cls, data, overrides)

    return wrapped


def _classes(data: Any) -> Iterator[str]:
    """Every value of ``_CLASS_`` in a config that is a plain dict."""
    if isinstance(data, dict):
        yield str(data.get("_CLASS_", ""))
        data = list(data.values())
    for each in data if isinstance(data, (list, tuple)) else ():
        yield from _classes(each)
