"""This package's members of OLMo's ``LayerNormType`` and ``InitFnType``, and the configs that name one.

OLMo's config has a closed schema, and ``LayerNormType`` is an enum in it. The name of the type is therefore the only
place in a config that can name a scheme. It has the form ``<scheme>_<base norm>[:key=value,…]``, such as ``lns_rms`` or
``lns_default:exponent=0.25``. A bare ``lns`` on the command line keeps the base norm of the config file. A bare ``lns``
in a config file means RMSNorm.
"""

from __future__ import annotations

import logging
from contextlib import contextmanager
from typing import Any, Callable, Iterator

from olmo_lns import environment, hook
from olmo_lns.errors import LNSConfigError, did_you_mean
from olmo_lns.schemes import PRE_LN, Scheme, names, parse

log = logging.getLogger("olmo_lns")

#: OLMo's own types that a scheme can be laid over.
BASES = ("rms", "default", "low_precision")
#: A value of ``init_fn`` that this package adds -> its initialization of the residual output projections. All other
#: weights are drawn as under OLMo's ``normal``.
INIT_FNS = {"normal_scaled": "scaled", "normal_depth_scaled": "depth_scaled"}
#: Values of $OLMO_LNS_INITIALIZATION. ``scaled`` and ``depth_scaled`` are set in the config, as an init_fn.
_INITIALIZATIONS = ("plain", "upstream")


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
    """Return true for a type of this package: an enum member, or a plain string as hf_olmo passes it."""
    return bool(_split(layer_norm_type)[0])


def scheme_of_type(layer_norm_type: Any) -> Scheme:
    """Return the scheme that a type names. A stock type names Pre-LN.

    :raises LNSConfigError: if the scheme does not have a parameter, or does not allow its value.
    """
    scheme, _, arguments = _split(layer_norm_type)
    return parse(f"{scheme}:{arguments}" if arguments else scheme) if scheme else PRE_LN


def base_type(layer_norm_type: Any) -> str:
    """Return OLMo's own name of the norm, which is ``rms`` for ``lns`` and ``lns_rms``. Stock types are unchanged."""
    return _split(layer_norm_type)[1] or "rms"


def type_name(scheme: Scheme, base: str) -> str:
    """Spell the type of ``scheme`` over ``base``, with the parameters that are not at their default."""
    if scheme.is_pre_ln:
        return base
    return f"{scheme.name}_{base}" + (f":{scheme.arguments}" if scheme.arguments else "")


def requested(config: Any) -> tuple[Scheme, str]:
    """Return the scheme and the initialization of an OLMo ``ModelConfig`` and ``$OLMO_LNS_INITIALIZATION``.

    :raises LNSConfigError: if a value is not allowed, or two values contradict each other.
    """
    scheme = scheme_of_type(config.layer_norm_type)
    ours, variable = INIT_FNS.get(str(config.init_fn)), _initialization_of_environment()
    sources = {f"init_fn {config.init_fn!s}": ours, f"{environment.INITIALIZATION}={variable}": variable}
    sources["plain_initialization(config)"] = "plain" if getattr(config, "lns_plain_initialization", False) else None
    requests = {origin: value for origin, value in sources.items() if value}
    if (ours and len(requests) > 1) or len(set(requests.values())) > 1:
        raise LNSConfigError(f"{' and '.join(requests)} contradict each other. Unset the variable, or remove the call.")
    return scheme, next(iter(requests.values()), str(scheme.definition.initialization))


@contextmanager
def stock_names(config: Any) -> Iterator[None]:
    """Give ``config`` OLMo's own names while OLMo builds or draws, and restore ``config`` afterwards."""
    from olmo.config import InitFnType, LayerNormType

    kind, init_fn = config.layer_norm_type, config.init_fn  # hf_olmo passes plain strings
    if has_scheme(kind):
        config.layer_norm_type = LayerNormType(base_type(kind))
    if str(init_fn) in INIT_FNS:
        config.init_fn = InitFnType.normal
    try:
        yield
    finally:
        config.layer_norm_type, config.init_fn = kind, init_fn


def _initialization_of_environment() -> str:
    value = environment.read(environment.INITIALIZATION)
    if value and value not in _INITIALIZATIONS:
        raise LNSConfigError(
            f"{environment.INITIALIZATION} is {value!r}{did_you_mean(value, _INITIALIZATIONS)}, but expected one of "
            f"{', '.join(_INITIALIZATIONS)}. For another initialization set in the config init_fn: "
            f"{' or '.join(INIT_FNS)}."
        )
    return value


def add_members(layer_norm_type: Any, init_fn_type: Any) -> None:
    """Add this package's members to OLMo's two enums. A second call does nothing."""
    for scheme in names():
        for name in (scheme, *(f"{scheme}_{base}" for base in BASES)) if scheme != PRE_LN.name else ():
            _add_member(layer_norm_type, name)
    for name in INIT_FNS:
        _add_member(init_fn_type, name)
    for table in ("_member_map_", "_value2member_map_"):
        present = getattr(layer_norm_type, table)
        if not isinstance(present, _Members):
            type.__setattr__(layer_norm_type, table, _Members(present, layer_norm_type))


