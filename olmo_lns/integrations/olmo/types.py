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
from olmo_lns.schemes import PRE_LN, Scheme, names, parse
from olmo_lns.schemes.initialization import resolve as resolve_initialization

__all__ = [
    "BASES",
    "INIT_FNS",
    "PLAIN",
    "base_type",
    "check_environment",
    "extend",
    "has_parameters",
    "has_scheme",
    "initialization_in_force",
    "refuse",
    "resolve",
    "scheme_in_force",
    "scheme_of",
    "spell",
    "type_names",
]

#: OLMo's own types that a scheme can be laid over.
BASES = ("rms", "default", "low_precision")
#: Our init_fn -> the initialization of the residual output projections; everything else as ``normal``.
INIT_FNS = {"normal_scaled": "scaled", "normal_depth_scaled": "depth_scaled"}


def _split(layer_norm_type: Any) -> tuple[str, str, str]:
    """``"lns_rms:exponent=0.25"`` -> ``("lns", "rms", "exponent=0.25")``; the scheme of a stock type is ``""``."""
    name, _, arguments = str(layer_norm_type).partition(":")
    # The longest first: one scheme's name may begin another's.
    for scheme in sorted(names(), key=len, reverse=True):
        if scheme == PRE_LN.name:
            continue
        if name == scheme:
            return scheme, "", arguments
        if name.startswith(f"{scheme}_") and name.removeprefix(f"{scheme}_") in BASES:
            return scheme, name.removeprefix(f"{scheme}_"), arguments
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


def resolve(asked: str, named: str) -> str:
    """What ``asked`` becomes over a config that names ``named``: ``lns`` over ``default`` -> ``lns_default``."""
    scheme, base, arguments = _split(asked)
    if not scheme or base:
        return asked
    return f"{scheme}_{base_type(named)}" + (f":{arguments}" if arguments else "")


#: What the environment may say; ``scaled`` and ``depth_scaled`` belong into the config, as an init_fn.
_INITIALIZATIONS = ("plain", "upstream")
#: On a ``ModelConfig`` that was given to ``olmo_lns.plain_initialization``.
PLAIN = "lns_plain_initialization"


def scheme_in_force(layer_norm_type: Any) -> Scheme:
    """The scheme of a type; one named without parameters takes them from ``$OLMO_LNS_SCHEME``.

    :raises LNSConfigError: a value that is not allowed, or two that contradict each other.
    """
    written = scheme_of(layer_norm_type)
    if written.is_pre_ln or (given := _from_environment()) in (None, written):
        return written
    if given.name != written.name or has_parameters(layer_norm_type):
        raise LNSConfigError(
            f"layer_norm_type {layer_norm_type!s} and {environment.SCHEME}={given} contradict each other: "
            "unset the variable, or make them agree."
        )
    return given


def initialization_in_force(config: Any) -> str:
    """How the residual output projections of an OLMo ``ModelConfig`` are drawn.

    :raises LNSConfigError: a value that is not allowed, or two that contradict each other.
    """
    ours, variable = INIT_FNS.get(str(config.init_fn)), _initialization_from_environment()
    asked = {f"init_fn {config.init_fn!s}": ours, f"{environment.INITIALIZATION}={variable}": variable}
    asked["plain_initialization(config)"] = "plain" if getattr(config, PLAIN, False) else None
    given = {words: value for words, value in asked.items() if value}
    if (ours and len(given) > 1) or len(set(given.values())) > 1:
        raise LNSConfigError(f"{' and '.join(given)} contradict each other: unset the variable, or leave the call out.")
    return resolve_initialization(next(iter(given.values()), ""), scheme_of(config.layer_norm_type))


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
        hint = {ours: name for name, ours in INIT_FNS.items()}.get(value)
        raise LNSConfigError(
            f"{environment.INITIALIZATION}={value!r}{did_you_mean(value, _INITIALIZATIONS)}: "
            f"expected one of {', '.join(_INITIALIZATIONS)}"
            + (f"; for {value} set init_fn: {hint} in the config, where a resumed run finds it again" if hint else "")
        )
    return value


def type_names() -> tuple[str, ...]:
    """Every type of ours without parameters."""
    schemes = [scheme for scheme in names() if scheme != PRE_LN.name]
    return tuple(name for scheme in schemes for name in (scheme, *(f"{scheme}_{base}" for base in BASES)))


def extend(layer_norm_type: Any, init_fn_type: Any) -> None:
    """Add our members to OLMo's two enums; idempotent."""
    for name in type_names():
        _add_member(layer_norm_type, name)
    for name in INIT_FNS:
        _add_member(init_fn_type, name)
    for table in ("_member_map_", "_value2member_map_"):
        present = getattr(layer_norm_type, table)
        if not isinstance(present, _Members):
            type.__setattr__(layer_norm_type, table, _Members(present, lambda n: _add_member(layer_norm_type, n)))


def refuse(layer_norm_type: Any, init_fn_type: Any) -> None:
    """Leave OLMo's two enums as they are, but let a look-up of a name of ours say why it is not there."""
    from olmo_lns.integrations.olmo.upstream import require_verified

    def stop(name: str) -> Any:
        require_verified()
        raise KeyError(name)

    for enum_class, ours in ((layer_norm_type, has_scheme), (init_fn_type, INIT_FNS.__contains__)):
        for table in ("_member_map_", "_value2member_map_"):
            type.__setattr__(enum_class, table, _Members(getattr(enum_class, table), stop, ours))


class _Members(dict):
    """An enum's table that makes a member the first time a type with parameters is looked up.

    In every way a member can be asked for: by name (OmegaConf), by value (unpickling), by this or another process.
    """

    def __init__(
        self, present: dict[Any, Any], add: Callable[[str], Any], ours: Callable[[str], bool] = has_scheme
    ) -> None:
        super().__init__(present)
        self._add, self._ours = add, ours

    def __missing__(self, name: Any) -> Any:
        if not isinstance(name, str) or not self._ours(name):
            raise KeyError(name)
        try:
            scheme_of(name)
        except LNSConfigError as error:
            raise KeyError(f"{name}: {error}") from error
        return self._add(name)


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
