"""The front door: ``apply``, ``fold`` and ``plain_initialization`` find the integration that takes a model.

What differs between frameworks is in :class:`olmo_lns.integrations.interface.Integration` and its subclasses. Nothing
below imports this module.
"""

from __future__ import annotations

import importlib
from typing import Any, Sequence, TypeVar

from torch import nn

from olmo_lns import start_up_line
from olmo_lns.frameworks import FRAMEWORKS, framework_of
from olmo_lns.integrations import any_model
from olmo_lns.integrations.hints import Hints
from olmo_lns.integrations.interface import Integration, fold_model
from olmo_lns.processes import is_first_process, same_outcome_on_every_rank
from olmo_lns.schemes import Scheme, as_scheme

__all__ = ["apply", "fold", "integration_of", "plain_initialization"]

C = TypeVar("C")
_ANY_MODEL = Integration()


def integration_of(target: Any) -> Integration:
    """Return the integration that takes a built model or a config. Models of no framework have one too.

    Example: ``integration_of(LlamaForCausalLM(config))`` is that of transformers.
    """
    if not (framework := framework_of(target)):
        return _ANY_MODEL
    package = FRAMEWORKS[framework].integration
    importlib.import_module(package).register()  # the start-up hook may not have run
    integration: Integration = importlib.import_module(f"{package}.integration").INTEGRATION
    return integration


def apply(
    model: nn.Module,
    scheme: str | Scheme = "lns",
    *,
    blocks: Sequence[nn.Module] | None = None,
    norms: Sequence[Any] | None = None,
    example: Any = None,
    trained: bool | None = None,
) -> Any:
    """Apply ``scheme`` to a built model, in place, measure the result, and return the model.

    The norms of each block get a factor. Parameters and state dict do not change. A second call with the same scheme
    measures the model again.

    Call this function before training, and before ``torch.compile``, DDP, FSDP and activation checkpointing. The
    weights may have their values, or they may not exist yet, as in a model on the meta device or one that DeepSpeed
    ZeRO-3 has partitioned. In a distributed launch call it in every process. The first process runs the model, and
    the others receive the names of the norms.

    :param model: a model of Megatron Core, OLMo, torchtitan or transformers, or any module with Pre-LN blocks whose
        norms are modules.
    :param scheme: a scheme that only multiplies norms, such as ``"lns"`` or ``"lns:exponent=0.25"``.
    :param blocks: the blocks in order. Pass them if the model has several lists that could be its blocks.
    :param norms: the norms themselves. Pass them if no module runs a block, or if the blocks cannot be found. There is
        one item for each block, in order from block 1: a pair of the norms before attention and feed-forward, or one
        norm that both read.
    :param example: input of one forward. It is a tensor, a tuple of arguments, a dict of keywords, or a function that
        takes the model and runs it. The default is 8 random token ids.
    :param trained: True says that the weights were trained under ``scheme``, and False that they are fresh. With None
        the function decides. Weights are fresh if every norm that gets a factor has equal gains and biases, the same in
        all blocks, and if the matrices of the blocks have independent random numbers.
    :raises CheckpointMismatchError: if the weights were trained without a factor, and ``trained`` is None.
    :raises LNSConfigError: if the model is not Pre-LN, has another scheme, is wrapped already, does not accept the
        example, or is a model of OLMo-core, whose config has to name the scheme before the model is built.
    :raises MeasurementError: if a block cannot be run again, or does not compute the scheme. In every case the model
        is left unchanged, in all processes.

    Source: arXiv 2502.05795, section 4, for ``lns``.

    Examples::

        olmo_lns.apply(GPT(config), "lns:exponent=0.25", example=torch.zeros(1, 8, dtype=torch.long))
        olmo_lns.apply(vit, norms=[(attn.norm, ff.net[0]) for attn, ff in vit.transformer.layers], example=images)
    """
    with same_outcome_on_every_rank():
        chosen, integration = as_scheme(scheme), integration_of(model)
        hints = Hints(blocks=blocks, norms=norms, example=example, trained=trained)
        integration.require_supported(model, chosen, hints)
    integration.apply(model, chosen, hints)
    return model


