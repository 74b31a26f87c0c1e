"""Refuse functions of other programs that would lose the factor of a model with a scheme.

Each of these functions takes a transformers model apart by the names of its parts, or by its model type. It would go on
without the norms that have the factor. Models without a scheme are not affected.
"""

from __future__ import annotations

from typing import Any, Callable

from olmo_lns.errors import LNSConfigError
from olmo_lns.hook import on_import, wrap
from olmo_lns.integrations.transformers.model_types import PREFIX

_DEEPSPEED = (
    "DeepSpeed's inference kernels read the weights of this block and replace it. Its norms have a factor of LayerNorm "
    "Scaling, which the kernels do not apply. Fold the model first (olmo_lns.fold), or leave out "
    "replace_with_kernel_inject and the hybrid engine."
)
_LIGER = (
    "Liger would replace the forward of a norm that has a factor of LayerNorm Scaling, and the factor would be lost. "
    "Apply Liger to the model first, then olmo_lns.apply(model)."
)
_ACCELERATE = (
    "accelerate's Megatron-LM plugin builds a model of its own from the config, without the factors of LayerNorm "
    "Scaling. Train with another plugin of accelerate (FSDP, DeepSpeed), or in Megatron-LM with --layernorm-scaling."
)
_TRL = (
    "TRL computes the logits of this model by its own code. It multiplies those of the model type hyperclovax by "
    "logits_scaling, and divides those of other types, such as this lns_hyperclovax. Expected logits_scaling=1 in the "
    "config. Otherwise fold the model first (olmo_lns.fold), or use a trainer and a loss that call the model's forward."
)


def register() -> None:
    """Request the wrappers, without importing the other programs. A second call does nothing."""
    for name in _REFUSED:
        on_import(name, _refuse, needed=False)


def _has_factor(module: Any) -> bool:
    from olmo_lns import sites  # imports torch

    return any(True for _ in sites.in_model(module))


# Each function takes any arguments, so that a wrong call fails in the other program as without this package.
def _injects_kernels(*args: Any, **kwargs: Any) -> bool:
    block = getattr(kwargs.get("policy"), "client_module", None)
    return hasattr(block, "named_modules") and _has_factor(block)


def _patches_scaled_norm(module: Any = None, *args: Any, **kwargs: Any) -> bool:
    return hasattr(module, "named_modules") and _has_factor(module)  # PEFT may have wrapped the norm


def _has_scheme_type(plugin: Any = None, model: Any = None, *args: Any, **kwargs: Any) -> bool:
    return str(getattr(getattr(model, "config", None), "model_type", "")).startswith(PREFIX)


def _has_logits_scaling(model: Any = None, *args: Any, **kwargs: Any) -> bool:
    config: Any = getattr(model, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else None
    is_other_type = getattr(config, "model_type", None) == f"{PREFIX}hyperclovax"
    return is_other_type and getattr(config, "logits_scaling", None) not in (None, 1.0)


def _distils_logits_scaling(trainer: Any = None, student: Any = None, *args: Any, **kwargs: Any) -> bool:
    teacher = getattr(trainer, "teacher_model", None)  # which FSDP or DDP may have wrapped
    return any(map(_has_logits_scaling, (student, teacher, getattr(teacher, "module", None))))


#: Module of another program -> its function -> whether a call is refused, and the message.
_REFUSED: dict[str, dict[str, tuple[Callable[..., bool], str]]] = {
    "accelerate.utils.dataclasses": {"MegatronLMPlugin.set_network_size_args": (_has_scheme_type, _ACCELERATE)},
    # The two modules that import the function; DeepSpeed may have been imported before.
    "deepspeed.module_inject.replace_module": {"policy_to_ds_container": (_injects_kernels, _DEEPSPEED)},
    "deepspeed.runtime.hybrid_engine": {"policy_to_ds_container": (_injects_kernels, _DEEPSPEED)},
    "liger_kernel.transformers.monkey_patch": {
        "_patch_rms_norm_module": (_patches_scaled_norm, _LIGER),
        "_patch_layer_norm_module": (_patches_scaled_norm, _LIGER),
    },
    "trl.trainer.utils": {"add_fused_lm_head": (_has_logits_scaling, _TRL)},
    "trl.trainer.distillation_trainer": {"DistillationTrainer._compute_loss": (_distils_logits_scaling, _TRL)},
    "trl.experimental.async_distillation.async_distillation_trainer": {
        "AsyncDistillationTrainer._compute_loss": (_distils_logits_scaling, _TRL)
    },
}


def _refuse(module: Any) -> None:
    for path, (is_refused, message) in _REFUSED[module.__name__].items():

        def make(
            original: Callable[..., Any], is_refused: Callable[..., bool] = is_refused, message: str = message
        ) -> Callable[..., Any]:
            def wrapped(*args: Any, **kwargs: Any) -> Any:
                if is_refused(*args, **kwargs):
                    raise LNSConfigError(message)
                return original(*args, **kwargs)

            return wrapped

        wrap(f"{module.__name__}:{path}", make, needed=False)
