"""Wrappers for functions of Megatron: arguments, config, the models' constructors, the set-up, checkpoints.

:func:`apply` or the flags mark a config. A language model that is built from a marked config gets the scheme at the end
of its constructor: before mixed precision, DDP or FSDP wrap the model, and before weights are loaded. Towers that are
built from copies of the config do not change.
"""

from __future__ import annotations

import importlib.util
import inspect
import sys
from contextvars import ContextVar
from dataclasses import replace
from typing import Any, Callable

import torch.distributed as dist
from torch import nn

from olmo_lns import hook, sites
from olmo_lns.errors import LNSConfigError
from olmo_lns.integrations.megatron import layers
from olmo_lns.integrations.megatron.flags import FLAGS, Settings, add_flags
from olmo_lns.integrations.megatron.seams import WRAPPED
from olmo_lns.processes import raise_on_every_rank
from olmo_lns.record import require_same
from olmo_lns.schemes import PRE_LN, Scheme
from olmo_lns.settings import ALLOW_MISMATCH, is_set

Function = Callable[..., Any]
#: Megatron's argument with the checkpoint of the model that ModelOpt distils from. That model is Pre-LN.
TEACHER = "export_kd_teacher_load"


def model_init(original: Function) -> Function:
    """Choose the initialization before a language model is built; attach and measure afterwards."""

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        # The parameter's name differs between versions.
        config: Any = next((each for each in (*args, *kwargs.values()) if Settings.of(each) != Settings()), None)
        settings = Settings.of(config)
        if settings.layernorm_scaling:
            layers.check_config(config)
        if settings.scaled_init_off:
            config.output_layer_init_method = config.init_method
        original(self, *args, **kwargs)
        if settings.layernorm_scaling:
            if not any(sites.sites(self)):  # unless the base class's constructor has attached
                layers.attach(self, settings, drawn=True)
        elif settings.no_scaled_init:
            measured = ", ".join(layers.check_initialization(self, config))
            layers.print_once(f"scaled initialization off (output projections: init_method); measured: {measured}")

    return __init__


def add_arguments(original: Function) -> Function:
    """Add this package's options to Megatron's parser."""
    return lambda parser: add_flags(original(parser))


def config_from_args(original: Function) -> Function:
    """Mark the config with the settings of the arguments."""

    def core_transformer_config_from_args(args: Any, *rest: Any, **kwargs: Any) -> Any:
        config = original(args, *rest, **kwargs)
        if (settings := Settings.of(args).check()) == Settings():
            return config
        require("megatron.")
        if _is_teacher(args):
            layers.print_once("ModelOpt's teacher: no LayerNorm Scaling")
        else:
            mark(config, settings)
        return config

    return core_transformer_config_from_args


def _is_teacher(args: Any) -> bool:
    """Return true for the arguments of ModelOpt's teacher, a changed copy of the launch's arguments."""
    launched = getattr(sys.modules.get("megatron.training.global_vars"), "_GLOBAL_ARGS", None)
    return launched is not None and launched is not args and bool(getattr(args, TEACHER, None))


# --- the finished model ---------------------------------------------------------------------------------------------


