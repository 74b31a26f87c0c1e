"""The functions and classes of OLMo-core that this integration needs or replaces, and the verified versions."""

from __future__ import annotations

import inspect

from olmo_lns.environment import DISABLE, is_set
from olmo_lns.environment import check as check_environment
from olmo_lns.errors import LNSConfigError, UpstreamChangedError
from olmo_lns.integrations.patching import Target, require_verified

NAME = "OLMo-core"
VERIFIED = "2.5.0, 2.6.0 and 3.0.0"
#: Block configs have had a ``sequence_mixer`` since then, and their blocks the global index.
OLDEST = "2.5.0"

#: Arguments and fields of a block's config, and classes of blocks.
_NEEDED = {"d_model", "block_idx", "n_layers", "init_device", "cache", "sequence_mixer", "layer_norm"} | {
    f"{name}TransformerBlock" for name in ("", "ReorderedNorm", "PeriNorm")
}
_ALL = "2.5.0, 2.6.0, 3.0.0"
_CHECKPOINTER = "olmo_core.train.checkpoint:Checkpointer"

LOAD = Target(f"{_CHECKPOINTER}.load", {"eeba0f6ffbc3f283": "2.5.0, 2.6.0", "3bbbf57834d16c5f": "3.0.0"})
SAVE = Target(f"{_CHECKPOINTER}.save", {"8a40f59bd8f67b74": "2.5.0, 2.6.0", "66c571f666633209": "3.0.0"})
SAVE_ASYNC = Target(f"{_CHECKPOINTER}.save_async", {"01186234ea69d6a8": "2.5.0, 2.6.0", "2783c37ff22dc40c": "3.0.0"})
SAVE_TRAIN_STATE = Target(f"{_CHECKPOINTER}._save_train_state", {"da2a2d8631e778a8": _ALL})
LOAD_MODEL = Target(
    "olmo_core.distributed.checkpoint:load_model_and_optim_state",
    {"e347742cf7631ccd": "2.5.0", "137538cff38be7f5": "2.6.0, 3.0.0"},
)
SAVE_MODEL = Target("olmo_core.distributed.checkpoint:save_model_and_optim_state", {"1d89a4a0c73c08e2": _ALL})
SAVE_MODEL_ASYNC = Target(
    "olmo_core.distributed.checkpoint:async_save_model_and_optim_state", {"36e5208ef9c66d30": _ALL}
)
FROM_DICT = Target("olmo_core.config:Config.from_dict", {"90baf9ead6b3e2d6": _ALL})
_CONVERTER = "olmo_core.nn.hf.checkpoint"
SAVE_HF = Target(f"{_CONVERTER}:save_hf_model", {"fa7a882c11c8e556": "2.5.0, 2.6.0", "664612431660a675": "3.0.0"})
LOAD_HF = Target(f"{_CONVERTER}:load_hf_model", {"2374a780c7cddb42": "2.5.0, 2.6.0", "5525d2fc4309e6e0": "3.0.0"})
SAVE_HF_HYBRID = Target(
    f"{_CONVERTER}:save_hf_hybrid_model", {"99af662b7e361c50": "2.5.0, 2.6.0", "de6296738e31a421": "3.0.0"}
)
_GENERATION = "olmo_core.generate.generation_module.transformer.generation_module:TransformerGenerationModule"
LOAD_GENERATION = Target(f"{_GENERATION}.load_checkpoint", {"d46a6648d5bf42ba": _ALL})
AVERAGE = Target(f"{_GENERATION}.from_checkpoints", {"6f25a637531204b7": _ALL})

TARGETS = (
    LOAD, SAVE, SAVE_ASYNC, SAVE_TRAIN_STATE, LOAD_MODEL, SAVE_MODEL, SAVE_MODEL_ASYNC,
    SAVE_HF, SAVE_HF_HYBRID, LOAD_HF, FROM_DICT, LOAD_GENERATION, AVERAGE,
)  # fmt: skip


def check() -> None:
    """:raises UpstreamChangedError: this OLMo-core lacks something that the integration stands on."""
    from olmo_core.nn.transformer import block, config
    from olmo_core.version import VERSION

    kind = config.TransformerBlockConfig
    found = {*inspect.signature(kind.build).parameters, *getattr(kind, "__dataclass_fields__", ()), *vars(block)}
    if missing := sorted(_NEEDED - found):
        raise UpstreamChangedError(
            f"ai2-olmo-core {VERSION} lacks {', '.join(missing)} in its transformer blocks or their config; "
            f"verified are {VERIFIED}. Install one of them (pip install 'olmo-lns[olmo-core]')."
        )


def require_enabled() -> None:
    """:raises LNSConfigError: a block with a scheme is to be built although the package was switched off.

    :raises UpstreamChangedError: this OLMo-core was left untouched, since it is none that was verified.
    """
    check_environment()
    require_verified(NAME)
    if is_set(DISABLE):
        raise LNSConfigError(
            f"{DISABLE}=1, but the config names olmo_lns.olmo_core.BlockConfig: the stock block would be another "
            "model. Unset the variable, or take _CLASS_ and its fields out of the config."
        )
