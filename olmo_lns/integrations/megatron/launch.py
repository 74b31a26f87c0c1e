"""The functions of Megatron that are wrapped: arguments, config, the models' constructors, the set-up, checkpoints.

A config that was marked, by :func:`apply` or by the flags, gets the scheme at the end of the constructor of the
language model that is built from it: before mixed precision, DDP or FSDP wrap the model, and before weights are loaded.
Towers that are built from copies of the config stay Megatron's own.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import sys
from contextvars import ContextVar
from dataclasses import replace
from types import ModuleType
from typing import Any, Callable

from torch import nn

from olmo_lns import hook, probe, sites
from olmo_lns.errors import LNSConfigError
from olmo_lns.integrations.megatron import MODELS, layers
from olmo_lns.integrations.megatron.settings import FLAGS, Settings, add_flags
from olmo_lns.record import require_same
from olmo_lns.schemes import PRE_LN, Scheme, parse
from olmo_lns.settings import ALLOW_MISMATCH, is_set

Function = Callable[..., Any]

#: True while a language model's constructor runs: the one of its base class does not attach too.
_building: ContextVar[bool] = ContextVar("olmo_lns_building", default=False)


def model_init(original: Function) -> Function:
    """Choose the initialization before a language model is built; attach and measure afterwards."""

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        config: Any = kwargs.get("config", args[0] if args else None)
        settings = Settings.of(config)
        if settings == Settings() or _building.get():
            return original(self, *args, **kwargs)
        if settings.active:
            layers.check_config(config)
        if settings.scaled_init_off:
            config.output_layer_init_method = config.init_method
        token = _building.set(True)
        try:
            original(self, *args, **kwargs)
        finally:
            _building.reset(token)
        if settings.active:
            layers.attach(self, settings, drawn=True)
        else:
            measured = ", ".join(layers.check_initialization(self, config))
            layers.say(f"scaled initialization off (output projections: init_method); measured: {measured}")

    return __init__


def add_arguments(original: Function) -> Function:
    """Megatron's own options, then ours."""
    return lambda parser: add_flags(original(parser))


def config_from_args(original: Function) -> Function:
    """Mark the config with the settings of the arguments."""

    def core_transformer_config_from_args(args: Any, *rest: Any, **kwargs: Any) -> Any:
        config = original(args, *rest, **kwargs)
        settings = Settings.of(args).check()
        if settings == Settings():
            return config
        require("megatron.")
        settings.store(args)  # with the exponent spelled out, for the checkpoint
        if _is_teacher(args):
            layers.say("ModelOpt's teacher: no LayerNorm Scaling")
            return config
        if settings.active:
            layers.check_config(config)
        settings.store(config)
        return config

    return core_transformer_config_from_args


def _is_teacher(args: Any) -> bool:
    """Return true for the arguments of ModelOpt's teacher, a changed copy of the launch's."""
    launched = getattr(sys.modules.get("megatron.training.global_vars"), "_GLOBAL_ARGS", None)
    return launched is not None and launched is not args and bool(getattr(args, "export_kd_teacher_load", None))


# --- the finished model ---------------------------------------------------------------------------------------------


def model_built(original: Function) -> Function:
    """Check that the flags had an effect, on all stages together; name in the arguments a scheme that was applied."""

    @functools.wraps(original)
    def build(*args: Any, **kwargs: Any) -> Any:
        from megatron.training.global_vars import get_args

        result = original(*args, **kwargs)
        model = result[0] if isinstance(result, tuple) else result
        chunks = model if isinstance(model, list) else [model]
        settings = Settings.of(get_args())
        if settings == Settings() and getattr(get_args(), "yaml_cfg", None):
            if words := [word for word in sys.argv[1:] if word.split("=")[0] in FLAGS]:
                _require_mark(chunks, words[0])
        elif settings.active:
            _check_stages(chunks, settings)
        elif settings.no_scaled_init:
            _require_mark(chunks, FLAGS[3])
        else:
            _take_over(get_args(), chunks)
        return result

    return build


def _configs(chunks: list[Any]) -> list[Any]:
    return [module.config for chunk in chunks for module in chunk.modules() if hasattr(module, "config")]


def _require_mark(chunks: list[Any], flag: str) -> None:
    if not any(Settings.of(config) != Settings() for config in _configs(chunks)):
        raise LNSConfigError(
            f"{flag} was given, but the config of this model was not made by core_transformer_config_from_args "
            "(--yaml-cfg replaces every argument) and does not carry it: give Megatron's settings as flags, or call "
            "olmo_lns.integrations.megatron.apply(config) before the model is built."
        )


