"""What a launch builds: its flags, its config, the wrapped constructors, the initialization that they choose.

Megatron initializes the residual output projections (attention, MLA, MLP, experts, latent MoE, MTP) with std/sqrt(2L)
by ``output_layer_init_method``, so the finished config is the one place to change. Under ``use_mup`` the regular
``init_method`` has the width factor 1/sqrt(width_mult) too: only the depth factor goes.
"""

from __future__ import annotations

import functools
import os
import sys
from contextvars import ContextVar
from typing import Any, Callable

from torch import nn

from olmo_lns.errors import LNSConfigError
from olmo_lns.integrations import norm_sites
from olmo_lns.integrations.megatron.layers import (
    attach_layer,
    blocks_of,
    check_config,
    check_scheme,
    count_sites,
    layers_of,
)
from olmo_lns.integrations.megatron.settings import FLAGS, VISION, Settings, add_flags, mark
from olmo_lns.integrations.megatron.upstream import BRIDGE, CORE, TRAINING
from olmo_lns.integrations.patching import require_verified
from olmo_lns.schemes import PRE_LN

Init = Callable[..., None]

#: True while an MTP layer builds its inner layers, whose numbers mean something else per version.
inside_mtp: ContextVar[bool] = ContextVar("olmo_lns_inside_mtp", default=False)
_said: set[str] = set()


def say(text: str) -> None:
    """Print one line, once, as Megatron's ``print_rank_0`` does (its loggers are silent by default)."""
    if int(os.environ.get("RANK", "0")) != 0 or text in _said:
        return
    _said.add(text)
    print(f"olmo-lns: {text}", flush=True)


def start_up_line(model: nn.Module, config: Any, *, initialization: str, hybrid: bool = False) -> str:
    """The proof that the model has its scheme, read back from its modules.

    :param model: this process's part. :param hybrid: attention and MLP are layers of their own.
    """
    found = list(norm_sites.sites(model))
    numbers = sorted({site.layer_number for _, _, site in found})
    norms = sum(site.plan.norms for _, _, site in found)
    here = f"{norms} in this process (blocks {numbers[0]}-{numbers[-1]})" if found else "none in this process"
    return norm_sites.start_up_line(
        norm_sites.read_back(model) if found else Settings.of(config).scheme,
        blocks_of(config, hybrid=hybrid),
        norm=str(config.normalization),
        here=here,
        how=", ".join(dict.fromkeys(str(module.lns_method) for _, module, _ in found)),
        initialization=initialization,
    )


#: Where a config, and every copy of it, keeps the method that Megatron chose.
_UPSTREAM = "output_layer_init_method_of_megatron"


def use_plain_initialization(config: Any) -> bool:
    """Let the output projections use ``config.init_method``.

    A config of Megatron Bridge may have none yet: the wrapped constructor of a layer calls this again.

    :returns: whether the config has an ``init_method``.
    """
    if getattr(config, "init_method", None) is None:
        return False
    if not hasattr(config, _UPSTREAM):
        setattr(config, _UPSTREAM, config.output_layer_init_method)
    config.output_layer_init_method = config.init_method
    return True


def describe(config: Any, off: bool) -> str:
    """The policy in words, for the log."""
    if not off:
        return "scaled initialization kept (std/sqrt(2L) for output projections)"
    width = ", MuP's width factor kept" if getattr(config, "use_mup", False) else ""
    return f"scaled initialization off (output projections: init_method{width})"


def settings_of(config: Any) -> Settings:
    """The settings that a config was marked with.

    :raises LNSConfigError: the command line asked for a scheme, but this config was not made from it (as with
        ``--yaml-cfg``, which replaces every argument): no model is trained without its factors in silence.
    """
    if not hasattr(config, "layernorm_scaling"):
        args = getattr(sys.modules.get("megatron.training.global_vars"), "_GLOBAL_ARGS", None)
        asked = Settings.of(args)
        flag = asked.flag if asked.active else FLAGS[3] if asked.no_scaled_init else ""
        if getattr(args, "yaml_cfg", None):
            flag = next((word for word in sys.argv[1:] if word.split("=")[0] in FLAGS), flag)
        if flag:
            raise LNSConfigError(
                f"{flag} was given, but this {type(config).__name__} was not made by "
                "core_transformer_config_from_args (--yaml-cfg replaces every argument) and does not carry it: give "
                "Megatron's settings as flags, or call olmo_lns.integrations.megatron.apply(config) before the model "
                "is built."
            )
    return Settings.of(config)