def model_built(original: Function) -> Function:
    """Check over all pipeline stages that the flags had an effect; store an applied scheme in the arguments."""

    def build(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        model = result[0] if isinstance(result, tuple) else result
        chunks = [each for each in (model if isinstance(model, list) else [model]) if isinstance(each, nn.Module)]
        requested = Settings.of(_running())
        # From the configs, since a pipeline stage without a layer has no site and its arguments are compared too.
        configs = [module.config for chunk in chunks for module in chunk.modules() if hasattr(module, "config")]
        marked = {found for found in map(Settings.of, configs) if found != Settings()}
        applied_settings = [found for found in marked if found.layernorm_scaling]
        flags = requested.flags or " ".join(word for word in sys.argv[1:] if word.split("=")[0] in (FLAGS[0], FLAGS[3]))
        if requested.layernorm_scaling:
            _check_stages(chunks, requested)
        elif flags and not marked:
            raise LNSConfigError(
                f"{flags} was given, but the config of this model was not made by core_transformer_config_from_args "
                "(--yaml-cfg replaces every argument) and is not marked: give Megatron's settings as flags, or "
                "call olmo_lns.integrations.megatron.apply(config) before the model is built."
            )
        elif applied_settings:
            _check_stages(chunks, applied_settings[0])
            applied_settings[0].store(_running())
            layers.print_once(
                f"{applied_settings[0].flags}: not given, but applied to the model; checkpoints of this run record it"
            )
        return result

    return build


def _check_stages(chunks: list[Any], settings: Settings) -> None:
    """Check all stages. :raises MeasurementError, LNSConfigError: a wrong scheme, missing blocks; on every rank."""
    problem, sites_here = "", []
    try:
        for chunk in chunks:
            if (scheme := sites.read_back(chunk)) not in (settings.scheme, PRE_LN):
                problem = f"{settings.scheme} was selected, but the model was built with {scheme}."
            sites_here += [(site.layer_number, site.n_layers) for _, _, site in sites.sites(chunk)]
    except Exception as error:
        problem = str(error)
    raise_on_every_rank(problem)
    sites_by_rank = [sites_here]
    if dist.is_initialized():
        sites_by_rank = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(sites_by_rank, sites_here)
    all_sites = [item for items in sites_by_rank for item in items]
    count = max((total for _, total in all_sites), default=0)
    numbers = [number for number, _ in all_sites if number <= count]
    counts = {numbers.count(number) for number in range(1, count + 1)}
    if len(counts) == 1 and counts != {0}:
        return
    raise LNSConfigError(
        f"{FLAGS[0]} was given, but this model has scaled norms in the blocks {sorted(set(numbers)) or 'none'} over "
        "all pipeline stages, expected each of its blocks equally often. The flag reaches models of megatron.core "
        "only, not with --use-legacy-models, --yaml-cfg or a config made by hand. Call "
        "olmo_lns.integrations.megatron.apply(config) before the model is built, or drop the flag."
    )


# --- checkpoints ----------------------------------------------------------------------------------------------------


def load_args(original: Function) -> Function:
    """Take all settings from the checkpoint under ``--use-checkpoint-args``, if none was given."""

    def load_args_from_checkpoint(args: Any, *rest: Any, **kwargs: Any) -> Any:
        result = original(args, *rest, **kwargs)
        # Not a tuple: no checkpoint, or one without arguments. If a mismatch is allowed, the command line wins.
        saved = Settings.of_saved(result[1]) if isinstance(result, tuple) else Settings()
        has_flags = any(word.split("=")[0] in FLAGS for word in sys.argv[1:])
        if not has_flags and Settings.of(args) == Settings() != saved and not is_set(ALLOW_MISMATCH):
            saved.store(args)
            layers.print_once(f"from the checkpoint's arguments: {saved.flags}")
        return result

    return load_args_from_checkpoint


def load_base(original: Function) -> Function:
    """Compare the schemes at every load of weights, also with ``--finetune``, which skips Megatron's comparison."""
    signature = inspect.signature(original)

    def _load_base_checkpoint(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        call = signature.bind(*args, **kwargs).arguments
        state, running, folder = result[0], call.get("args") or _running(), call.get("load_dir")
        if call.get("rank0") or not state:  # rank0: a first look at the common part; the weights are loaded later
            return result
        is_teacher = folder is not None and folder == getattr(running, TEACHER, None)
        compare(state.get("args"), Settings() if is_teacher else Settings.of(running), result[1] or folder)
        return result

    return _load_base_checkpoint


def _running() -> Any:
    from megatron.training.global_vars import get_args

    return get_args()


#: Arguments in the checkpoints that ``dist_checkpointing.load`` has read during a call of ModelOpt's loader, else None.
_arguments_read: ContextVar[list[Any] | None] = ContextVar("_arguments_read", default=None)


def load_sharded(original: Function) -> Function:
    """Keep the arguments that Megatron Core reads with a sharded checkpoint, for :func:`load_modelopt`."""

    def load(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        if (arguments_read := _arguments_read.get()) is not None:
            state = result[0] if isinstance(result, tuple) else result  # a tuple: with missing and unexpected keys
            arguments_read.append(state.get("args"))
        return result

    return load


def load_modelopt(original: Function) -> Function:
    """Compare the schemes in ModelOpt's scripts, which read a sharded checkpoint without Megatron's loader.

    Only what stock has read is compared: a checkpoint that Megatron's own loader reads is compared there.
    """
    signature = inspect.signature(original)

    def load_modelopt_checkpoint(*args: Any, **kwargs: Any) -> Any:
        arguments_read: list[Any] = []
        token = _arguments_read.set(arguments_read)
        try:
            result = original(*args, **kwargs)
        finally:
            _arguments_read.reset(token)
        if arguments_read:
            running = _running()
            load_arg = signature.bind(*args, **kwargs).arguments.get("load_arg", "load")
            selected = Settings() if load_arg == TEACHER else Settings.of(running)
            saved = next((each for each in arguments_read if each is not None), None)
            compare(saved, selected, getattr(running, load_arg))
        return result

    return load_modelopt_checkpoint


def compare(saved: Any, running: Settings, source: object) -> None:
    """Compare the saved arguments with the running settings.

    :param saved: arguments in the checkpoint, None if it has none.
    :raises CheckpointMismatchError: the schemes differ.
    """
    settings = Settings.of_saved(saved)
    flags = settings.flags if settings.layernorm_scaling else f"without {FLAGS[0]}"
    scheme: Scheme | None = None if saved is None else settings.scheme
    require_same(scheme, running.scheme, source=source, setting=lambda scheme: flags)


# --- for scripts that build models ----------------------------------------------------------------------------------


def require(prefix: str) -> None:
    """Check for the needed functions below ``prefix``. :raises UpstreamChangedError: this Megatron lacks one."""
    for path, (name, needed) in WRAPPED.items():
        if needed and path.startswith(prefix) and importlib.util.find_spec(path.partition(":")[0]) is None:
            hook.wrap(path, globals()[name])  # records that it is missing
    hook.require("megatron")


def apply_to(target: Any, settings: Settings, trained: bool | None = None) -> int:
    """Mark a config, or scale the norms of a built model or of its chunks; return the number of scaled norms."""
    if isinstance(target, (list, tuple)):
        return sum(apply_to(each, settings, trained) for each in target)
    require("megatron.core.")
    if not isinstance(target, nn.Module):
        mark(target, settings)
        return 0
    count = 0
    for model in layers.models_in(target):
        current = sites.read_back(model)
        if not current.is_pre_ln and current != settings.scheme:
            raise LNSConfigError(
                f"{type(model).__name__} has {current} already, not {settings.scheme}: build a new model."
            )
        if current.is_pre_ln:
            count += layers.attach(model, settings, drawn=False, trained=trained)
        else:
            count += len(list(sites.sites(model)))
        if hasattr(model, "config"):
            settings.store(model.config)
    return count


def mark(target: Any, settings: Settings) -> None:
    """Store the settings in a config, or in ``target.transformer``."""
    config = getattr(target, "transformer", target)
    if not hasattr(config, "output_layer_init_method"):
        raise LNSConfigError(
            f"found a {type(target).__name__}, expected a TransformerConfig, a built model or a list of its chunks."
        )
    current = Settings.of(config)
    if current.layernorm_scaling and settings.layernorm_scaling and current.scheme != settings.scheme:
        raise LNSConfigError(f"this {type(config).__name__} has {current.scheme} already: start from a fresh config.")
    if settings.layernorm_scaling:
        layers.check_config(config)
    chosen = settings if settings.layernorm_scaling else current
    replace(chosen, no_scaled_init=current.no_scaled_init or settings.no_scaled_init).check().store(config)
