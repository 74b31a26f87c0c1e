"""OLMo's layer-norm types, extended in place, and what each of ours means.

``LayerNormType`` is an enum inside a closed OmegaConf schema, so the type name is the only place
of a config that can carry LayerNorm Scaling, and with it the base norm: ``lns_rms``,
``lns_default``, ``lns_low_precision``. ``lns`` keeps the base norm that the config names (see
:mod:`olmo_lns.integrations.olmo.config`); where nothing is named it means RMSNorm.
"""

from __future__ import annotations

from typing import Any

__all__ = ["BASE_OF", "LNS_TYPES", "base_type", "extend_enum", "is_lns", "resolve"]

#: Our type -> OLMo's type of the same norm without the factor.
BASE_OF = {"lns": "rms", "lns_rms": "rms", "lns_default": "default", "lns_low_precision": "low_precision"}
LNS_TYPES = tuple(BASE_OF)


def is_lns(layer_norm_type: Any) -> bool:
    """``layer_norm_type`` is an enum member, or a plain string as hf_olmo passes it."""
    return str(layer_norm_type) in BASE_OF


def base_type(layer_norm_type: Any) -> str:
    """OLMo's own name of the norm: ``rms`` for ``lns_rms``, unchanged for stock types."""
    return BASE_OF.get(str(layer_norm_type), str(layer_norm_type))


def resolve(asked: str, named: str) -> str:
    """What ``asked`` becomes over a config that names ``named``: ``lns`` over ``default`` -> ``lns_default``."""
    return asked if asked != "lns" else f"lns_{base_type(named)}"


def extend_enum(enum_class: Any) -> None:
    """Add our members to ``LayerNormType``; idempotent.

    The member's name equals its value because OmegaConf resolves by name. Made by hand because
    an enum with members cannot be subclassed, and a second class would not be the schema's.
    """
    for name in LNS_TYPES:
        if name in enum_class.__members__:
            continue
        member = str.__new__(enum_class, name)
        member._name_ = name
        member._value_ = name
        member.__objclass__ = enum_class
        member._sort_order_ = len(enum_class.__members__)
        # EnumMeta forbids plain assignment of members.
        type.__setattr__(enum_class, name, member)
        enum_class._member_names_.append(name)
        enum_class._member_map_[name] = member
        enum_class._value2member_map_[name] = member
