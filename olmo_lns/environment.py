"""Environment variables of this package.

In this package only this module reads ``OLMO_LNS_*``. The start-up file ``olmo_lns_autoload.pth`` reads
``OLMO_LNS_DISABLE`` itself.

A variable with this prefix that is not in the list may be a typing error. In a run with a scheme, and in the commands
of this package, :func:`check` raises an error for it. When a framework is only imported, :func:`warn` logs it.
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

#: Name -> its effect in one line, for help texts and ``olmo-lns doctor``.
VARIABLES = {
    ALLOW_MISMATCH: "1 loads a checkpoint whose config names another scheme than the run, with a warning",
    DISABLE: "1 switches the start-up hook off, so that no framework is changed when it is imported",
    INITIALIZATION: "OLMo: 'upstream' keeps scaled initialization under a scheme, 'plain' removes it without a scheme",
    MONITOR: "logs the variance of each block's output while OLMo trains, for example 'every=100'",
    NORM_BACKEND: "implementation of the norms: auto, te or torch",
}

#: Variables with the values 0 and 1.
_SWITCHES = (ALLOW_MISMATCH, DISABLE)

_SCHEME_SETTING = "layer_norm_type=lns:exponent=..."
#: Part of a name that a user may guess -> the right setting.
_REMEDIES = {"EXPONENT": _SCHEME_SETTING, "SCHEME": _SCHEME_SETTING, "SCALED_INIT": f"{INITIALIZATION}=..."}


def read(name: str) -> str:
    """Return the value of a variable without surrounding blanks, or ``""`` if it is not set."""
    if name not in VARIABLES:
        raise KeyError(f"{name} is not in the list of variables")
    return os.environ.get(name, "").strip()


def is_set(name: str) -> bool:
    """Return true if the value of a variable is ``1``."""
    return read(name) == "1"


def check() -> None:
    """Check the names of all ``OLMO_LNS_*`` variables and the values of the switches.

    :raises LNSConfigError: if a name is unknown, or a switch is neither 0 nor 1.
    """
    # Compared without the prefix, which would make all names look alike.
    known = {name.removeprefix(PREFIX): name for name in VARIABLES} | _REMEDIES
    for name in sorted(os.environ):
        if name.startswith(PREFIX) and name not in VARIABLES:
            hint = did_you_mean(name.removeprefix(PREFIX), known, spell=known.__getitem__)
            raise LNSConfigError(
                f"The environment variable {name} is unknown{hint}. "
                f"The variables are {', '.join(sorted(VARIABLES))}. Correct the name, or unset the variable."
            )
    for name in _SWITCHES:
        if (value := read(name)) not in ("", "0", "1"):
            raise LNSConfigError(
                f"{name} is {value!r}. The values are 1 (on) and 0 (off). Set one of them, or unset the variable."
            )


def warn() -> None:
    """Log an error of :func:`check` as a warning, once in a process, so that importing a framework does not fail."""
    try:
        check()
    except LNSConfigError as error:
        _warn_once(str(error))


@lru_cache
def _warn_once(text: str) -> None:
    log.warning("%s (In a run with a scheme this is an error.)", text)


def refuse_disabled(request: str = "this command runs OLMo with the plugin") -> None:
    """Refuse a request that needs the plugin if the plugin is switched off.

    :param request: main clause for the message: who needs the plugin.
    :raises LNSConfigError: if ``OLMO_LNS_DISABLE`` is 1.
    """
    if is_set(DISABLE):
        raise LNSConfigError(
            f"{DISABLE}=1 is set, but {request}. Unset {DISABLE}, or run the framework's script without the plugin."
        )


def describe() -> str:
    """Return the list of variables for a help text."""
    width = max(map(len, VARIABLES))
    return "environment:\n" + "\n".join(f"  {name:<{width}}  {text}" for name, text in sorted(VARIABLES.items()))