def fold(model: Any, *, example: Any = None, dtype: Any = None) -> Any:
    """Multiply the factors of a model into its weights, in place, and return it as a stock model.

    Stock software can then run the weights. A norm's factor goes into its gain and bias. If the norm has none, the
    factor goes into the linear layers that read the norm. The products are computed in fp64 and rounded once. The model
    runs before and after, and must give the same outputs. Merge adapters first.

    :param model: a model that :func:`apply` took, neither compiled nor sharded.
    :param example: as in :func:`apply`. For norms without a gain it must run every part of the blocks, such as all
        experts.
    :param dtype: torch dtype of the changed weights. The other weights are converted to it afterwards, as by
        ``model.to(dtype)``. None keeps all dtypes.
    :raises LNSConfigError: if the model has no scheme, is a model of Megatron, or has no weights in this process, or if
        its factors cannot be folded.
    :raises MeasurementError: if the output would change. In every case the model is left unchanged.

    Example: ``torch.save(olmo_lns.fold(model, example=ids).state_dict(), "stock.pt")``.
    """
    any_model.require_unwrapped(model)
    any_model.require_weights(model)
    # A part of the model, such as a tower, may be a framework's model whose own config names the scheme.
    parts = [(module, integration_of(module)) for module in model.modules() if framework_of(module)]
    fold_model(model, parts, lambda: integration_of(model).forward(model, example), dtype)
    return model


def plain_initialization(target: C, *, blocks: Sequence[nn.Module] | None = None, example: Any = None) -> C:
    """Initialize the residual output projections like every other matrix, without a depth factor.

    Scaled initialization draws these weights times 1/sqrt(2L) (Megatron, GPT-2, nanoGPT, OLMo's ``full_megatron``), or
    times 1/sqrt(2l) in block l (torchtitan, open_lm, OLMo's ``mitchell``). A scheme removes this depth factor by itself
    in OLMo, in Megatron, and in a fresh model of transformers whose family has it. There this function is for the
    Pre-LN baseline. For any other model call it under a scheme, too.

    :param target: the config of OLMo or Megatron before the model is built, or a built model of any kind.

        A config is OLMo's ``ModelConfig`` or ``TrainConfig``, Megatron Core's ``TransformerConfig``, or an object with
        one in ``.transformer``. It is marked in place. A copy by ``dataclasses.replace`` keeps the mark in Megatron and
        loses it in OLMo.

        The weights of a model are measured and multiplied in place. Pass the model after its weights are drawn, and
        before an optimizer or an engine has them. If the model is compiled, or sharded by ``fully_shard`` or DeepSpeed
        ZeRO-3, call this function in every process. :func:`apply` or a first call of this function must then have found
        the projections before the model was sharded. A call before the weights exist, on the meta device, finds the
        projections and changes nothing.
    :param blocks, example: as in :func:`apply`, for a model.
    :returns: ``target``.
    :raises LNSConfigError: if ``target`` is something else, if a model was already built from the config, if the config
        has another initialization, or if the weights are trained or follow another rule. Nothing is changed then.
    :raises UpstreamChangedError: if this version of OLMo or Megatron lacks a function that is needed.

    Example: ``plain_initialization(config)``, then ``OLMo(config)`` or ``GPTModel(config, ...)``;
    ``plain_initialization(model)`` for nanoGPT.
    """
    if isinstance(target, nn.Module):
        line = integration_of(target).make_plain(target, Hints(blocks=blocks, example=example))
        if is_first_process():
            start_up_line.write(line)
        return target
    configs = [target, getattr(target, "model", None), getattr(target, "transformer", None)]
    config = next(filter(framework_of, configs), target)
    integration_of(config).plain_initialization(config)
    return target
