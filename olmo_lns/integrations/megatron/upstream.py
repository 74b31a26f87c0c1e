"""The Megatron symbols that are replaced, with the sources they were read and tested against; by what, and when.

The fingerprints are printed by ``scripts/fingerprints.py olmo_lns.integrations.megatron.upstream``.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any, Callable

from olmo_lns.errors import LNSConfigError
from olmo_lns.integrations.autoload import on_import
from olmo_lns.integrations.patching import Target, exists, is_patched, replace, replace_all, require_verified

__all__ = ["BRIDGE", "CORE", "TARGETS", "TRAINING", "VERSIONS", "install", "install_core"]

#: What is set aside where it is not verified (olmo_lns.integrations.patching).
CORE, TRAINING, BRIDGE = "Megatron Core", "Megatron-LM", "Megatron Bridge"

#: Verified versions of Megatron Core; "main" is the 0.20.0 of August 2026.
VERSIONS = ("0.14.0", "0.15.3", "0.16.1", "0.17.0", "0.17.1", "0.18.2", "0.19.0", "0.19.2", "main")

LAYER = Target(
    "megatron.core.transformer.transformer_layer:TransformerLayer.__init__",
    {
        "c6f0dd721ee243d5": "0.14.0",
        "d3c7579db97cc60e": "0.15.3",
        "ab15e1d540a477e3": "0.16.1",
        "e50425622782aa1a": "0.17.0, 0.17.1",
        "248526192fc53ae9": "0.18.2",
        "80e601dfb8d54b08": "0.19.0, 0.19.2",
        "79277a589cb93185": "main",
    },
)
BLOCK = Target(
    "megatron.core.transformer.transformer_block:TransformerBlock.__init__",
    {
        "2d6488785d2d2a12": "0.14.0",
        "8ac3a4420885f5be": "0.15.3",
        "f01bec633f84f4d8": "0.16.1",
        "03019aa6d3539499": "0.17.0, 0.17.1, 0.18.2, 0.19.0, 0.19.2",
        "a0789e2b7940d3f8": "main",
    },
)
MTP = Target(
    "megatron.core.transformer.multi_token_prediction:MultiTokenPredictionLayer.__init__",
    {
        "63aa0181f0f4d276": "0.14.0",
        "e70e237aaf4e59af": "0.15.3",
        "b235eaa5447b5803": "0.16.1",
        "b53843abe6cba2ec": "0.17.0, 0.17.1",
        "12d96291a444e6fe": "0.18.2, 0.19.0, 0.19.2",
        "5359c20847e79271": "main",
    },
)
MAMBA_STACK = Target(
    "megatron.core.ssm.mamba_block:MambaStack.__init__",
    {
        "b815ae90de3c14c7": "0.14.0",
        "98c8c1cc3fabae5b": "0.15.3",
        "af27b914d4aa88fa": "0.16.1",
        "7e459f732e0eeab6": "0.17.0, 0.17.1",
    },
)
HYBRID_STACK = Target(
    "megatron.core.models.hybrid.hybrid_block:HybridStack.__init__",
    {
        "0db5678a6dd5f5e2": "0.18.2",
        "93e8d37748699ff6": "0.19.0, 0.19.2",
        "d60f8228de2c6605": "main",
    },
)
VISION = Target(
    "megatron.core.models.common.vision_module.vision_module:VisionModule.__init__",
    {"0aec59697fafce94": "0.14.0, 0.15.3, 0.16.1, 0.17.0, 0.17.1, 0.18.2, 0.19.0, 0.19.2, main"},
)
VIT = Target(
    "megatron.core.models.vision.vit_model:ViTModel.__init__",
    {"f7a21539faefd0d1": "main"},
)
QWEN_VIT = Target(
    "megatron.core.models.vision.vit_model:QwenVLViTModel.__init__",
    {"bdef56ff67ae85d6": "main"},
)
KIMI_VIT = Target(
    "megatron.core.models.vision.vit_model:KimiViTModel.__init__",
    {"eb1fc55ebf4efdd0": "main"},
)
FUSED = Target(
    "megatron.core.extensions.transformer_engine:TELayerNormColumnParallelLinear.forward",
    {
        "5c76876f2ad99cc9": "0.14.0, 0.15.3",
        "b55bba7d8480e2f2": "0.16.1, 0.17.0, 0.17.1, 0.18.2, 0.19.0, 0.19.2",
        "42eabcd522f3de76": "main",
    },
)
#: What stands in a layer's two slots, and who calls them: read, not replaced.
ADDITION = Target(
    "megatron.core.fusions.fused_bias_dropout:get_bias_dropout_add",
    {"7cc3190df4448224": "0.14.0, 0.15.3, 0.16.1, 0.17.0, 0.17.1, 0.18.2, 0.19.0, 0.19.2, main"},
)
FORWARD_ATTENTION = Target(
    "megatron.core.transformer.transformer_layer:TransformerLayer._forward_attention",
    {
        "71e342cf075ed2df": "0.14.0",
        "f09f1af7d6d535b9": "0.15.3",
        "f47916c48bdf6182": "0.16.1",
        "821169751c09c0a7": "0.17.0, 0.17.1",
        "af47836115eca84f": "0.18.2",
        "e35b4f416ec696e6": "0.19.0, 0.19.2",
        "7245c3e130d2496b": "main",
    },
)
FORWARD_MLP = Target(
    "megatron.core.transformer.transformer_layer:TransformerLayer._forward_mlp",
    {
        "455834d126e9b348": "0.14.0",
        "f4eb856df7ab3942": "0.15.3",
        "5e82843907e94a6d": "0.16.1",
        "2321717bba952cb2": "0.17.0, 0.17.1",
        "5a62158510e0e086": "0.18.2",
        "819b714be93f5bf2": "0.19.0, 0.19.2",
        "7179f9fccdc88903": "main",
    },
)
POST_MLP = Target(
    "megatron.core.transformer.transformer_layer:TransformerLayer._forward_post_mlp",
    {
        "7ddcfa73a7fe2e77": "0.16.1",
        "245465deb741861f": "0.17.0, 0.17.1",
        "708f9acddcf128a1": "0.18.2",
        "f29cbe6e60a8007c": "0.19.0, 0.19.2",
    },
)
ATTENTION_STEP = Target(
    "megatron.core.transformer.transformer_layer:TransformerLayer._apply_self_attn_bda_step",
    {"9247b5a89328ca4a": "main"},
)
MLP_STEP = Target(
    "megatron.core.transformer.transformer_layer:TransformerLayer._apply_mlp_bda_step",
    {"7f2fa91987a4563f": "main"},
)
#: Of all versions, and of some.
ADDITIONS, ADDITION_STEPS = (ADDITION, FORWARD_ATTENTION, FORWARD_MLP), (POST_MLP, ATTENTION_STEP, MLP_STEP)
FLAGS = Target(
    "megatron.training.arguments:add_megatron_arguments",
    {
        "3317a2622778d132": "0.14.0",
        "20e216ec47ccda44": "0.15.3",
        "1f2ef43fce3eacba": "0.16.1, 0.17.0, 0.17.1",
        "ae29c970782d41d0": "0.18.2",
        "16fbc976c3946b39": "0.19.0, 0.19.2, main",
    },
)
CONFIG_UNTIL_0_17 = Target(
    "megatron.training.arguments:core_transformer_config_from_args",
    {
        "ab01e5afec0851a3": "0.14.0",
        "0f888ade4f34e5ca": "0.15.3",
        "d1316accfb29007b": "0.16.1",
        "7eedd565ff2098cd": "0.17.0",
        "1a21164e1aa93ce8": "0.17.1",
    },
)
CONFIG = Target(
    "megatron.training.argument_utils:core_transformer_config_from_args",
    {
        "b936a26e8fc86651": "0.18.2",
        "232cfebdfc495690": "0.19.0, 0.19.2, main",
    },
)
YAML = Target(
    "megatron.training.yaml_arguments:load_yaml",
    {
        "c6a615c10ed442e4": "0.14.0, 0.15.3, 0.16.1, 0.17.0, 0.17.1",
        "f8cb9d4e0344afc6": "0.18.2",
        "4664c14e895d1913": "0.19.0, 0.19.2, main",
    },
)
GET_MODEL = Target(
    "megatron.training.training:get_model",
    {
        "311d62a1569a5843": "0.14.0",
        "5d308d08ff34132f": "0.15.3",
        "8d3ec6cb107ccc2e": "0.16.1",
        "1bd6e2b814ddbce2": "0.17.0, 0.17.1",
        "4ef60415fe78cbe8": "0.18.2",
        "8b05a50be0a846f0": "0.19.0, 0.19.2",
        "0813dba9851d6a47": "main",
    },
)
SETUP = Target(
    "megatron.training.training:setup_model_and_optimizer",
    {
        "80e77552f70b9db1": "0.14.0",
        "ce1ac612746a160d": "0.15.3",
        "e694b224d6301860": "0.16.1",
        "e0ab86ab7e7e9ea4": "0.17.0, 0.17.1",
        "72c42ffbd1bd11b7": "0.18.2",
        "fc7efe46b5635221": "0.19.0, 0.19.2",
        "4dc9fb417b6cb7bf": "main",
    },
)
LOAD_ARGS = Target(
    "megatron.training.checkpointing:load_args_from_checkpoint",
    {
        "5803f7f2eb9c5556": "0.14.0",
        "61eb400cce3c76db": "0.15.3",
        "25ed1e223d821fb5": "0.16.1",
        "f3c31a20316fe81e": "0.17.0, 0.17.1",
        "deb382bb857d338b": "0.18.2",
        "fd19c1962b42f5ea": "0.19.0, 0.19.2",
        "cf24618968b6bdfc": "main",
    },
)
LOAD_BASE = Target(
    "megatron.training.checkpointing:_load_base_checkpoint",
    {
        "8c92c9144b0a4fbb": "0.14.0",
        "0c81ba6ca7611baf": "0.15.3",
        "e0bf0a0624b11f6d": "0.16.1, 0.17.0, 0.17.1",
        "32bdea5769a245b2": "0.18.2",
        "84f32b0c01e91ce6": "0.19.0, 0.19.2",
        "8a45ee49ba555b04": "main",
    },
)
LOAD_MODELOPT = Target(
    "megatron.post_training.checkpointing:load_modelopt_checkpoint",
    {
        "cd7211462e831e4b": "0.14.0",
        "e0aa4c963964702c": "0.15.3",
        "1c7b5024ca0b9fc6": "0.16.1, 0.17.0, 0.17.1, 0.18.2, 0.19.0, main",
    },
)
LAYER_TENSORS = Target(
    "megatron.core.transformer.transformer_layer:TransformerLayer.sharded_state_dict",
    {"99ae8fae54e95d6a": "0.14.0, 0.15.3, 0.16.1, 0.17.0, 0.17.1, 0.18.2, 0.19.0, 0.19.2, main"},
)
MODEL_TENSORS = Target(
    "megatron.core.models.common.language_module.language_module:LanguageModule.sharded_state_dict",
    {
        "e5dca4b9bf6e82ac": "0.14.0, 0.15.3",
        "1e8c8e48657c8491": "0.16.1",
        "09705f526886b266": "0.17.0, 0.17.1, 0.18.2, 0.19.0, 0.19.2, main",
    },
)
DIST_SAVE = Target(
    "megatron.core.dist_checkpointing.serialization:save",
    {
        "6fdff2dca5cc183a": "0.14.0, 0.15.3, 0.16.1",
        "61cb8990342347ff": "0.17.0",
        "f31dda8a28618a72": "0.17.1, 0.18.2",
        "4166c80e4c61aeab": "0.19.0, 0.19.2, main",
    },
)
DIST_LOAD = Target(
    "megatron.core.dist_checkpointing.serialization:load",
    {
        "79b284f8af13b7d6": "0.14.0, 0.15.3, 0.16.1",
        "e5310a0091b9da5b": "0.17.0",
        "c304fef8d6541167": "0.17.1, 0.18.2",
        "410b9603e32a0ffa": "0.19.0, 0.19.2",
        "3732c3e74f137b12": "main",
    },
)

TARGETS = (
    LAYER,
    BLOCK,
    MTP,
    MAMBA_STACK,
    HYBRID_STACK,
    VISION,
    VIT,
    QWEN_VIT,
    KIMI_VIT,
    LAYER_TENSORS,
    MODEL_TENSORS,
    DIST_SAVE,
    DIST_LOAD,
    FUSED,
    *ADDITIONS,
    *ADDITION_STEPS,
    FLAGS,
    CONFIG_UNTIL_0_17,
    CONFIG,
    YAML,
    GET_MODEL,
    SETUP,
    LOAD_ARGS,
    LOAD_BASE,
    LOAD_MODELOPT,
)

_CORE = (
    "megatron.core.transformer.transformer_layer",
    "megatron.core.transformer.transformer_block",
    "megatron.core.transformer.multi_token_prediction",
    "megatron.core.ssm.mamba_block",
    "megatron.core.models.hybrid.hybrid_block",
    "megatron.core.models.common.vision_module.vision_module",
    "megatron.core.models.vision.vit_model",
    "megatron.core.models.common.language_module.language_module",
    "megatron.core.dist_checkpointing.serialization",
)
_TRAINING = (
    "megatron.training.argument_utils",
    "megatron.training.arguments",
    "megatron.training.checkpointing",
    "megatron.training.training",
    "megatron.post_training.checkpointing",
    "megatron.training.yaml_arguments",
)
#: Megatron Bridge, which is looked at by name (olmo_lns.integrations.megatron.bridge).
_BRIDGE = (
    "megatron.bridge.training.mlm_compat.arguments",
    "megatron.bridge.models.conversion.model_bridge",
    "megatron.bridge.models.conversion.peft_bridge",
)
_installed: set[str] = set()


def install() -> None:
    """Core and training. Idempotent.

    :raises LNSConfigError: called too late: other modules hold the unextended functions by name.
    """
    for name in _TRAINING:
        if name not in _installed and name in sys.modules:
            raise LNSConfigError(
                f"olmo_lns.integrations.megatron.register() came after the import of {name}: call it first, or "
                "start the script with `python -m olmo_lns <script>`."
            )
    install_core()
    _arrange(_TRAINING)


def install_core() -> None:
    """Megatron Core, all that ``apply`` needs, and Megatron Bridge. Idempotent, never too late."""
    _arrange(_CORE)
    _arrange(_BRIDGE)


def _arrange(names: tuple[str, ...]) -> None:
    for name in names:
        if name not in _installed:
            on_import(name, _extend)
            _installed.add(name)  # not before: a module that was refused is refused again


def _extend(module: ModuleType) -> None:
    """:raises UpstreamChangedError: it is not verified, and the command line asks for a scheme."""
    from olmo_lns.integrations.megatron import bridge, checkpoint
    from olmo_lns.integrations.megatron.settings import FLAGS

    if module.__name__ in bridge.MODULES:
        bridge.extend(module)
        return
    pairs = [(target, wrapper) for target, wrapper in _pairs() if _defines(module, target)]
    framework = CORE if module.__name__ in _CORE else TRAINING
    if replace_all(pairs, framework=framework):
        _refresh(module)
        return
    if any(word.split("=")[0] in FLAGS for word in sys.argv[1:]):
        require_verified(framework)
    for target, _ in pairs:  # a checkpoint of a scheme is an error all the same
        if target in (DIST_LOAD, LOAD_ARGS, LOAD_BASE) and exists(target):
            replace(target, checkpoint.look, only_look=True)
    _refresh(module)


def _refresh(module: ModuleType) -> None:
    """``megatron.core.dist_checkpointing`` hands on the functions that it imported, perhaps before this."""
    package = sys.modules.get(module.__name__.rpartition(".")[0])
    for target in (DIST_SAVE, DIST_LOAD):
        path, _, name = target.path.partition(":")
        if path == module.__name__ and hasattr(package, name):
            setattr(package, name, getattr(module, name))


def _pairs() -> tuple[tuple[Target, Callable[[Callable[..., Any]], Callable[..., Any]]], ...]:
    from olmo_lns.integrations.megatron import building, checkpoint, launching

    return (
        (LAYER, building.transformer_layer),
        (BLOCK, building.transformer_block),
        (MTP, building.mtp_layer),
        (MAMBA_STACK, building.hybrid_stack),
        (HYBRID_STACK, building.hybrid_stack),
        (VISION, building.vision_tower),
        (VIT, building.vision_tower),
        (QWEN_VIT, building.vision_tower),
        (KIMI_VIT, building.vision_tower),
        (LAYER_TENSORS, checkpoint.tensors),
        (MODEL_TENSORS, checkpoint.tensors),
        (DIST_SAVE, checkpoint.save),
        (DIST_LOAD, checkpoint.load),
        (FLAGS, launching.add_arguments),
        (CONFIG_UNTIL_0_17, launching.config_from_args),
        (CONFIG, launching.config_from_args),
        (YAML, launching.load_yaml),
        (GET_MODEL, launching.model_built),
        (SETUP, launching.model_built),
        (LOAD_ARGS, checkpoint.load_args),
        (LOAD_BASE, checkpoint.load_base),
        (LOAD_MODELOPT, checkpoint.load_modelopt),
    )


def _defines(module: ModuleType, target: Target) -> bool:
    """Symbols that some versions have elsewhere are skipped where they are only imported."""
    path, _, qualname = target.path.partition(":")
    head = qualname.split(".")[0]
    owner = getattr(module, head, None)
    if path == module.__name__ and head in ("MambaStack", "core_transformer_config_from_args"):
        return owner is not None and owner.__module__ == module.__name__ and not is_patched(owner)
    return path == module.__name__
