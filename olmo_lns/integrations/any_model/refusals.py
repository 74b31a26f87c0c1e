"""Refuse models that cannot be measured: compiled, wrapped, offloaded, or changed by an adapter."""

from __future__ import annotations

from typing import Iterable

import torch
from torch import nn

from olmo_lns import shadow
from olmo_lns.errors import LNSConfigError
from olmo_lns.integrations.any_model.located import Located
from olmo_lns.scaled import Scaled

#: Classes of PyTorch and Megatron that wrap or compile a model.
_WRAPPER_CLASSES = {
    *("OptimizedModule", "DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule"),
    "TorchFullyShardedDataParallel",
}


def require_unwrapped(model: nn.Module) -> None:
    """Check that the model can be measured.

    :raises LNSConfigError: if it is not a module, is compiled or wrapped by DDP or FSDP, has offloaded or lazy weights,
        or if the caller is in inference mode.
    """
    if not isinstance(model, nn.Module):
        raise LNSConfigError(
            f"The model has the type {type(model).__name__}. Expected a built torch.nn.Module. Build the model first."
        )
    refuse_wrappers(model)
    refuse_offloaded(model)
    if any(map(torch.nn.parameter.is_lazy, model.parameters())):
        raise LNSConfigError(
            f"{type(model).__name__} has lazy modules, whose weights have no shape yet. Expected a built model. "
            "Run the model once on an example first."
        )
    if torch.is_inference_mode_enabled():
        raise LNSConfigError(
            "The call is inside torch.inference_mode(), in which PyTorch computes no gradients. The norms are measured "
            "with their gradients. Call this function before inference mode begins."
        )


def require_weights(model: nn.Module) -> None:
    """Check that this process has all weights of the model.

    :raises LNSConfigError: if weights are on the meta device, partitioned, or offloaded by accelerate.
    """
    refuse_offloaded(model)
    if any(map(shadow.has_no_values, model.parameters())):
        raise LNSConfigError(
            f"The weights of {type(model).__name__} are on the meta device or partitioned. Expected a model with all "
            "of its weights. Load or gather them first."
        )


def refuse_wrappers(model: nn.Module) -> None:
    """Refuse a wrapped model.

    :raises LNSConfigError: if a module is compiled, or wrapped by DDP or FSDP.
    """
    for module in model.modules():
        kinds = {base.__name__ for base in type(module).__mro__}
        if kinds & _WRAPPER_CLASSES or getattr(module, "_compiled_call_impl", None) is not None:
            raise LNSConfigError(
                f"{type(module).__name__} is compiled, or wrapped by DDP or FSDP, so its norms can no longer be "
                "measured. Expected the model before that. Build the model, apply the scheme, and then compile and "
                "wrap it."
            )


def refuse_offloaded(model: nn.Module) -> None:
    """Refuse a model whose weights accelerate keeps on the CPU or the disk and loads for each forward.

    :raises LNSConfigError: if a module has such weights. The message names it.
    """
    for name, module in model.named_modules():
        hook = getattr(module, "_hf_hook", None)
        if any(getattr(each, "offload", False) for each in getattr(hook, "hooks", (hook,))):
            raise LNSConfigError(
                f"accelerate has offloaded the weights of {name or type(model).__name__} to the CPU or the disk, and "
                "loads them for each forward. Expected the weights in the model itself. Load the model without "
                "device_map= and offloading, or call accelerate.hooks.remove_hook_from_submodules(model) first."
            )


def refuse_adapted(model: nn.Module, norms: Iterable[str]) -> None:
    """Refuse norms that PEFT has wrapped, as LNTuning and ``modules_to_save`` do.

    Such a norm exists twice, once in the adapter and once in the base model.

    :param norms: names of norms in ``model``.
    :raises LNSConfigError: if a norm is wrapped. The message names it.
    """
    modules = dict(model.named_modules())
    for norm in norms:
        parts = norm.split(".")
        for module in (modules[".".join(parts[:end])] for end in range(1, len(parts))):
            has_base = hasattr(module, "base_layer") or hasattr(module, "original_module")
            if has_base and type(module).__module__.startswith("peft."):
                raise LNSConfigError(
                    f"PEFT has wrapped the norm {norm}: the adapter and the base model have a norm each. Expected one "
                    "norm in each place. Apply a scheme before get_peft_model, and fold or save the model after "
                    "merge_and_unload()."
                )


def refuse_foreign_attributes(model: nn.Module, located: Located) -> None:
    """Refuse norms that have an attribute with a name that this package uses.

    :raises LNSConfigError: if there is one. The message names the norm and the attribute.
    """
    for names in located.norms:
        for name in names:
            norm = model.get_submodule(name)
            own = [key for key in vars(norm) if key in Scaled.__annotations__]
            if own and not isinstance(norm, Scaled):
                raise LNSConfigError(
                    f"{name} has an attribute {own[0]}. olmo_lns uses this name for its factor. Rename the attribute. "
                    "If it is a scaling of your own, remove it before you apply a scheme."
                )
