"""The schemes in transformers: a model type of ours for each family, and ``apply`` for a model in hand.

``register()`` adds model types such as ``lns_llama`` to the auto classes and guards ``from_pretrained`` and a
resumed ``Trainer``; nothing else changes. A model of such a type has stock parameters and a stock forward; its norms
(or branches) carry the factors of their block, and a folder that it is saved to says so.
"""

from __future__ import annotations

from typing import Any

from olmo_lns.errors import CheckpointMismatchError, LNSConfigError
from olmo_lns.integrations.transformers.families import FAMILIES, PREFIX
from olmo_lns.record import Record
from olmo_lns.schemes import Scheme, parse
from olmo_lns.schemes.initialization import resolve

__all__ = ["apply", "fold", "register"]


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

    from olmo_lns.integrations.transformers import configs, models, sites

    register()
    if not isinstance(model, PreTrainedModel):
        raise LNSConfigError(f"apply expects a transformers model, found {type(model).__name__}")
    family = sites.known_family(model)
    wanted = parse(scheme) if isinstance(scheme, str) else scheme
    if wanted.is_pre_ln:
        raise LNSConfigError("scheme preln is what the model is without olmo-lns: nothing to apply")
    present = configs.record_of(model.config)
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
    model.config.__class__ = configs.config_class(family)
    model.config.lns_record = record.as_dict()
    models.convert(model, family)
    sites.attach_model(model, record)
    return model


def fold(model: Any) -> Any:
    """Multiply the factors of a model of ours into its weights, in place: it becomes a stock model and is returned.

    Merge adapters first: one that was trained on the unfolded model does not fit the folded one.
    :raises LNSConfigError: as :func:`olmo_lns.integrations.transformers.sites.fold`.

    Example: ``fold(model).save_pretrained("folded")``.
    """
    from olmo_lns.integrations.transformers import sites

    return sites.fold(model)
