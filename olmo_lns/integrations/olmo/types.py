"""OLMo's layer-norm types and initializations, extended in place, and what each of ours means.

``LayerNormType`` is an enum inside a closed OmegaConf schema, so the type's name is the only
place of a config that can carry a scheme: ``<scheme>_<base norm>[:key=value,…]``, such as
``lns_rms`` or ``lns_default:exponent=0.25``. A bare ``lns`` keeps the base norm that the config
names (see :mod:`olmo_lns.integrations.olmo.config`); where nothing is named it means RMSNorm.
"""

from __future__ import annotations

from typing import Any, Callable

from olmo_lns import environment
from olmo_lns.errors import LNSConfigError, did_you_mean
from olmo_lns.integrations import patching
from olmo_lns.integrations.olmo.upstream import NAME
from olmo_lns.record import Record
from olmo_lns.schemes import PRE_LN, Scheme, names, parse

__all__ = [
    "BASES", "INIT_FNS", "PLAIN", "asked_record", "base_type", "check_environment", "extend", "has_parameters",
    "has_scheme", "scheme_of", "spell",
]  # fmt: skip

#: OLMo's own types that a scheme can be laid over.
BASES = ("rms", "default", "low_precision")
#: Our init_fn -> the initialization of the residual output projections; everything else as ``normal``.
INIT_FNS = {"normal_scaled": "scaled", "normal_depth_scaled": "depth_scaled"}
#: What the environment may say; ``scaled`` and ``depth_scaled`` belong into the config, as an init_fn.
_INITIALIZATIONS = ("plain", "upstream")
#: On a ``ModelConfig`` that was given to ``olmo_lns.plain_initialization``.
PLAIN = "lns_plain_initialization"


def _split(layer_norm_type: Any) -> tuple[str, str, str]:
    """``"lns_rms:exponent=0.25"`` -> ``("lns", "rms", "exponent=0.25")``; the scheme of a stock type is ``""``."""
    name, _, arguments = str(layer_norm_type).partition(":")
    schemes = set(names()) - {PRE_LN.name}
    for base in ("", *BASES):
        scheme = name.removesuffix(f"_{base}") if base else name
        if scheme in schemes:
            return scheme, base, arguments
    return "", str(layer_norm_type), ""


def has_scheme(layer_norm_type: Any) -> bool:
    """Whether a type is one of ours; an enum member, or a plain string as hf_olmo passes it."""
    return bool(_split(layer_norm_type)[0])


def has_parameters(layer_norm_type: Any) -> bool:
    """Whether a type says parameters of its scheme, be it their defaults."""
    return bool(_split(layer_norm_type)[2])


def scheme_of(layer_norm_type: Any) -> Scheme:
    """The scheme that a type names, Pre-LN for a stock type.

    :raises LNSConfigError: a parameter that the scheme does not have, or a value that it does not allow.
    """
    scheme, _, arguments = _split(layer_norm_type)
    return parse(f"{scheme}:{arguments}" if arguments else scheme) if scheme else PRE_LN


def base_type(layer_norm_type: Any) -> str:
    """OLMo's own name of the norm: ``rms`` for ``lns`` and ``lns_rms``, unchanged for stock types."""
    return _split(layer_norm_type)[1] or "rms"


def spell(scheme: Scheme, base: str) -> str:
    """The type of ``scheme`` over ``base``, with the parameters that are not at their default."""
    if scheme.is_pre_ln:
        return base
    return f"{scheme.name}_{base}" + (f":{scheme.arguments}" if scheme.arguments else "")


