"""Every environment variable of this package; nothing else reads ``OLMO_LNS_*``.

A variable with our prefix that is not listed here may be a typing error, or somebody's own. Where a scheme runs,
and in our commands, :func:`check` refuses it; where a framework is only imported, :func:`warn` says it.
"""

from __future__ import annotations

import logging
import os
from functools import lru_cache

from olmo_lns.errors import LNSConfigError, did_you_mean

log = logging.getLogger("olmo_lns")

PREFIX = "OLMO_LNS_"

ALLOW_MISMATCH = "OLMO_LNS_ALLOW_MISMATCH"
DISABLE = "OLMO_LNS_DISABLE"
INITIALIZATION = "OLMO_LNS_INITIALIZATION"
MONITOR = "OLMO_LNS_MONITOR"
NORM_BACKEND = "OLMO_LNS_NORM_BACKEND"

#: Name -> what it does, in one line; the help texts and ``olmo-lns doctor`` are made from it.
VARIABLES = {
    ALLOW_MISMATCH: "1 loads a checkpoint whose config names another scheme than the run, with a warning",
    DISABLE: "1 keeps the installed plugin out of every interpreter",
    INITIALIZATION: "OLMo: 'upstream' keeps scaled initialization under a scheme, 'plain' takes it off without one",
    MONITOR: "logs the variance of each block's output while OLMo trains, for example 'every=100'",
    NORM_BACKEND: "which implementation runs the norms: auto, te or torch",
}

#: The variables that are on or off.
_SWITCHES = (ALLOW_MISMATCH, DISABLE)

#: Part of a name that a user may guess -> the setting that he wants.
_TYPE = "layer_norm_type=lns:exponent=..."
_ELSEWHERE = {"EXPONENT": _TYPE, "SCHEME": _TYPE, "SCALED_INIT": f"{INITIALIZATION}=..."}


def read(name: str) -> str:
    """The value without surrounding blanks; ``""`` where the variable is not set."""
    if name not in VARIABLES:
        raise KeyError(f"{name} is not in the list of variables")
    return os.environ.get(name, "").strip()


def is_set(name: str) -> bool:
    """Return true for a switch that is on: its value is ``1``."""
    return read(name) == "1"


def check() -> None:
    """:raises LNSConfigError: an ``OLMO_LNS_*`` variable that nothing reads, with the nearest that is, or a switch
    that is neither on nor off.
    """
    # Without the prefix, which would make any two of them look alike.
    known = {name.removeprefix(PREFIX): name for name in VARIABLES} | _ELSEWHERE
    for name in sorted(os.environ):
        if name.startswith(PREFIX) and name not in VARIABLES:
            hint = did_you_mean(name.removeprefix(PREFIX), known, spell=known.__getitem__)
            raise LNSConfigError(
                f"environment variable {name} is unknown{hint}: "
                f"known are {', '.join(sorted(VARIABLES))}. Unset it, or correct its name."
            )
    for name in _SWITCHES:
        if (value := read(name)) not in ("", "0", "1"):
            raise LNSConfigError(f"{name}={value}: expected 1, which is on, or 0; set {name}=1, or unset it")


def warn() -> None:
    """Log what :func:`check` refuses as a warning, once a process: the import of a framework must not fail."""
    try:
        check()
    except LNSConfigError as error:
        _warn_once(str(error))


@lru_cache
def _warn_once(text: str) -> None:
    log.warning("%s (Where a scheme runs, this is an error.)", text)


def refuse_disabled(asked: str = "this command runs OLMo with the plugin") -> None:
    """:raises LNSConfigError: the plugin is switched off; for what was asked for by name and needs it."""
    if is_set(DISABLE):
        raise LNSConfigError(
            f"{DISABLE}=1 is set, but {asked}: unset {DISABLE}, or start the framework's own script without us"
        )


def describe() -> str:
    """The list, for a help text."""
    width = max(map(len, VARIABLES))
    return "environment:\n" + "\n".join(f"  {name:<{width}}  {text}" for name, text in sorted(VARIABLES.items()))
