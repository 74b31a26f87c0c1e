"""The front door: ``apply`` and ``plain_initialization`` find the integration that takes a model.

Nothing below imports this module.
"""

from __future__ import annotations

from typing import Any, Sequence, TypeVar

import torch.distributed as dist
from torch import nn

from olmo_lns import settings
from olmo_lns.errors import LNSConfigError, LNSError
from olmo_lns.integrations import any_model
from olmo_lns.processes import raise_on_every_rank
from olmo_lns.schemes import Scheme, as_scheme

__all__ = ["apply", "plain_initialization"]

C = TypeVar("C")


def apply(
    model: nn.Module, scheme: str | Scheme = "lns", *, blocks: Sequence[nn.Module] | None = None, example: Any = None
) -> Any:
    """Apply ``scheme`` to a built model, in place, measure the result, and return the model.

    Call it after the weights are set, or before they exist: while the model is on the meta device, or partitioned by
    DeepSpeed ZeRO-3. Call it before ``torch.compile``, DDP, FSDP and activation checkpointing; in a distributed launch
    in every process. Parameters, state dict and hooks do not change. A second call with the same scheme measures the
    model again.

    :param model: a model of Megatron Core, OLMo or transformers, or any module with a list of Pre-LN blocks whose norms
        are modules.
    :param scheme: a scheme that only multiplies norms, such as ``"lns"`` or ``"lns:exponent=0.25"``.
    :param blocks: the blocks in order, if the model has several lists that could hold them.
    :param example: input of one forward: a tensor, a tuple of arguments, a dict of keywords, or a function of the model
        that runs the forward. The default is 8 random token ids.
    :raises LNSConfigError: the model is not Pre-LN, has a scheme, is wrapped already, or does not take the example.
    :raises MeasurementError: a block cannot be run again, or does not compute the scheme. In either case the model is
        left unchanged.

    Example: ``olmo_lns.apply(GPT(config), "lns:exponent=0.25", example=torch.zeros(1, 8, dtype=torch.long))``.
    """
    problem = None
    try:
        _apply(model, as_scheme(scheme), blocks, example)
    except LNSError as error:
        problem = error
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        raise_on_every_rank(str(problem or ""))
    if problem is not None:
        raise problem
    return model


def _apply(model: Any, scheme: Scheme, blocks: Any, example: Any) -> None:
    settings.check()
    any_model.require_unwrapped(model)
    modules = [base.__module__ for base in type(model).__mro__]
    if any(module.startswith("megatron.core.") for module in modules):
        if scheme.name != "lns":
            raise LNSConfigError(f"scheme {scheme}: the Megatron integration supports lns and its exponent only.")
        from olmo_lns.integrations import megatron

        megatron.apply(model, exponent=scheme.parameters["exponent"])
    elif "transformers.modeling_utils" in modules:
        from olmo_lns.integrations import transformers

        transformers.apply(model, scheme, blocks=blocks, example=example)
    else:
        if "olmo.model" in modules and blocks is None:
            groups = model.transformer
            groups = [groups.blocks] if hasattr(groups, "blocks") else groups.block_groups
            blocks = [block for group in groups for block in group]
        stack = any_model.find_sites(model, example, blocks)
        any_model.report(model, stack, any_model.attach(model, stack, scheme))


def plain_initialization(config: C) -> C:
    """Initialize the residual output projections like every other matrix, without a depth factor.

    Megatron and OLMo's ``full_megatron`` draw these weights times 1/sqrt(2L), OLMo's ``mitchell`` times 1/sqrt(2l). A
    scheme removes that factor by itself. This function is for the Pre-LN baseline; with a scheme it changes nothing,
    before or after the scheme is selected.

    :param config: the model's config, before the model is built: OLMo's ``ModelConfig`` or ``TrainConfig``, Megatron
        Core's ``TransformerConfig``, or an object with one in ``.transformer``. The config is marked in place; a copy
        by ``dataclasses.replace`` keeps the mark in Megatron and loses it in OLMo. Or a fresh model of transformers,
        whose GPT-2 also has the factor 1/sqrt(2L): its weights are multiplied.
    :returns: ``config``.
    :raises LNSConfigError: another object, a config that built a model already, or one with another initialization.
    :raises UpstreamChangedError: this OLMo or Megatron lacks a function that is needed.

    Example: ``plain_initialization(config)``, then ``OLMo(config)`` or ``GPTModel(config, ...)``.
    """
    olmo: Any = getattr(config, "model", config)
    megatron: Any = getattr(config, "transformer", config)
    if hasattr(olmo, "init_fn") and hasattr(olmo, "layer_norm_type"):
        from olmo_lns.integrations.olmo import register
        from olmo_lns.integrations.olmo.model import request_plain_initialization as request_olmo

        register()
        request_olmo(olmo)
    elif hasattr(megatron, "output_layer_init_method"):
        from olmo_lns.integrations.megatron import plain_initialization as request_megatron

        request_megatron(megatron)
    elif hasattr(config, "base_model_prefix"):
        from olmo_lns.integrations.transformers.models import plain_initialization as draw

        draw(config)
    else:
        raise LNSConfigError(
            f"plain_initialization expects the config of an OLMo or a Megatron model before it is built, found a "
            f"{type(config).__name__}. In OLMo-core, set init_method to normal or fan_in. In other "
            "models, multiply the residual output projections by sqrt(2L) once."
        )
    return config