def _check_stages(chunks: list[Any], settings: Settings) -> None:
    """:raises MeasurementError: on every rank, where the scheme of one is wrong or blocks are missing."""
    problem, found = "", []
    try:
        for chunk in chunks:
            if (scheme := sites.read_back(chunk)) not in (settings.scheme, PRE_LN):
                problem = f"{settings.scheme} was asked for, but the model was built with {scheme}."
            found += [(site.layer_number, site.n_layers) for _, _, site in sites.sites(chunk)]
    except Exception as error:
        problem = str(error)
    probe.agree(problem)
    every = _gathered(found)
    count = max((total for _, total in every), default=0)
    numbers = [number for number, _ in every if number <= count]
    times = {numbers.count(number) for number in range(1, count + 1)}
    if len(times) == 1 and times != {0}:
        return
    inner = chunks[0]
    while hasattr(inner, "module"):  # DDP, Float16Module
        inner = inner.module
    raise LNSConfigError(
        f"{FLAGS[0]} was given, but {type(inner).__module__}.{type(inner).__name__} has scaled norms in the blocks "
        f"{sorted(set(numbers)) or 'none'} over all pipeline stages, expected each of its blocks equally often. Models "
        "of megatron.core attach by themselves; --use-legacy-models, --yaml-cfg and a config made by hand do not: call "
        "olmo_lns.integrations.megatron.apply(config) before the model is built, or drop the flag."
    )


def _gathered(found: list[Any]) -> list[Any]:
    """The items of all processes of the launch."""
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return found
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, found)
    return [item for items in every for item in items]


def _take_over(args: Any, chunks: list[Any]) -> None:
    """Write a scheme that the model's provider applied into the arguments, by which checkpoints are compared."""
    # From the configs: a pipeline stage without a layer has no site, and its arguments are compared all the same.
    applied = {Settings.of(config) for config in _configs(chunks) if Settings.of(config).active}
    for settings in list(applied)[:1]:
        _check_stages(chunks, settings)
        settings.store(args)
        layers.say(f"{settings.words}: not given but applied to the model; checkpoints of this run name it")


# --- checkpoints ----------------------------------------------------------------------------------------------------


def load_args(original: Function) -> Function:
    """``--use-checkpoint-args``: settings that were not given on the command line come from the checkpoint."""

    def load_args_from_checkpoint(args: Any, *rest: Any, **kwargs: Any) -> Any:
        result = original(args, *rest, **kwargs)
        # Otherwise there is no checkpoint, or one without arguments; and who allows a mismatch means the command line.
        if isinstance(result, tuple) and not is_set(ALLOW_MISMATCH):
            running, saved = Settings.of(args), result[1]
            filled = running.filled_from(Settings.of(saved))
            if filled != running:
                filled.store(args)
                layers.say(f"from the checkpoint's arguments: {filled.words}")
        return result

    return load_args_from_checkpoint


