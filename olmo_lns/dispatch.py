"""The front door: ``apply``, ``fold`` and ``plain_initialization`` find the integration that takes a model.

What differs between frameworks is in :class:`olmo_lns.integrations.interface.Integration` and its subclasses. Nothing
below imports this module.
"""

from __future__ import annotations

import importlib
from typing import Any, Sequence, TypeVar

from torch import nn

from olmo_lns.frameworks import FRAMEWORKS, framework_of
from olmo_lns.integrations import any_model
from olmo_lns.integrations.hints import Hints
from olmo_lns.integrations.interface import Integration, fold_model
from olmo_lns.processes import is_first_process, same_outcome_on_every_rank
from olmo_lns.schemes import Scheme, as_scheme
from olmo_lns.start_up import write_line

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

    Call it when the weights have their values, or before the weights exist. The second case is a model on the meta
    device, or one that DeepSpeed ZeRO-3 has partitioned. Call it before ``torch.compile``, DDP, FSDP and activation
    checkpointing. In a distributed launch call it in every process. The first process runs the model, and the others
    receive the names of the norms. Parameters and state dict do not change. A second call with the same scheme measures
    the model again.

    :param model: a model of Megatron Core, OLMo, torchtitan or transformers, or any module with Pre-LN blocks whose
        norms are modules.
    :param scheme: a scheme that only multiplies norms, such as ``"lns"`` or ``"lns:exponent=0.25"``.
    :param blocks: the blocks in order, if the model has several lists that could hold them.
    :param norms: the norms themselves, if no module runs a block or its blocks cannot be found: for each block, in
        order from block 1, the norms before attention and feed-forward, or one norm that both read.
    :param example: input of one forward: a tensor, a tuple of arguments, a dict of keywords, or a function of the model
        that runs the forward. The default is 8 random token ids.
    :param trained: True: the weights were trained under ``scheme``. False: they are fresh. None: they are fresh if
        every norm that gets a factor has equal gains and biases, the same in all blocks, and the matrices of the
        blocks hold independent random numbers.
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

    A norm's factor goes into its gain and bias, or, for a norm without them, into the linear layers that read it. The
    products are computed in fp64 and rounded once. The model is run before and after, and must give the same outputs.
    Merge adapters first.

    :param model: a model that :func:`apply` took, neither compiled nor sharded.
    :param example: as in :func:`apply`. For norms without a gain it must run every part of the blocks, such as all
        experts.
    :param dtype: torch dtype of the changed weights, to which the others are converted afterwards, as by
        ``model.to(dtype)``; None keeps theirs.
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
    times 1/sqrt(2l) in block l (torchtitan, open_lm, OLMo's ``mitchell``). In OLMo and Megatron, and in a fresh
    model of transformers whose family draws it, a scheme removes this depth factor without this function. There the
    function is for the Pre-LN baseline.

    :param target: the config of OLMo or Megatron before the model is built, or a built model of any kind.

        A config is OLMo's ``ModelConfig`` or ``TrainConfig``, Megatron Core's ``TransformerConfig``, or an object with
        one in ``.transformer``. It is marked in place; a copy by ``dataclasses.replace`` keeps the mark in Megatron and
        loses it in OLMo.

        The weights of a model are measured and multiplied in place, after they are drawn and before an optimizer or an
        engine holds them. If the model is sharded by ``fully_shard`` or DeepSpeed ZeRO-3, or compiled, :func:`apply`
        or a first call of this function must have found the projections before; call it in every process then. A call
        before the weights exist, on the meta device, finds them and changes nothing.
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
            write_line(line)
        return target
    configs = [target, getattr(target, "model", None), getattr(target, "transformer", None)]
    config = next(filter(framework_of, configs), target)
    integration_of(config).plain_initialization(config)
    return target
