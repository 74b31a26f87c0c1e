"""The Megatron symbols that are replaced or read against: by what, and when.

``fingerprints.json`` beside this file has, for each, the sources that were read and tested: fingerprint -> versions of
Megatron Core. ``scripts/fingerprints.py olmo_lns.integrations.megatron.upstream`` prints those of a source tree.
"""

from __future__ import annotations

import functools
import importlib
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, Callable

from olmo_lns.errors import LNSConfigError, UpstreamChangedError
from olmo_lns.integrations import patching
from olmo_lns.integrations.autoload import on_import
from olmo_lns.integrations.patching import Target

__all__ = ["BRIDGE", "CORE", "TARGETS", "TRAINING", "VERSIONS", "WRAPPERS", "install", "install_core", "target"]

#: What is set aside where it is not verified (olmo_lns.integrations.patching).
CORE, TRAINING, BRIDGE = "Megatron Core", "Megatron-LM", "Megatron Bridge"

#: Verified versions of Megatron Core; "main" is the 0.20.0 of August 2026.
VERSIONS = ("0.14.0", "0.15.3", "0.16.1", "0.17.0", "0.17.1", "0.18.2", "0.19.0", "0.19.2", "main")

TARGETS = tuple(
    Target(path, verified)
    for path, verified in json.loads(Path(__file__).with_name("fingerprints.json").read_text("utf-8")).items()
)

_LAYER = "megatron.core.transformer.transformer_layer:TransformerLayer"
_VIT = "megatron.core.models.vision.vit_model"
_DIST = "megatron.core.dist_checkpointing.serialization"
_LOADERS = {f"{_DIST}:load"} | {
    f"megatron.training.checkpointing:{name}" for name in ("load_args_from_checkpoint", "_load_base_checkpoint")
}
#: Symbol -> module and function of this package that wraps it.
WRAPPERS = {
    f"{_LAYER}.__init__": "building.transformer_layer",
    "megatron.core.transformer.transformer_block:TransformerBlock.__init__": "building.layer_stack",
    "megatron.core.transformer.multi_token_prediction:MultiTokenPredictionLayer.__init__": "building.mtp_layer",
    "megatron.core.ssm.mamba_block:MambaStack.__init__": "building.hybrid_stack",
    "megatron.core.models.hybrid.hybrid_block:HybridStack.__init__": "building.hybrid_stack",
    "megatron.core.models.common.vision_module.vision_module:VisionModule.__init__": "building.vision_tower",
    f"{_VIT}:ViTModel.__init__": "building.vision_tower",
    f"{_VIT}:QwenVLViTModel.__init__": "building.vision_tower",
    f"{_VIT}:KimiViTModel.__init__": "building.vision_tower",
    f"{_LAYER}.sharded_state_dict": "checkpoint.tensors",
    "megatron.core.models.common.language_module.language_module:LanguageModule.sharded_state_dict": (
        "checkpoint.tensors"
    ),
    f"{_DIST}:save": "checkpoint.save",
    f"{_DIST}:load": "checkpoint.load",
    "megatron.training.arguments:add_megatron_arguments": "launching.add_arguments",
    "megatron.training.arguments:core_transformer_config_from_args": "launching.config_from_args",  # until 0.17
    "megatron.training.argument_utils:core_transformer_config_from_args": "launching.config_from_args",
    "megatron.training.training:get_model": "launching.model_built",
    "megatron.training.training:setup_model_and_optimizer": "launching.model_built",
    "megatron.training.checkpointing:load_args_from_checkpoint": "checkpoint.load_args",
    "megatron.training.checkpointing:_load_base_checkpoint": "checkpoint.load_base",
    # Looked at by name: nothing of their arithmetic is replaced, and no fingerprint is kept.
    "megatron.bridge.training.mlm_compat.arguments:_transformer_config_from_args": "bridge.saved_config",
    "megatron.bridge.models.conversion.model_bridge:MegatronModelBridge.stream_weights_megatron_to_hf": (
        "bridge.exported"
    ),
    "megatron.bridge.models.conversion.model_bridge:MegatronModelBridge.load_weights_hf_to_megatron": "bridge.imported",
    "megatron.bridge.models.conversion.peft_bridge:MegatronPeftBridge.stream_adapter_weights_megatron_to_hf": (
        "bridge.exported"
    ),
}
#: Symbols that some versions have elsewhere: skipped where they are only imported.
_MOVED = ("MambaStack", "core_transformer_config_from_args")
_installed: set[str] = set()


def target(name: str) -> Target:
    """The one whose path ends with ``name``, such as ``TransformerLayer.__init__``."""
    (found,) = (each for each in TARGETS if each.path.endswith(f":{name}"))
    return found


@functools.cache
def check_readings() -> None:
    """:raises UpstreamChangedError: what a layer's two slots hold, or who calls them, is not what was read."""
    for each in TARGETS:
        needed = each.path.endswith((":get_bias_dropout_add", "._forward_attention", "._forward_mlp"))
        step = each.path.endswith(("._forward_post_mlp", "_bda_step"))  # of some versions
        if needed or (step and patching.exists(each)):
            patching.verify(each, each.locate()[2])


def install() -> None:
    """Core and training. Idempotent.

    :raises LNSConfigError: called too late: other modules hold the unextended functions by name.
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
    """Megatron Core, all that ``apply`` needs, and Megatron Bridge. Idempotent, never too late."""
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
    from olmo_lns.integrations.megatron import checkpoint
    from olmo_lns.integrations.megatron.settings import FLAGS

    mine = {path: _function(name) for path, name in WRAPPERS.items() if _defines(module, path)}
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
                patching.replace(each, checkpoint.look, only_look=True)
    if module.__name__ == _DIST:  # the package hands on the functions that it imported, perhaps before this
        package = sys.modules.get("megatron.core.dist_checkpointing")
        for name in ("save", "load"):
            if hasattr(package, name):
                setattr(package, name, getattr(module, name))


def _function(name: str) -> Callable[..., Any]:
    module, _, function = name.partition(".")
    return getattr(importlib.import_module(f"olmo_lns.integrations.megatron.{module}"), function)


def _defines(module: ModuleType, path: str) -> bool:
    name, _, qualname = path.partition(":")
    head = qualname.split(".")[0]
    if name != module.__name__ or head not in _MOVED:
        return name == module.__name__
    owner = getattr(module, head, None)
    return owner is not None and owner.__module__ == module.__name__ and not patching.is_patched(owner)
