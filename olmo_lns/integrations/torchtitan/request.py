"""What an override asks of a model: a config node that builds torchtitan's own norm and marks it.

The node stands in torchtitan's config tree, so that its logs and saved configs show the scheme.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torchtitan.protocols.module import Module

from olmo_lns import settings
from olmo_lns.errors import LNSConfigError
from olmo_lns.schemes import Scheme, parse

#: Attribute of a marked norm: its :class:`Request`.
MARK = "lns_request"


@dataclass(frozen=True)
class Request:
    """A scheme, Pre-LN for plain initialization alone. :param plain: remove the depth factor of the initializers."""

    scheme: Scheme
    plain: bool = True


@dataclass(kw_only=True, slots=True)
class MarkedNorm(Module.Config):
    """A norm's config with a request. :param norm: torchtitan's own config, which builds the norm."""

    norm: Module.Config
    scheme: str
    keep_scaled_init: bool = False

    def build(self, **kwargs: Any) -> Any:
        """Build torchtitan's norm and mark it."""
        norm = self.norm.build(**kwargs)
        setattr(norm, MARK, Request(parse(self.scheme), plain=not self.keep_scaled_init))
        return norm


def mark(
    config: Any, scheme: str, exponent: float | None = None, *, keep_scaled_init: bool = False, name: str
) -> MarkedNorm:
    """Return the config node of a marked norm.

    :param config: torchtitan's config of the norm. :param name: the override, for messages.
    :raises LNSConfigError: a value that is not allowed, Pre-LN as a scheme, or the plugin is switched off.
    """
    if settings.is_set(settings.DISABLE):
        raise LNSConfigError(
            f"{settings.DISABLE}=1 is set, but --override.imports names {name}. Unset {settings.DISABLE}, or remove "
            "the override."
        )
    settings.check()
    if not isinstance(keep_scaled_init, bool):
        raise LNSConfigError(f"{name}: keep_scaled_init is {keep_scaled_init!r}. Expected true or false.")
    return MarkedNorm(norm=config, scheme=str(_scheme(scheme, exponent, name)), keep_scaled_init=keep_scaled_init)


def _scheme(text: str, exponent: float | None, name: str) -> Scheme:
    scheme = parse(str(text))
    if exponent is None:
        return scheme
    if ":" in str(text) and scheme.parameters.get("exponent", exponent) != float(exponent):
        raise LNSConfigError(f"{name}: scheme {text} and exponent {exponent} contradict each other. Give one of them.")
    return Scheme.of(scheme.name, **{**scheme.parameters, "exponent": exponent})


def request_of(norm: Any) -> Request | None:
    """Return what an override asks of a built norm; None for a stock norm, or no norm."""
    return getattr(norm, MARK, None)
