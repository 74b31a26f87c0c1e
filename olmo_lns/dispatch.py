"""The front door: ``apply`` and ``plain_initialization`` find the integration that takes a model.

Nothing below imports this module.
"""

from __future__ import annotations

from typing import Any, Sequence, TypeVar

from torch import nn

from olmo_lns import environment, initialization, sites
from olmo_lns.errors import LNSConfigError
from olmo_lns.folding import fold_norms
from olmo_lns.frameworks import framework_of
from olmo_lns.integrations import any_model
from olmo_lns.processes import is_first_process, same_outcome_on_every_rank
from olmo_lns.schemes import Scheme, as_scheme
from olmo_lns.shadow import has_no_values
from olmo_lns.start_up import write_line

__all__ = ["apply", "fold", "plain_initialization"]

C = TypeVar("C")
#: Number of blocks for which the plans of a scheme are checked. The number of the model's blocks is not known yet.
_SOME_DEPTH = 8


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

    :param model: a model of Megatron Core, OLMo or transformers, or any module with Pre-LN blocks whose norms are
        modules.
    :param scheme: a scheme that only multiplies norms, such as ``"lns"`` or ``"lns:exponent=0.25"``.
    :param blocks: the blocks in order, if the model has several lists that could hold them.
    :param norms: the norms themselves, if no module runs a block or its blocks cannot be found: for each block, in
        order from block 1, the norms in front of attention and feed-forward, or one norm that both read.
    :param example: input of one forward: a tensor, a tuple of arguments, a dict of keywords, or a function of the model
        that runs the forward. The default is 8 random token ids.
    :param trained: True: the weights were trained under ``scheme``. False: they are fresh. None: they are fresh if
        every norm that gets a factor has equal gains and biases, the same in all blocks, and the matrices of the
        blocks hold independent random numbers.
    :raises CheckpointMismatchError: if the weights were trained without a factor, and ``trained`` is None.
    :raises LNSConfigError: if the model is not Pre-LN, has another scheme, is wrapped already, or does not accept the
        example.
    :raises MeasurementError: if a block cannot be run again, or does not compute the scheme. In either case the model
        is left unchanged.

    Source: arXiv 2502.05795, section 4, for ``lns``.

    Examples::

        olmo_lns.apply(GPT(config), "lns:exponent=0.25", example=torch.zeros(1, 8, dtype=torch.long))
        olmo_lns.apply(vit, norms=[(attn.norm, ff.net[0]) for attn, ff in vit.transformer.layers], example=images)
    """
    with same_outcome_on_every_rank():
        chosen = as_scheme(scheme)
        _require_supported(model, chosen, {"blocks": blocks, "norms": norms, "example": example})
    with same_outcome_on_every_rank():
        _apply(model, chosen, blocks, norms, example, trained)
    return model


def _require_supported(model: nn.Module, scheme: Scheme, given: dict[str, Any]) -> None:
    """Check, before the model is run, what does not depend on its blocks.

    :param given: the optional arguments of :func:`apply` by their names.
    """
    environment.check()
    any_model.require_unwrapped(model)
    if framework_of(model) != "megatron":
        if scheme.is_pre_ln or not scheme.only_scales_norms(_SOME_DEPTH):
            raise LNSConfigError(
                f"The scheme is {scheme}. Expected one that only multiplies norms, such as lns:exponent=0.25."
            )
        return
    if scheme.name != "lns":
        raise LNSConfigError(
            f"The scheme is {scheme}. The Megatron integration supports lns and its exponent only. Use lns."
        )
    if unused := [f"{name}=" for name, value in given.items() if value is not None]:
        raise LNSConfigError(
            f"{' and '.join(unused)} was passed for a model of Megatron Core. There the norms are found by the names "
            "of their modules. Remove the argument."
        )


def _apply(model: Any, scheme: Scheme, blocks: Any, norms: Any, example: Any, trained: bool | None) -> None:
    framework = framework_of(model)
    if framework == "megatron":
        from olmo_lns.integrations import megatron

        megatron.apply(model, exponent=scheme.parameters["exponent"], trained=trained)
    elif framework == "transformers":
        from olmo_lns.integrations import transformers

        transformers.apply(
            model,
            scheme,
            blocks=blocks,
            norms=norms,
            example=example,
            trained=trained,
            locate=any_model.locate_on_first_rank,
        )
    else:
        blocks = _blocks_of_olmo(model) if framework == "olmo" and blocks is None and norms is None else blocks
        located = any_model.locate_on_first_rank(model, example, blocks, norms)
        with sites.stock_on_failure(model):
            measured = any_model.attach(model, located, scheme, trained=trained)
            any_model.check_without_hooks(model, located, example)
        if framework == "olmo":
            from olmo_lns.integrations.olmo.model import mark_config

            mark_config(model, scheme)
        any_model.report(model, located, measured, any_model.describe_initialization(model, located))


def _blocks_of_olmo(model: Any) -> list[nn.Module]:
    groups = model.transformer
    groups = [groups.blocks] if hasattr(groups, "blocks") else groups.block_groups
    return [block for group in groups for block in group]


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
    framework = framework_of(model)
    if framework == "transformers":
        from olmo_lns.integrations import transformers

        return transformers.fold(model, dtype, example=example)
    if not any(sites.in_model(model)):
        raise LNSConfigError(
            f"{type(model).__name__} has no scheme, so there is nothing to fold. It is a stock model already."
        )
    if framework == "megatron":
        raise LNSConfigError(
            f"fold found a built {type(model).__name__} of Megatron Core, whose weights may be tensor-parallel parts. "
            "Fold its checkpoint instead: olmo-lns export CHECKPOINT OUT."
        )
    if not sites.read_back(model).only_scales_norms(max(site.n_layers for _, _, site in sites.in_model(model))):
        raise LNSConfigError(
            f"{type(model).__name__} has the scheme {sites.read_back(model)}, which replaces the forward of the "
            "blocks. Only schemes that multiply norms can be folded in memory. Save the model, and run olmo-lns "
            "export CHECKPOINT OUT."
        )
    with any_model.undisturbed(model):
        fold_norms(model, any_model.forward(model, example), dtype)
    if framework == "olmo":
        from olmo_lns.integrations.olmo.model import unmark_config

        unmark_config(model)
    return model


def plain_initialization(target: C, *, blocks: Sequence[nn.Module] | None = None, example: Any = None) -> C:
    """Initialize the residual output projections like every other matrix, without a depth factor.

    Scaled initialization draws these weights times 1/sqrt(2L) (Megatron, GPT-2, nanoGPT, OLMo's ``full_megatron``), or
    times 1/sqrt(2l) in block l (torchtitan, open_lm, OLMo's ``mitchell``). In OLMo and Megatron a scheme removes the
    factor by itself, and so it does in a fresh model of transformers whose family has it. There this function is for
    the Pre-LN baseline.

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
    olmo: Any = getattr(target, "model", target)
    megatron: Any = getattr(target, "transformer", target)
    if isinstance(target, nn.Module):
        _make_plain(target, blocks, example)
    elif hasattr(olmo, "init_fn") and hasattr(olmo, "layer_norm_type"):
        from olmo_lns.integrations.olmo import register
        from olmo_lns.integrations.olmo.model import request_plain_initialization as request_olmo

        register()
        request_olmo(olmo)
    elif hasattr(megatron, "output_layer_init_method"):
        from olmo_lns.integrations.megatron import plain_initialization as request_megatron

        request_megatron(megatron)
    else:
        raise LNSConfigError(
            f"plain_initialization found a {type(target).__name__}. It expects a built model, or the config of an OLMo "
            "or a Megatron model before it is built. In OLMo-core, set init_method to normal or fan_in."
        )
    return target


def _make_plain(model: Any, blocks: Any, example: Any) -> None:
    if framework_of(model) == "megatron":
        raise LNSConfigError(
            f"plain_initialization found a built {type(model).__name__} of Megatron Core. It expects the model's "
            "config before the model is built. Call it on the TransformerConfig, or pass --no-scaled-init."
        )
    is_marked = any(True for _ in initialization.marked(model))
    if is_marked and blocks is None and example is None:  # it may be sharded by now
        line = initialization.make_plain(model)
    else:
        line = _locate_and_make_plain(model, blocks, example, is_marked=is_marked)
    if is_first_process():
        write_line(line)


def _locate_and_make_plain(model: Any, blocks: Any, example: Any, *, is_marked: bool) -> str:
    """Find the projections of a model, or of one of its towers, and remove their depth factor; return the line."""
    if not is_marked and any(sites.in_model(model)):
        raise LNSConfigError(
            f"{type(model).__name__}: its norms were passed as norms=, so its residual output projections are not "
            "known and cannot be measured. Draw these weights like all others, without a depth factor."
        )
    any_model.require_unwrapped(model)
    framework = framework_of(model)
    if framework == "transformers":
        from olmo_lns.integrations.transformers.scaling import locate

        located = locate(model, example, blocks)
    else:
        blocks = _blocks_of_olmo(model) if framework == "olmo" and blocks is None else blocks
        located = any_model.locate(model, example, blocks)
    found = nn.ModuleList(located.blocks_of(model))
    with initialization.marks_restored_on_failure(model):
        initialization.mark(list(found), located.projections, located.norms_of(model))
        if any(map(has_no_values, model.parameters())):
            return "plain initialization: projections found; call it again in every process once the weights are drawn"
        return initialization.make_plain(model if not is_marked else found)
