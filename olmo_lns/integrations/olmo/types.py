"""Our members of OLMo's ``LayerNormType`` and ``InitFnType``: what each means, and how a config that names one loads.

``LayerNormType`` is an enum inside a closed OmegaConf schema, so the type's name is the only
place of a config that can carry a scheme: ``<scheme>_<base norm>[:key=value,…]``, such as
``lns_rms`` or ``lns_default:exponent=0.25``. A bare ``lns`` keeps the base norm that the config
names; where nothing is named it means RMSNorm.
"""

from __future__ import annotations

import logging
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Callable, Iterator

from olmo_lns import hook, settings
from olmo_lns.errors import LNSConfigError, did_you_mean, one_line
from olmo_lns.schemes import PRE_LN, Scheme, names, parse

log = logging.getLogger("olmo_lns")

#: OLMo's own types that a scheme can be laid over.
BASES = ("rms", "default", "low_precision")
#: Our init_fn -> the initialization of the residual output projections; everything else as ``normal``.
INIT_FNS = {"normal_scaled": "scaled", "normal_depth_scaled": "depth_scaled"}
#: What the environment may say; ``scaled`` and ``depth_scaled`` belong into the config, as an init_fn.
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


@dataclass(frozen=True)
class Asked:
    """A model that a config asks for. :param base: OLMo's own type of norm. :param initialization: of the residual
    output projections, one of :data:`~olmo_lns.schemes.INITIALIZATIONS`.
    """

    scheme: Scheme
    base: str
    initialization: str

    @property
    def nothing(self) -> bool:
        """Stock OLMo, built and drawn as it is."""
        return self.scheme.is_pre_ln and self.initialization == "upstream"


def asked(config: Any) -> Asked:
    """The model that an OLMo ``ModelConfig`` asks for, with ``$OLMO_LNS_INITIALIZATION``.

    :raises LNSConfigError: a value that is not allowed, or two that contradict each other.
    """
    scheme = scheme_of(config.layer_norm_type)
    ours, variable = INIT_FNS.get(str(config.init_fn)), _initialization_of_environment()
    found = {f"init_fn {config.init_fn!s}": ours, f"{settings.INITIALIZATION}={variable}": variable}
    found["plain_initialization(config)"] = "plain" if getattr(config, "lns_plain_initialization", False) else None
    said = {words: value for words, value in found.items() if value}
    if (ours and len(said) > 1) or len(set(said.values())) > 1:
        raise LNSConfigError(f"{' and '.join(said)} contradict each other: unset the variable, or leave the call out.")
    drawn = next(iter(said.values()), str(scheme.definition.initialization))
    return Asked(scheme, base_type(config.layer_norm_type), drawn)


@contextmanager
def stock(config: Any) -> Iterator[None]:
    """OLMo's own names in place of ours, while OLMo's own code builds or draws; the config keeps what defines a run."""
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


def check_environment() -> None:
    """:raises LNSConfigError: a variable that is unknown, or whose value is not allowed."""
    settings.check()
    _initialization_of_environment()


def _initialization_of_environment() -> str:
    value = settings.read(settings.INITIALIZATION)
    if value and value not in _INITIALIZATIONS:
        hint = {drawn: name for name, drawn in INIT_FNS.items()}.get(value)
        raise LNSConfigError(
            f"{settings.INITIALIZATION}={value!r}{did_you_mean(value, _INITIALIZATIONS)}: "
            f"expected one of {', '.join(_INITIALIZATIONS)}"
            + (f"; for {value} set init_fn: {hint} in the config, where a resumed run finds it again" if hint else "")
        )
    return value


def extend(layer_norm_type: Any, init_fn_type: Any) -> None:
    """Add our members to OLMo's two enums; idempotent."""
    schemes = [scheme for scheme in names() if scheme != PRE_LN.name]
    known_types = [name for scheme in schemes for name in (scheme, *(f"{scheme}_{base}" for base in BASES))]
    for enum_class, ours, known in (
        (layer_norm_type, has_scheme, known_types),
        (init_fn_type, INIT_FNS.__contains__, [*INIT_FNS]),
    ):
        for name in known:
            _add_member(enum_class, name)
        for table in ("_member_map_", "_value2member_map_"):
            present = getattr(enum_class, table)
            if not isinstance(present, _Members):
                type.__setattr__(enum_class, table, _Members(present, enum_class, ours))


class _Members(dict):
    """An enum's table that makes a member the first time a type with parameters is looked up.

    OmegaConf looks members up by name, and unpickling by value, also in another process.
    """

    def __init__(self, present: dict[Any, Any], enum_class: Any, ours: Callable[[str], bool]) -> None:
        super().__init__(present)
        self.enum_class, self.ours = enum_class, ours

    def __missing__(self, name: Any) -> Any:
        if not isinstance(name, str) or not self.ours(name):
            raise KeyError(name)
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


def check_sizes(config: Any) -> None:
    """Refuse sizes in an OLMo ``ModelConfig`` that divide by zero, or that build for minutes before they fail.

    :raises LNSConfigError: a number that makes no model.
    """
    from olmo.exceptions import OLMoConfigurationError

    for name in ("n_heads", "n_layers", "d_model", "vocab_size", "max_sequence_length"):
        if (value := getattr(config, name)) < 1:
            raise LNSConfigError(f"model.{name}: expected at least 1, got {value}")
    try:
        kv_heads = config.effective_n_kv_heads
    except OLMoConfigurationError as error:
        raise LNSConfigError(f"model.n_kv_heads: {one_line(error)}") from None
    for name, number, whole in (("n_heads", config.n_heads, "d_model"), ("n_kv_heads", kv_heads, "n_heads")):
        if number < 1 or getattr(config, whole) % number:
            raise LNSConfigError(
                f"model.{name}: expected a divisor of {whole}, which is {getattr(config, whole)}, got {number}"
            )
    if config.n_layers > 10_000:  # blocks are built one by one: minutes of silence, and then no memory
        raise LNSConfigError(f"model.n_layers: {config.n_layers:,} blocks; more than 10,000 is taken for a slip")


