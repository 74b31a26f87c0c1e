"""Scale the norms of Megatron's language models when they are built, and check the finished model.

The command line, or :func:`~olmo_lns.integrations.megatron.apply`, stores flags in a config. If Megatron builds a
language model from such a config, the wrapper of the model's constructor first calls Megatron's constructor and then
scales the norms. At that time, the model is not yet wrapped for mixed precision, DDP or FSDP, and no weights are
loaded.
"""

from __future__ import annotations

import contextlib
import inspect
from typing import Any, Callable, Iterator

import torch.distributed as dist
from torch import nn

from olmo_lns import hook, sites
from olmo_lns.errors import LNSConfigError
from olmo_lns.integrations.megatron import layers
from olmo_lns.integrations.megatron.command_line import launched_arguments, passed_options
from olmo_lns.integrations.megatron.configs import check_config, is_config, store_flags
from olmo_lns.integrations.megatron.flags import LNS_FLAG, PLAIN_FLAG, MegatronFlags
from olmo_lns.integrations.megatron.printing import print_once
from olmo_lns.measured import describe
from olmo_lns.processes import raise_on_every_rank
from olmo_lns.schemes import PRE_LN

Function = Callable[..., Any]


def wrap_model_init(original: Function) -> Function:
    """Wrap a constructor: choose the initialization before the model is built, and scale its norms afterwards."""
    signature = inspect.signature(original)

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        config = _config_with_flags(signature, self, *args, **kwargs)
        if config is None:
            return original(self, *args, **kwargs)
        flags = MegatronFlags.of(config)
        if flags.layernorm_scaling:
            check_config(config)
        if flags.scaled_init_off:
            config.output_layer_init_method = config.init_method
        original(self, *args, **kwargs)
        if flags.layernorm_scaling:
            if not any(sites.in_model(self)):  # otherwise the base class's constructor did it
                layers.attach_to_new(self, flags)
        else:
            checked = layers.check_initialization(self, config)
            print_once(
                "scaled initialization off (output projections: init_method); "
                + (describe(checked) if checked else "no weight was initialized here, so none was measured"),
                about="plain initialization",
            )

    return __init__


def _config_with_flags(signature: inspect.Signature, *args: Any, **kwargs: Any) -> Any:
    """Return the ``TransformerConfig`` with flags among the arguments of a constructor, or None if there is none."""
    try:
        call = signature.bind(*args, **kwargs)
    except TypeError:  # the constructor raises its own error
        return None
    configs = filter(is_config, (*call.args, *call.kwargs.values()))
    return next((config for config in configs if MegatronFlags.of(config) != MegatronFlags()), None)


# --- the finished model ---------------------------------------------------------------------------------------------


def wrap_model_built(original: Function) -> Function:
    """Wrap ``get_model`` or ``setup_model_and_optimizer``: check that the flags had an effect on all pipeline stages.

    If :func:`~olmo_lns.integrations.megatron.apply` selected the scheme, it is stored in Megatron's arguments, so that
    the checkpoints record it.
    """

    def build(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        model = result[0] if isinstance(result, tuple) else result
        chunks = [each for each in (model if isinstance(model, list) else [model]) if isinstance(each, nn.Module)]
        requested = MegatronFlags.of(launched_arguments())
        # The flags are read from the configs and not from the sites, because a pipeline stage without a layer has no
        # site. When this stage loads a checkpoint, its arguments are compared too, so they have to name the scheme.
        configs = [vars(module).get("config") for chunk in chunks for module in chunk.modules()]
        in_configs = {MegatronFlags.of(config) for config in filter(is_config, configs)} - {MegatronFlags()}
        applied = next((flags for flags in in_configs if flags.layernorm_scaling), None)
        passed = requested.command_line or " ".join(passed_options((LNS_FLAG, PLAIN_FLAG)))
        if requested.layernorm_scaling:
            _check_stages(chunks, requested)
        elif passed and not in_configs:
            raise LNSConfigError(
                f"{passed} was passed, but the config of this model does not come from Megatron's arguments, as under "
                "--yaml-cfg. Pass Megatron's settings as flags, or call olmo_lns.integrations.megatron.apply(config) "
                "before the model is built."
            )
        elif applied is not None:
            _check_stages(chunks, applied)
            applied.store(launched_arguments())
            print_once(f"apply() switched LayerNorm Scaling on. Checkpoints will record {applied.command_line}.")
        return result

    return build


def _check_stages(chunks: list[Any], flags: MegatronFlags) -> None:
    """Check the scheme and the blocks of all pipeline stages. The errors are raised on every rank.

    :raises MeasurementError: if a stage was built with another scheme.
    :raises LNSConfigError: if scaled norms are missing in some blocks.
    """
    problem, sites_here = "", []
    try:
        for chunk in chunks:
            if (scheme := sites.read_back(chunk)) not in (flags.scheme, PRE_LN):
                problem = f"{flags.scheme} was selected, but the model was built with {scheme}."
            sites_here += [(each.site.layer_number, each.site.n_layers) for each in sites.in_model(chunk)]
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
        f"{LNS_FLAG} was passed, but not every block has scaled norms. Over all pipeline stages these blocks have "
        f"them: {sorted(set(numbers)) or 'none'}. Expected every block, equally often. The flag has no effect on "
        "models that are not of megatron.core, and none with --use-legacy-models, --yaml-cfg or a config made by "
        "hand. Call olmo_lns.integrations.megatron.apply(config) before the model is built, or remove the flag."
    )


# --- for scripts that build models ----------------------------------------------------------------------------------


def apply_to(target: Any, flags: MegatronFlags, trained: bool | None = None) -> int:
    """Store flags in a config, or scale the norms of a built model or of its chunks.

    :returns: the number of scaled norms, which is 0 for a config.
    :raises LNSConfigError: if a model has another scheme already.
    """
    if isinstance(target, (list, tuple)):
        return sum(apply_to(each, flags, trained) for each in target)
    hook.require_wrapped("megatron")
    if not isinstance(target, nn.Module):
        store_flags(target, flags)
        return 0
    with unchanged_on_failure(target):
        return sum(_apply_to_model(model, flags, trained) for model in layers.models_in(target))


@contextlib.contextmanager
def unchanged_on_failure(module: nn.Module) -> Iterator[None]:
    """Remove the scheme from a model and from its configs if the ``with`` block raises or is interrupted."""
    configs = {id(config): config for each in module.modules() if is_config(config := vars(each).get("config"))}
    names = vars(MegatronFlags())
    before = {
        number: {name: value for name, value in vars(config).items() if name in names}
        for number, config in configs.items()
    }
    try:
        with sites.undo_on_failure(module):
            yield
    except BaseException:
        for number, config in configs.items():
            for name in names:
                vars(config).pop(name, None)
            vars(config).update(before[number])
        raise


def _apply_to_model(model: Any, flags: MegatronFlags, trained: bool | None) -> int:
    current = sites.read_back(model)
    if not current.is_pre_ln and current != flags.scheme:
        raise LNSConfigError(
            f"{type(model).__name__} has the scheme {current} already, not {flags.scheme}. Build a new model."
        )
    if current.is_pre_ln:
        count = layers.attach_to_built(model, flags, trained=trained)
    else:
        count = len(list(sites.in_model(model)))
    if hasattr(model, "config"):
        flags.store(model.config)
    return count