def transformer_layer(original: Init) -> Init:
    """Set plain initialization before the layer is built, and attach the scheme to its two sub-layers afterwards."""

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        config = _config(args, kwargs)
        settings = settings_of(config)
        if settings.active:
            check_config(config, settings.scheme)
        if settings.scaled_init_off:
            use_plain_initialization(config)
        original(self, *args, **kwargs)
        if settings.active and not inside_mtp.get():
            attach_layer(self, settings)

    return __init__


def layer_stack(original: Init, *, hybrid: bool = False) -> Init:
    """Require two sites in each built layer; in a hybrid model one in each attention and MLP/MoE layer."""

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        config = _config(args, kwargs)
        settings = settings_of(config)
        if settings.active:
            require_verified(BRIDGE)
            check_config(config, settings.scheme)
            if hybrid and inside_mtp.get():
                raise LNSConfigError(
                    f"{settings.scheme.definition.title} does not support MTP layers of a hybrid model: drop one."
                )
            if hybrid and config.num_layers % 2:
                raise LNSConfigError(
                    f"the hybrid pattern has {config.num_layers} layers: attention without an MLP behind it is no "
                    "block. Only the plain transformer patterns are supported, '*-' or '*E' repeated."
                )
        original(self, *args, **kwargs)
        if not settings.active:
            return
        expected = 1 if hybrid else 2
        for layer in self.layers:
            if (found := count_sites(layer)) != expected:
                raise LNSConfigError(
                    f"{type(layer).__name__} {getattr(layer, 'layer_number', '?')} of {type(self).__name__} has "
                    f"{found} sub-layers with the scheme, expected {expected}: only transformer layers are supported "
                    "(no Mamba, GDN or custom layers)."
                )
        initialization = describe(self.config, settings.scaled_init_off)
        say(start_up_line(self, self.config, initialization=initialization, hybrid=hybrid))

    return __init__


hybrid_stack = functools.partial(layer_stack, hybrid=True)


def mtp_layer(original: Init) -> Init:
    """Attach the scheme to the inner layer of MTP module k as block L + k.

    The layer's own number is not used: it is k in some versions, L + k in one, and 1 in others.
    """

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        token = inside_mtp.set(True)
        try:
            original(self, *args, **kwargs)
        finally:
            inside_mtp.reset(token)
        settings = settings_of(self.config)
        if settings.active:
            depth = self.config.num_layers + self.layer_number
            inner = layers_of(self)
            if len(inner) != 1 or attach_layer(inner[0], settings, depth=depth) != 2:
                raise LNSConfigError(f"MTP layer {self.layer_number} holds {len(inner)} transformer layers, expected 1")
            say(f"MTP layer {self.layer_number}: 2 sites, s as block {depth}")

    return __init__


def vision_tower(original: Init) -> Init:
    """Free the tower's config, often a copy of the language model's, of the scheme."""

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        config = _config(args, kwargs)
        settings = settings_of(config)
        if settings.active and not getattr(config, VISION, False):
            # --no-scaled-init stays: it is about every output projection.
            Settings(no_scaled_init=settings.no_scaled_init).store(config)
            if not settings.no_scaled_init and hasattr(config, _UPSTREAM):
                config.output_layer_init_method = getattr(config, _UPSTREAM)
                delattr(config, _UPSTREAM)
            say_left_out(self, config, settings)
        original(self, *args, **kwargs)

    return __init__


def say_left_out(tower: Any, config: Any, settings: Settings) -> None:
    title = settings.scheme.definition.title
    say(f"vision tower {type(tower).__name__}: no {title} in its {config.num_layers} blocks")