def asked_record(config: Any) -> Record:
    """What a model built from an OLMo ``ModelConfig`` would be; a scheme named without parameters takes them from
    ``$OLMO_LNS_SCHEME``.

    :raises LNSConfigError: a value that is not allowed, or two that contradict each other.
    """
    kind = config.layer_norm_type
    scheme = scheme_of(kind)
    given = None if scheme.is_pre_ln else _scheme_of_environment()
    if given is not None and given != scheme:
        if given.name != scheme.name or has_parameters(kind):
            raise LNSConfigError(
                f"layer_norm_type {kind!s} and {environment.SCHEME}={given} contradict each other: "
                "unset the variable, or make them agree."
            )
        scheme = given
    ours, variable = INIT_FNS.get(str(config.init_fn)), _initialization_of_environment()
    asked = {f"init_fn {config.init_fn!s}": ours, f"{environment.INITIALIZATION}={variable}": variable}
    asked["plain_initialization(config)"] = "plain" if getattr(config, PLAIN, False) else None
    said = {words: value for words, value in asked.items() if value}
    if (ours and len(said) > 1) or len(set(said.values())) > 1:
        raise LNSConfigError(f"{' and '.join(said)} contradict each other: unset the variable, or leave the call out.")
    drawn = next(iter(said.values()), scheme.definition.initialization)
    return Record(scheme, "" if scheme.is_pre_ln else base_type(kind), str(drawn))


def check_environment() -> None:
    """:raises LNSConfigError: a variable that is unknown, or whose value is not allowed."""
    environment.check()
    _scheme_of_environment()
    _initialization_of_environment()


def _scheme_of_environment() -> Scheme | None:
    if not (text := environment.read(environment.SCHEME)):
        return None
    try:
        return parse(text)
    except LNSConfigError as error:
        raise LNSConfigError(f"{environment.SCHEME}: {error}") from None


def _initialization_of_environment() -> str:
    value = environment.read(environment.INITIALIZATION)
    if value and value not in _INITIALIZATIONS:
        hint = {ours: name for name, ours in INIT_FNS.items()}.get(value)
        raise LNSConfigError(
            f"{environment.INITIALIZATION}={value!r}{did_you_mean(value, _INITIALIZATIONS)}: "
            f"expected one of {', '.join(_INITIALIZATIONS)}"
            + (f"; for {value} set init_fn: {hint} in the config, where a resumed run finds it again" if hint else "")
        )
    return value


def extend(layer_norm_type: Any, init_fn_type: Any, *, verified: bool) -> None:
    """Add our members to OLMo's two enums; idempotent.

    :param verified: else there are none, and a look-up of one says why.
    """
    schemes = [scheme for scheme in names() if scheme != PRE_LN.name]
    known_types = [name for scheme in schemes for name in (scheme, *(f"{scheme}_{base}" for base in BASES))]
    for enum_class, ours, known in (
        (layer_norm_type, has_scheme, known_types),
        (init_fn_type, INIT_FNS.__contains__, [*INIT_FNS]),
    ):
        for name in known if verified else ():
            _add_member(enum_class, name)
        for table in ("_member_map_", "_value2member_map_"):
            present = getattr(enum_class, table)
            if not isinstance(present, _Members):
                type.__setattr__(enum_class, table, _Members(present, enum_class, ours))


class _Members(dict):
    """An enum's table that makes a member the first time a type with parameters is looked up.

    In every way a member can be asked for: by name (OmegaConf), by value (unpickling), by this or another process.
    """

    def __init__(self, present: dict[Any, Any], enum_class: Any, ours: Callable[[str], bool]) -> None:
        super().__init__(present)
        self.enum_class, self.ours = enum_class, ours

    def __missing__(self, name: Any) -> Any:
        if not isinstance(name, str) or not self.ours(name):
            raise KeyError(name)
        patching.require_verified(NAME)
        try:
            scheme_of(name)
        except LNSConfigError as error:
            raise KeyError(f"{name}: {error}") from error
        return _add_member(self.enum_class, name)


def _add_member(enum_class: Any, name: str) -> Any:
    """The member ``name``, made where it is not there yet.

    Its name equals its value because OmegaConf resolves by name. Made by hand because an enum
    with members cannot be subclassed, and a second class would not be the schema's.
    """
    if name in enum_class.__members__:
        return enum_class.__members__[name]
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
    return member