def require_supported(config: Any) -> None:
    """:raises OLMoConfigurationError: a scheme in a model whose norms follow the sub-layers, or an unknown one."""
    from olmo.exceptions import OLMoConfigurationError

    if not has_scheme(config.layer_norm_type):
        return
    hook.require("olmo")
    settings.check()
    check_sizes(config)
    scheme, problem = scheme_of(config.layer_norm_type), ""
    if config.norm_after:
        problem = (
            " with norm_after=true: a scheme says itself where the norms sit. Set norm_after: false, or a stock "
            "layer_norm_type."
        )
    else:
        from olmo_lns.integrations.olmo.block import unsupported  # torch, not before a scheme is selected

        for number, sub_layer, plan in scheme.plans(config.n_layers):
            if reason := unsupported(plan, config.d_model):
                problem = f", block {number}, {sub_layer}: {reason}."
                break
    if problem:
        raise OLMoConfigurationError(f"layer_norm_type={config.layer_norm_type!s}{problem}")


def _require_no_decay(config: Any) -> None:
    """:raises OLMoConfigurationError: an OLMo ``TrainConfig`` that would decay the learned factors of its scheme."""
    from olmo.exceptions import OLMoConfigurationError

    scheme, optimizer = scheme_of(config.model.layer_norm_type), config.optimizer
    if optimizer is None or not any(plan.learned for _, _, plan in scheme.plans(config.model.n_layers)):
        return
    found = "decay_norm_and_bias=true" if optimizer.decay_norm_and_bias else ""
    if optimizer.no_decay_norm_and_bias is False:  # its old name, which the launcher obeys after this load
        found = "no_decay_norm_and_bias=false"
    if found:
        raise OLMoConfigurationError(
            f"layer_norm_type={config.model.layer_norm_type!s} with optimizer.{found}: weight decay would pull the "
            f"learned factors of {scheme.definition.title} towards 0. Set optimizer.decay_norm_and_bias: false, and "
            "leave no_decay_norm_and_bias out."
        )


def wrap_load(load: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``BaseConfig.load`` so that the loaded config names the resolved type, parameters included."""

    def wrapped(cls: Any, path: Any, *args: Any, **kwargs: Any) -> Any:
        model_key = {"TrainConfig": "model.", "ModelConfig": ""}.get(cls.__name__)
        if model_key is None:
            return load(cls, path, *args, **kwargs)
        given = {**dict(zip(("overrides", "key"), args, strict=False)), **kwargs}
        overrides = list(given.get("overrides") or [])
        named, override = _written_types(path, overrides, given.get("key"), f"{model_key}layer_norm_type")
        for value in (named, override):
            _reject_unknown(value)
        config = load(cls, path, *args, **kwargs)
        model = config.model if model_key else config
        if has_scheme(model.layer_norm_type):
            _resolve(model, named, overridden=override is not None)
            require_supported(model)
            if model_key:
                _require_no_decay(config)
        return config

    return wrapped


def _written_types(path: Any, overrides: list[str], key: str | None, name: str) -> tuple[str | None, str | None]:
    """The type that is in the file, and the one that the command line asks for, as written.

    Of several overrides of the type the last counts, and what the others make of the file names the base norm.
    """
    from omegaconf import OmegaConf

    written = OmegaConf.load(str(path))
    if key is not None:
        written = OmegaConf.select(written, key) or OmegaConf.create()

    def after(count: int) -> str | None:
        merged = OmegaConf.merge(written, OmegaConf.from_dotlist(overrides[:count]))
        named = OmegaConf.select(merged, name, throw_on_missing=False)
        return None if named is None else str(named)

    keys = (name, name.rpartition(".")[0])
    last = max((i for i, text in enumerate(overrides) if text.partition("=")[0].strip() in keys), default=None)
    return (after(0), None) if last is None else (after(last), after(len(overrides)))


def _reject_unknown(value: str | None) -> None:
    from olmo.config import LayerNormType
    from olmo.exceptions import OLMoConfigurationError

    known = [str(member) for member in LayerNormType if not has_parameters(member)]
    if value is None or value in known:
        return
    if has_scheme(value):
        try:
            scheme_of(value)
        except LNSConfigError as error:
            raise OLMoConfigurationError(f"layer_norm_type {value!r}: {error}") from None
        return
    suffixes = tuple(f"_{base}" for base in BASES)
    short = [name for name in known if not name.endswith(suffixes)]
    raise OLMoConfigurationError(
        f"unknown layer_norm_type {value!r}{did_you_mean(value, known)}. Known: {', '.join(short)}; "
        f"the schemes among them also with {', '.join(suffixes)}"
    )


def _resolve(model: Any, named: str | None, *, overridden: bool) -> None:
    from olmo.config import LayerNormType, ModelConfig

    written = str(model.layer_norm_type)
    # Written in the file itself there is nothing to keep; over a file that is silent, OLMo's default is kept.
    kept = (named or str(ModelConfig.layer_norm_type)) if overridden else "rms"
    scheme = scheme_of(written)
    bare = written.partition(":")[0] == scheme.name
    spelled = spell(scheme, base_type(kept if bare else written))
    if spelled == written:
        return
    model.layer_norm_type = LayerNormType[spelled]
    log.info("layer_norm_type=%s (over %s in the config): using %s", written, kept, spelled)