def _config(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return next(
        (kwargs[name] for name in ("config", "transformer_config") if name in kwargs), args[0] if args else None
    )


def add_arguments(original: Callable[..., Any]) -> Callable[..., Any]:
    """Megatron's own options, then ours."""
    return lambda parser: add_flags(original(parser))


def config_from_args(original: Callable[..., Any]) -> Callable[..., Any]:
    """Mark the config with the settings of the arguments and choose the initialization."""

    def core_transformer_config_from_args(args: Any, config_class: type | None = None) -> Any:
        config = original(args, config_class)
        settings = Settings.of(args).check()
        if settings == Settings():
            return config
        require_verified(CORE, TRAINING)
        check_scheme(settings.scheme, int(config.num_layers))
        mark(config, settings)
        settings.store(args)  # with the exponent spelled out, for the checkpoint
        if settings.scaled_init_off:
            use_plain_initialization(config)
            if not settings.active:  # otherwise part of the start-up line
                say(describe(config, off=True))
        return config

    return core_transformer_config_from_args


def model_built(original: Callable[..., Any]) -> Callable[..., Any]:
    """Hold a finished model to the scheme of the arguments, and name in them the scheme that it was built with."""

    @functools.wraps(original)
    def build(*args: Any, **kwargs: Any) -> Any:
        from megatron.training.global_vars import get_args

        result = original(*args, **kwargs)
        model = result[0] if isinstance(result, tuple) else result
        chunks = model if isinstance(model, list) else [model]
        if (settings := Settings.of(get_args())).active:
            _require_sites(chunks, settings)
        else:
            _take_over(get_args(), chunks)
        return result

    return build


def _take_over(args: Any, chunks: list[Any]) -> None:
    """Write a scheme that the model's provider applied into the arguments, by which checkpoints are compared.

    :raises LNSConfigError: the model has two schemes, or none of its blocks has the one of its config.
    """
    # From the configs: a pipeline stage without a layer has no site, and its arguments are compared all the same.
    configs = [module.config for chunk in chunks for module in chunk.modules() if hasattr(module, "config")]
    applied = {_of_built(config) for config in configs if Settings.of(config).active}
    if len(applied) > 1:
        raise LNSConfigError(
            f"one model with {' and '.join(sorted(str(each.record()) for each in applied))}, by apply(): its "
            "checkpoints can name one of them. Apply the same scheme everywhere, in the same way."
        )
    for settings in applied:
        _require_sites(chunks, settings)
        settings.store(args)
        say(f"{settings.flag}: not given but applied to the model; checkpoints of this run name it")


def _of_built(config: Any) -> Settings:
    """The settings by which a model was drawn: ``apply`` on a built model comes after its initialization."""
    plain = config.output_layer_init_method is config.init_method
    return Settings.of_scheme(Settings.of(config).scheme, keep_scaled_init=not plain)


def _require_sites(chunks: list[Any], settings: Settings) -> None:
    """:raises LNSConfigError: no block of this process's part of the model has the scheme, or one has another."""
    for chunk in chunks:
        if (found := norm_sites.read_back(chunk)) not in (settings.scheme, PRE_LN):
            raise LNSConfigError(f"{settings.scheme} was asked for, but the model was built with {found}.")
    if any(count_sites(chunk) or _has_empty_stack(chunk) for chunk in chunks):
        return
    inner = chunks[0]
    while hasattr(inner, "module"):  # DDP, Float16Module
        inner = inner.module
    kind = type(inner)
    raise LNSConfigError(
        f"{settings.flag} was given, but {kind.__module__}.{kind.__name__} was built without it in a single block: it "
        "holds no layers of Megatron Core's TransformerBlock (as with --use-legacy-models), or only a vision tower. "
        "Use a model of megatron.core, or drop the flag."
    )


def _has_empty_stack(chunk: Any) -> bool:
    """Whether a pipeline stage holds a decoder with no layer in it, only an embedding or the loss."""
    stacks = ("TransformerBlock", "HybridStack", "MambaStack")
    return any(type(module).__name__ in stacks and not len(module.layers) for module in chunk.modules())