def load_base(original: Function) -> Function:
    """Compare on every load of weights, also with ``--finetune``, which skips Megatron's own comparison."""
    signature = inspect.signature(original)

    def _load_base_checkpoint(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        call = signature.bind(*args, **kwargs).arguments
        state, ours, folder = result[0], call["args"], call["load_dir"]
        if call.get("rank0") or not state:  # rank0: only the common part, to look at; the weights follow
            return result
        running = Settings.of(ours).scheme
        if folder is not None and folder == getattr(ours, "export_kd_teacher_load", None):
            running = PRE_LN
        compare(state.get("args"), running, result[1] or folder)
        return result

    return _load_base_checkpoint


def load_modelopt(original: Function) -> Function:
    """ModelOpt's scripts read a sharded checkpoint past Megatron's loader."""
    signature = inspect.signature(original)

    def load_modelopt_checkpoint(*args: Any, **kwargs: Any) -> Any:
        from megatron.core import dist_checkpointing
        from megatron.training.global_vars import get_args

        load_arg = signature.bind(*args, **kwargs).arguments.get("load_arg", "load")
        folder, _ = original.__globals__["get_sharded_load_dir"](getattr(get_args(), load_arg))
        if folder is not None:
            saved = dist_checkpointing.load_common_state_dict(str(folder)).get("args")
            compare(saved, Settings.of(get_args()).scheme if load_arg == "load" else PRE_LN, folder)
        return original(*args, **kwargs)

    return load_modelopt_checkpoint


def compare(saved: Any, running: Scheme, source: object) -> None:
    """Compare the saved arguments with the scheme that runs; None where the checkpoint holds none.

    :raises CheckpointMismatchError: they differ.
    """
    settings, name = Settings.of(saved), getattr(saved, "norm_scheme", None)
    # A development version before 0.2 saved the names of other schemes.
    scheme = None if saved is None else parse(name) if name else settings.scheme
    words = settings.words if settings.active else f"without {FLAGS[0]}"
    require_same(scheme, running, source=source, setting=lambda scheme: words)


# --- what is wrapped ------------------------------------------------------------------------------------------------

_CONFIG = "core_transformer_config_from_args"
#: Path -> the wrapper, and whether a scheme needs it.
WRAPPED: dict[str, tuple[Callable[[Function], Function], bool]] = {
    **{f"{module}:{name}.__init__": (model_init, name == "GPTModel") for name, module in MODELS.items()},
    f"megatron.training.argument_utils:{_CONFIG}": (config_from_args, False),  # from 0.18 on
    f"megatron.training.arguments:{_CONFIG}": (config_from_args, True),  # where it may have been imported, wrapped
    "megatron.training.arguments:add_megatron_arguments": (add_arguments, True),
    "megatron.training.training:get_model": (model_built, True),
    "megatron.training.training:setup_model_and_optimizer": (model_built, True),
    "megatron.training.checkpointing:load_args_from_checkpoint": (load_args, True),
    "megatron.training.checkpointing:_load_base_checkpoint": (load_base, True),
    "megatron.post_training.checkpointing:load_modelopt_checkpoint": (load_modelopt, False),
}


def wrap_module(module: ModuleType) -> None:
    """Wrap the functions of ``module``, which has just been executed."""
    for path, (make, needed) in WRAPPED.items():
        if path.partition(":")[0] == module.__name__:
            hook.wrap(path, make, needed=needed)


def require(prefix: str) -> None:
    """:raises UpstreamChangedError: this Megatron lacks a function below ``prefix`` that a scheme needs."""
    for path, (make, needed) in WRAPPED.items():
        if needed and path.startswith(prefix) and importlib.util.find_spec(path.partition(":")[0]) is None:
            hook.wrap(path, make)  # which notes that it is missing
    hook.require("megatron")


# --- for those who build models themselves --------------------------------------------------------------------------


def apply_to(target: Any, settings: Settings) -> int:
    """:func:`olmo_lns.integrations.megatron.apply`, with its settings as one object."""
    if isinstance(target, (list, tuple)):
        return sum(apply_to(each, settings) for each in target)
    require("megatron.core.")
    if not isinstance(target, nn.Module):
        return mark(target, settings)
    count = 0
    for model in layers.models_in(target):
        present = sites.read_back(model)
        if not present.is_pre_ln and present != settings.scheme:
            raise LNSConfigError(f"{type(model).__name__} has {present} already, and {settings.scheme} was asked for.")
        count += layers.attach(model, settings, drawn=False) if present.is_pre_ln else len(list(sites.sites(model)))
        if hasattr(model, "config"):
            settings.store(model.config)
    return count


def mark(target: Any, settings: Settings) -> int:
    """Mark a config; return 0, the number of norms that are scaled so far."""
    config = getattr(target, "transformer", target)
    if not hasattr(config, "output_layer_init_method"):
        raise LNSConfigError(
            f"found a {type(target).__name__}, expected a TransformerConfig, a built model or a list of its chunks."
        )
    found = Settings.of(config)
    if found.active and settings.active and found.scheme != settings.scheme:
        raise LNSConfigError(f"this {type(config).__name__} has {found.scheme} already: start from a fresh config.")
    if settings.active:
        layers.check_config(config)
    asked = settings if settings.active else found
    merged = replace(asked, no_scaled_init=found.no_scaled_init or settings.no_scaled_init)
    merged.check().store(config)
    return 0


def plain_initialization(config: Any) -> None:
    """Have the residual output projections of a model drawn like every other matrix."""
    config = getattr(config, "transformer", config)
    require("megatron.core.")
    mark(config, Settings(no_scaled_init=True))
    if config.init_method is None and not getattr(config, "use_mup", False):  # Megatron Bridge finalizes it later
        from megatron.core.utils import init_method_normal

        config.init_method = init_method_normal(config.init_method_std)
    config.output_layer_init_method = config.init_method
