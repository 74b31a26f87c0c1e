"""The scheme that a block config's fields say."""

from __future__ import annotations

from typing import Any

from olmo_lns.errors import LNSConfigError
from olmo_lns.schemes import Scheme, parse

__all__ = ["scheme_of"]


def scheme_of(text: Any, **fields: Any) -> Scheme:
    """``text`` is a scheme's name or its full spelling; a field that is not None is one of its parameters.

    :raises LNSConfigError: an unknown scheme or value, a parameter said twice and differently, or stock Pre-LN.
    """
    scheme = parse(str(text))
    if scheme.is_pre_ln:
        raise LNSConfigError("scheme=preln is OLMo-core's own block: leave _CLASS_ away")
    given = {key: value for key, value in fields.items() if value is not None}
    spelled = ":" in str(text)  # also where it spells a parameter's default
    for key, value in given.items():
        written = scheme.parameters.get(key)
        if spelled and written is not None and written != float(value):
            raise LNSConfigError(f"scheme={text} and {key}={value} contradict each other")
    return Scheme.of(scheme.name, **{**scheme.parameters, **given})