class _Members(dict):
    """A table of ``LayerNormType`` that makes a member at the first look-up of a type with parameters.

    OmegaConf looks members up by name, and unpickling by value, also in another process.
    """

    def __init__(self, present: dict[Any, Any], enum_class: Any) -> None:
        super().__init__(present)
        self.enum_class = enum_class

    def __missing__(self, name: Any) -> Any:
        if not isinstance(name, str) or not has_scheme(name):
            raise KeyError(name)
        try:
            scheme_of_type(name)
        except LNSConfigError as error:
            from olmo.exceptions import OLMoConfigurationError

            raise OLMoConfigurationError(f"layer_norm_type {name!r}: {error}") from None
        return _add_member(self.enum_class, name)


def _add_member(enum_class: Any, name: str) -> Any:
    """Return the member ``name``; make it if it does not exist.

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


def require_supported(config: Any) -> None:
    """Check that OLMo's blocks can compute the scheme of an OLMo ``ModelConfig``.

    :raises OLMoConfigurationError: if the config has ``norm_after``, or the scheme has a plan that this integration
        cannot build.
    :raises UpstreamChangedError: if this version of OLMo lacks a function that a scheme needs.
    """
    from olmo.exceptions import OLMoConfigurationError

    hook.require_wrapped("olmo")
    if has_scheme(config.layer_norm_type):
        environment.check()
    kind, problem = f"layer_norm_type={config.layer_norm_type!s}", ""
    if config.norm_after and has_scheme(config.layer_norm_type):
        raise OLMoConfigurationError(
            f"{kind} with norm_after=true: the scheme already defines the places of the norms. Set norm_after: false."
        )
    for number, sub_layer, plan in scheme_of_type(config.layer_norm_type).plans(config.n_layers):
        if plan.norm_count not in (1, 2):
            problem = f"found {plan.norm_count} norms in a sub-layer, expected one or two"
        elif plan.groups > 1 and plan.norm_count == 2:
            problem = "found grouped statistics and two norms in a sub-layer, expected one norm"
        elif config.d_model % plan.groups:
            problem = f"{plan.groups} groups do not divide model.d_model={config.d_model}"
        if problem:
            raise OLMoConfigurationError(f"{kind}, block {number}, {sub_layer}: {problem}.")


def wrap_load(load: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``BaseConfig.load`` so that the loaded config names the resolved type, parameters included."""

    def wrapped(cls: Any, path: Any, overrides: Any = None, key: str | None = None, *args: Any, **kwargs: Any) -> Any:
        from olmo.config import ModelConfig

        for override in overrides or ():
            _check_override(override)
        config = load(cls, path, overrides, key, *args, **kwargs)
        model = config if isinstance(config, ModelConfig) else getattr(config, "model", None)
        if isinstance(model, ModelConfig) and has_scheme(model.layer_norm_type):
            place = [key] if key else []
            place += ["model"] if model is not config else []
            _resolve(model, path, ".".join([*place, "layer_norm_type"]))
            require_supported(model)
        return config

    return wrapped


def _check_override(override: str) -> None:
    """Check an override of the norm type, for which OLMo's own error would list every name.

    :raises OLMoConfigurationError: if the option has no value, for example because of a blank instead of ``=``, or an
        unknown one.
    """
    from olmo.config import LayerNormType
    from olmo.exceptions import OLMoConfigurationError

    name, _, value = str(override).partition("=")
    if name.rpartition(".")[2] != "layer_norm_type":
        return
    if value == "True":  # OLMo's launcher completes an option without a value
        raise OLMoConfigurationError(f"--{name} has no value. Type it with an equals sign, as in --{name}=lns.")
    kind, known = value.partition(":")[0], list(dict.fromkeys([*names(), *LayerNormType.__members__]))
    if kind not in known and (hint := did_you_mean(kind, known)):
        raise OLMoConfigurationError(
            f"--{name}={value} names an unknown norm type{hint}. docs/schemes.md lists the schemes."
        )


def _resolve(model: Any, path: Any, name: str) -> None:
    """Complete the norm type of a loaded config, so that it names the scheme and the base norm.

    A command line may give only a scheme, such as ``lns``. The base norm is then the one that the config file has, or
    OLMo's default if the file has none. If the file itself gives only a scheme, the base norm is RMSNorm.

    :param name: key of the norm type in the file.
    """
    from olmo.config import LayerNormType, ModelConfig
    from omegaconf import OmegaConf

    written = str(model.layer_norm_type)
    file_type = OmegaConf.select(OmegaConf.load(str(path)), name, throw_on_missing=False)
    base_source = str(ModelConfig.layer_norm_type if file_type is None else file_type)
    scheme = scheme_of_type(written)
    bare = written.partition(":")[0] == scheme.name
    spelled = type_name(scheme, base_type(base_source if bare else written))
    if spelled == written:
        return
    model.layer_norm_type = LayerNormType[spelled]
    log.info("layer_norm_type=%s (over %s in the config): using %s", written, base_source, spelled)
