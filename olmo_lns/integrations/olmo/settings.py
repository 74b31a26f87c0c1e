"""What an OLMo config asks for: the scheme and the initialization, completed from the environment."""

from __future__ import annotations

from typing import Any

from olmo_lns import environment
from olmo_lns.errors import LNSConfigError, did_you_mean
from olmo_lns.integrations.olmo import types
from olmo_lns.schemes import Scheme, parse
from olmo_lns.schemes.initialization import resolve

__all__ = ["check_environment", "initialization", "scheme"]

#: What the environment may say; ``scaled`` and ``depth_scaled`` belong into the config, as an init_fn.
_INITIALIZATIONS = ("plain", "upstream")


def scheme(layer_norm_type: Any) -> Scheme:
    """The scheme of a type; one named without parameters takes them from ``$OLMO_LNS_SCHEME``.

    :raises LNSConfigError: a value that is not allowed, or two that contradict each other.
    """
    written = types.scheme_of(layer_norm_type)
    given = _from_environment()
    if given is None or written.is_pre_ln or given == written:
        return written
    if given.name != written.name or types.has_parameters(layer_norm_type):
        raise LNSConfigError(
            f"layer_norm_type {layer_norm_type!s} and {environment.SCHEME}={given} contradict each other: "
            "unset the variable, or make them agree."
        )
    return given


def initialization(config: Any) -> str:
    """How the residual output projections of an OLMo ``ModelConfig`` are drawn.

    :raises LNSConfigError: a value that is not allowed, or two that contradict each other.
    """
    asked = _initialization_from_environment()
    if ours := types.INIT_FNS.get(str(config.init_fn)):
        if asked:
            raise LNSConfigError(
                f"init_fn {config.init_fn!s} and {environment.INITIALIZATION}={asked} contradict each other: "
                "unset the variable."
            )
        return ours
    return resolve(asked, types.scheme_of(config.layer_norm_type))


def check_environment() -> None:
    """:raises LNSConfigError: a variable that is unknown, or whose value is not allowed."""
    environment.check()
    _from_environment()
    _initialization_from_environment()


def _from_environment() -> Scheme | None:
    text = environment.read(environment.SCHEME)
    if not text:
        return None
    try:
        return parse(text)
    except LNSConfigError as error:
        raise LNSConfigError(f"{environment.SCHEME}: {error}") from None


def _initialization_from_environment() -> str:
    value = environment.read(environment.INITIALIZATION)
    if value and value not in _INITIALIZATIONS:
        hint = {ours: name for name, ours in types.INIT_FNS.items()}.get(value)
        raise LNSConfigError(
            f"{environment.INITIALIZATION}={value!r}{did_you_mean(value, _INITIALIZATIONS)}: "
            f"expected one of {', '.join(_INITIALIZATIONS)}"
            + (f"; for {value} set init_fn: {hint} in the config, where a resumed run finds it again" if hint else "")
        )
    return value
