"""The schemes in transformers: a model type of ours for each family, and ``apply`` for a model in hand.

``register()`` adds model types such as ``lns_llama`` to the auto classes and guards ``from_pretrained`` and a
resumed ``Trainer``; nothing else changes. A model of such a type has stock parameters and a stock forward; its norms
(or branches) carry the factors of their block, and a folder that it is saved to says so.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from olmo_lns import __version__
from olmo_lns.errors import CheckpointMismatchError, LNSConfigError
from olmo_lns.integrations.transformers.families import FAMILIES, PREFIX, at
from olmo_lns.record import Record
from olmo_lns.schemes import Scheme, parse
from olmo_lns.schemes.initialization import resolve

__all__ = ["apply", "fold", "fold_factors", "register"]


def register() -> None:
    """Teach the installed transformers (and PEFT) our model types, and guard what it loads.

    Idempotent; called by the autoload hook.
    """
    from olmo_lns.integrations.autoload import on_import
    from olmo_lns.integrations.transformers import checkpoint

    on_import("transformers.modeling_utils", checkpoint.guard_loading)
    on_import("transformers.trainer", checkpoint.guard_resuming)
    on_import("transformers.models.auto.configuration_auto", _name_configs)
    on_import("peft.utils.constants", _adapter_targets)


def _name_configs(module: Any) -> None:
    """Our model types in the lazy table of configs: name now, class when somebody asks for it.

    Not ``AutoConfig.register``: it wants the classes at once, and transformers 5 cannot import one of its own
    configs while it imports this table.
    """
    from olmo_lns.integrations.transformers import models

    for kind, family in FAMILIES.items():
        if family.sub_layers and kind in module.CONFIG_MAPPING_NAMES:
            module.CONFIG_MAPPING_NAMES[PREFIX + kind] = f"LNS{family.stem}Config"
            module.CONFIG_MAPPING._modules[PREFIX + kind] = models
            if titles := getattr(module, "MODEL_NAMES_MAPPING", None):  # transformers 4: for its docstrings
                titles[PREFIX + kind] = f"{titles[kind]} under a scheme"


def _adapter_targets(module: Any) -> None:
    """PEFT's default target modules of a family, for our type too."""
    for name, table in vars(module).items():
        if name.startswith("TRANSFORMERS_MODELS_TO_") and isinstance(table, dict):
            table.update({PREFIX + kind: table[kind] for kind in FAMILIES if kind in table})


def apply(model: Any, scheme: str | Scheme = "lns", *, initialization: str = "", trained: bool | None = None) -> Any:
    """Put a built transformers model under ``scheme``, in place, and return it.

    The model's class becomes ours, and so does its config, a copy of the one that it was built from: what it saves
    carries the scheme.

    :param model: a model of a known family, with any head.
    :param scheme: such as ``"lns"`` or ``"lns:exponent=0.25"``.
    :param initialization: of the residual output projections, see :mod:`olmo_lns.schemes.initialization`; the
        default is plain, for which GPT-2's draw times 1/sqrt(2·L) is taken back.
    :param trained: True: the weights come from a training run, and stay as they are. The model then computes
        something else than it was trained to, so this is asked for by name. False: they were drawn just now. None:
        drawn, if neither model nor config came from a folder or a hub; which of the two did, transformers does not say.
    :raises LNSConfigError: an unknown family, a scheme that its blocks cannot have, or a model that has one.
    :raises CheckpointMismatchError: the model may have been loaded, or its factors are folded into its weights (which
        ``trained=False`` denies).

    Example: ``apply(AutoModelForCausalLM.from_config(LlamaConfig()), "lns:exponent=0.25").save_pretrained("folder")``.
    """
    from transformers import PreTrainedModel

    from olmo_lns.integrations.transformers import models, sites

    register()
    if not isinstance(model, PreTrainedModel):
        raise LNSConfigError(f"apply expects a transformers model, found {type(model).__name__}")
    family = sites.known_family(model)
    wanted = parse(scheme) if isinstance(scheme, str) else scheme
    if wanted.is_pre_ln:
        raise LNSConfigError("scheme preln is what the model is without olmo-lns: nothing to apply")
    present = models.record_of(model.config)
    if present.active or (present.folded and trained is not False):
        raise CheckpointMismatchError(f"{type(model).__name__} is {present} already: a scheme is applied once")
    if model.name_or_path and trained is None:
        raise CheckpointMismatchError(
            f"{type(model).__name__} or its config was loaded from {model.name_or_path}. Were its weights drawn just "
            f"now, as by from_config: say trained=False. Were they trained, it was not under {wanted}: trained=True "
            "goes on knowingly."
        )
    sites.require_supported(family, wanted, model.config.num_hidden_layers)
    drawn = "upstream" if trained else resolve(initialization, wanted)
    record = Record(wanted, "", drawn)  # the model type says which norm
    models.register_models(family)
    vars(models.own_config(model)).pop("lns", None)  # "folded", of a folder whose shape these weights have
    model.config.__class__ = models.config_class(family)
    model.config.lns_record = record.as_dict()
    models.convert(model, family)
    sites.attach_model(model, record)
    return model


