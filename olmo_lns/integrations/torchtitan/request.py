"""Mark norms in torchtitan's config tree.

An override replaces the config of a norm by a node of this module. The node builds torchtitan's own norm and marks it
with a request. Since it is a part of the config tree, torchtitan's logs and saved configs show the scheme.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torchtitan.protocols.module import Module

from olmo_lns import environment
from olmo_lns.errors import LNSConfigError
from olmo_lns.schemes import Scheme, parse

#: The attribute of a marked norm that has its :class:`Request`.
MARK = "lns_request"


@dataclass(frozen=True)
class Request:
    """The request of an override to a model.

    :param scheme: the scheme. It is Pre-LN if only plain initialization is requested.
    :param plain: true to remove the depth factor of the initializers.
    """

    scheme: Scheme
    plain: bool = True


@dataclass(kw_only=True, slots=True)
class MarkedNorm(Module.Config):
    """A config that builds a norm and marks it.

    :param norm: torchtitan's own config of the norm.
    :param scheme: spelling of the requested scheme.
    :param keep_scaled_init: true to keep the depth factor of the initializers.
    """

    norm: Module.Config
    scheme: str
    keep_scaled_init: bool = False

    def build(self, **kwargs: Any) -> Any:
        """Build torchtitan's norm and mark it."""
        norm = self.norm.build(**kwargs)
        setattr(norm, MARK, Request(parse(self.scheme), plain=not self.keep_scaled_init))
        return norm


def marked_norm(
    config: Any, scheme: str, exponent: float | None = None, *, keep_scaled_init: bool = False, name: str
) -> MarkedNorm:
    """Return the config node of a marked norm.

    :param config: torchtitan's config of the norm.
    :param scheme: name or full spelling of the scheme.
    :param exponent: exponent of the scheme, if it is not a part of the spelling.
    :param keep_scaled_init: true to keep the depth factor of the initializers.
    :param name: name of the override, for messages.
    :raises LNSConfigError: if a value is not allowed, or the plugin is switched off.
    """
    if environment.is_set(environment.DISABLE):
        raise LNSConfigError(
            f"{environment.DISABLE}=1 is set, but --override.imports names {name}. Unset {environment.DISABLE}, or "
            "remove the override."
        )
    environment.check()
    if not isinstance(keep_scaled_init, bool):
        raise LNSConfigError(f"{name}: keep_scaled_init is {keep_scaled_init!r}. Expected true or false.")
    return MarkedNorm(norm=config, scheme=str(parse(str(scheme), exponent)), keep_scaled_init=keep_scaled_init)


def take_request(norm: Any) -> Request | None:
    """Remove and return the request with which an override has marked a norm. It is None for any other object."""
    request: Request | None = getattr(norm, "__dict__", {}).pop(MARK, None)
    return request
