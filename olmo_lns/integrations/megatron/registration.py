"""Replace Megatron's verified functions by this package's, right after the module that has them is imported.

Nothing of Megatron, PyTorch or the wrappers is imported before that.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any, Callable

from olmo_lns.errors import LNSConfigError, UpstreamChangedError
from olmo_lns.integrations import patching
from olmo_lns.integrations.autoload import on_import
from olmo_lns.integrations.megatron.settings import FLAGS
from olmo_lns.integrations.megatron.upstream import BRIDGE, CORE, TARGETS, TRAINING
from olmo_lns.integrations.patching import Target

_LAYER = "megatron.core.transformer.transformer_layer:TransformerLayer"
_LANGUAGE = "megatron.core.models.common.language_module.language_module:LanguageModule"
_VIT = "megatron.core.models.vision.vit_model"
_DIST = "megatron.core.dist_checkpointing.serialization"
_SAVED = "megatron.training.checkpointing"
_CONFIG = "core_transformer_config_from_args"
_TO_HF = "megatron.bridge.models.conversion"
_LOADERS = (f"{_DIST}:load", f"{_SAVED}:load_args_from_checkpoint", f"{_SAVED}:_load_base_checkpoint")
#: Symbol -> module and function of this package that wraps it.
WRAPPERS = {
    f"{_LAYER}.__init__": "building.transformer_layer",
    "megatron.core.transformer.transformer_block:TransformerBlock.__init__": "building.layer_stack",
    "megatron.core.transformer.multi_token_prediction:MultiTokenPredictionLayer.__init__": "building.mtp_layer",
    "megatron.core.ssm.mamba_block:MambaStack.__init__": "building.hybrid_stack",
    "megatron.core.models.hybrid.hybrid_block:HybridStack.__init__": "building.hybrid_stack",
    "megatron.core.models.common.vision_module.vision_module:VisionModule.__init__": "building.vision_tower",
    **{f"{_VIT}:{name}.__init__": "building.vision_tower" for name in ("ViTModel", "QwenVLViTModel", "KimiViTModel")},
    f"{_LAYER}.sharded_state_dict": "checkpoint.tensors",
    f"{_LANGUAGE}.sharded_state_dict": "checkpoint.tensors",
    f"{_DIST}:save": "checkpoint.save",
    f"{_DIST}:load": "checkpoint.load",
    "megatron.training.arguments:add_megatron_arguments": "building.add_arguments",
    f"megatron.training.arguments:{_CONFIG}": "building.config_from_args",  # until 0.17
    f"megatron.training.argument_utils:{_CONFIG}": "building.config_from_args",
    "megatron.training.training:get_model": "building.model_built",
    "megatron.training.training:setup_model_and_optimizer": "building.model_built",
    f"{_SAVED}:load_args_from_checkpoint": "checkpoint.load_args",
    f"{_SAVED}:_load_base_checkpoint": "checkpoint.load_base",
    # Of Megatron Bridge. These wrappers hand on what they are given, so no fingerprint is kept.
    "megatron.bridge.training.mlm_compat.arguments:_transformer_config_from_args": "checkpoint.saved_config",
    f"{_TO_HF}.model_bridge:MegatronModelBridge.stream_weights_megatron_to_hf": "checkpoint.exported",
    f"{_TO_HF}.model_bridge:MegatronModelBridge.load_weights_hf_to_megatron": "checkpoint.imported",
    f"{_TO_HF}.peft_bridge:MegatronPeftBridge.stream_adapter_weights_megatron_to_hf": "checkpoint.exported",
}
#: Symbols that some versions have elsewhere: skipped where they are only imported.
_MOVED = ("MambaStack", _CONFIG)
_installed: set[str] = set()


def register() -> None:
    """Arrange that each Megatron module is extended right after it is imported.

    It may be called twice, and changes nothing until ``--layernorm-scaling``, ``--norm-scheme`` or ``--no-scaled-init``
    is given.

    :raises LNSConfigError: it is called too late: other modules hold the unextended functions by name.
    :raises UpstreamChangedError: (at the import of the module concerned) a flag asks for a scheme, and this Megatron
        was not verified; the message names the override.

    Example: ``register()``, then ``from megatron.training import pretrain``.
    """
    for name in sorted({path.partition(":")[0] for path in WRAPPERS if path.startswith("megatron.training.")}):
        if name not in _installed and name in sys.modules:
            raise LNSConfigError(
                f"olmo_lns.integrations.megatron.register() came after the import of {name}: call it first, or "
                "start the script with `python -m olmo_lns <script>`."
            )
    _arrange("megatron.training.")
    install_core()


def install_core() -> None:
    """Extend Megatron Core, which is all that ``apply`` needs, and Megatron Bridge. Never too late."""
    _arrange("megatron.core.")
    _arrange("megatron.bridge.")


def _arrange(prefix: str) -> None:
    for path in WRAPPERS:
        name = path.partition(":")[0]
        if path.startswith(prefix) and name not in _installed:
            on_import(name, _extend)
            _installed.add(name)  # not before: a module that was refused is refused again


def _extend(module: ModuleType) -> None:
    """:raises UpstreamChangedError: it is not verified, and the command line asks for a scheme."""
    mine = {path: wrapper(name) for path, name in WRAPPERS.items() if _defines(module, path)}
    if module.__name__.startswith("megatron.bridge."):
        for path, make in mine.items():
            try:
                patching.replace(Target(path, {}), make, only_look=True)
            except UpstreamChangedError as error:  # an error where a scheme is built
                patching.set_aside(BRIDGE, error)
        return
    framework = CORE if module.__name__.startswith("megatron.core.") else TRAINING
    pairs = [(each, mine[each.path]) for each in TARGETS if each.path in mine]
    if not patching.replace_all(pairs, framework=framework):
        if any(word.split("=")[0] in FLAGS for word in sys.argv[1:]):
            patching.require_verified(framework)
        for each, _ in pairs:  # a checkpoint of a scheme is an error all the same
            if each.path in _LOADERS and patching.exists(each):
                patching.replace(each, wrapper("checkpoint.look"), only_look=True)
    if module.__name__ == _DIST:  # the package hands on the functions that it imported, perhaps before this
        package = sys.modules.get("megatron.core.dist_checkpointing")
        for name in ("save", "load"):
            if hasattr(package, name):
                setattr(package, name, getattr(module, name))


def wrapper(name: str) -> Callable[..., Any]:
    """The function of this package that ``WRAPPERS`` names."""
    module, _, function = name.partition(".")
    return getattr(importlib.import_module(f"olmo_lns.integrations.megatron.{module}"), function)


def _defines(module: ModuleType, path: str) -> bool:
    name, _, qualname = path.partition(":")
    head = qualname.split(".")[0]
    if name != module.__name__ or head not in _MOVED:
        return name == module.__name__
    owner = getattr(module, head, None)
    return owner is not None and owner.__module__ == module.__name__ and not patching.is_patched(owner)