def fold(model: Any) -> Any:
    """Multiply the factors of a model of ours into its weights, in place: it becomes a stock model and is returned.

    A norm's factor goes into its gain and bias, or, for a norm without gain, into the weights of the projections that
    read it; a branch's goes into weight and bias of its last projection. Products are in fp64 and are rounded once, to
    the dtype of the weight. Merge adapters first: one that was trained on the unfolded model does not fit the folded.

    :raises LNSConfigError: as :func:`fold_factors`. The model is then as it was.

    Example: ``fold(model).save_pretrained("folded")``.
    """
    import torch

    from olmo_lns.integrations.transformers import models, sites

    factors, family, record = fold_factors(model), sites.known_family(model), models.record_of(model.config)
    for name, parameter in model.named_parameters():
        if name in factors:
            with torch.no_grad():
                parameter.copy_((parameter.double() * factors[name]).to(parameter.dtype))
    for module in model.modules():
        if "lns_scale" in vars(module):
            module.__class__ = type(module).__bases__[1]  # (the kind of scaling, the stock class)
        elif (stock := models.stock_class(module)) is not None:
            module.__class__ = stock
        for name in [name for name in vars(module) if name.startswith("lns_")]:
            delattr(module, name)
    models.own_config(model).__class__ = models.stock_config_class(family)
    model.config.lns = "folded"
    model.config.lns_record = replace(record, folded=True, plugin_version=__version__).as_dict()
    models.set_folded(model)
    return model


def fold_factors(model: Any) -> dict[str, float]:
    """Name of a parameter -> what folding multiplies it by, where that is not 1.

    :raises LNSConfigError: not a model of ours, weights that two sub-layers share, or an adapter on a projection that
        a factor goes into.
    """
    from olmo_lns.integrations import norm_sites
    from olmo_lns.integrations.transformers import models, sites

    if models.stock_class(model) is None:
        raise LNSConfigError(f"{type(model).__name__} is no model of ours: there is nothing to fold")
    family, blocks, n_layers = sites.parts(model)
    norm_sites.check(model, models.record_of(model.config).scheme, n_layers)
    names, found = {parameter: name for name, parameter in model.named_parameters()}, {}
    for _, carrier, site in norm_sites.sites(model):
        if carrier.lns_scale == 1.0:
            continue
        block, place = blocks[site.layer_number - 1], family.sub_layers[site.sub_layer]
        into, parts = [carrier], ["weight", "bias"]
        if carrier is not at(block, place.norm):
            into = [at(block, place.output)]
        elif getattr(carrier, "weight", None) is None:
            into, parts = [at(block, path) for path in place.readers], ["weight"]  # a bias there is added after
        if any(hasattr(module, "base_layer") for module in into):
            raise LNSConfigError(
                f"{site.sub_layer}: a factor goes into a projection that has an adapter, which would stay as it is. "
                "Merge adapters first (merge_and_unload())."
            )
        for parameter in [getattr(module, part, None) for module in into for part in parts]:
            if parameter is None:
                continue
            if names[parameter] in found:
                raise LNSConfigError(f"{names[parameter]} belongs to two sub-layers: its factor has no one place")
            found[names[parameter]] = carrier.lns_scale
    return found
