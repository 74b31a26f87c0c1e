"""Which OLMo was verified: versions, and the fingerprint of every symbol that is replaced or stood in for.

Made by ``python scripts/fingerprints.py``; a new line here means that somebody read the change.
"""

from __future__ import annotations

from packaging.version import Version

from olmo_lns.errors import UpstreamChangedError
from olmo_lns.integrations.patching import Target

NAME = "OLMo"
#: Before 0.4.0 ``init_fn: normal`` divides residual weights by sqrt(2L): scaled initialization
#: cannot be told from a plain one there.
OLDEST = "0.4.0"
VERIFIED = "0.5.0, 0.5.1, 0.6.0 and main (59a53e3, September 2025)"

_ALL = "0.5.0, 0.5.1, 0.6.0, main"

CONFIG_LOAD = Target("olmo.config:BaseConfig.load", {"9336feead4a3c95a": _ALL})
NORM_BUILD = Target("olmo.model:LayerNormBase.build", {"eabf12a9720c67e8": _ALL})
SEQUENTIAL_INIT = Target("olmo.model:OLMoSequentialBlock.__init__", {"0d09c77bc4f5c8f4": _ALL})
LLAMA_INIT = Target("olmo.model:OLMoLlamaBlock.__init__", {"002d5085c211607c": _ALL})
BLOCK_RESET = Target("olmo.model:OLMoBlock.reset_parameters", {"cb3cdc5e614baaee": _ALL})
SEQUENTIAL_RESET = Target("olmo.model:OLMoSequentialBlock.reset_parameters", {"440a64501b7e5540": _ALL})
LLAMA_RESET = Target("olmo.model:OLMoLlamaBlock.reset_parameters", {"d05739403804e897": _ALL})
MODEL_RESET = Target("olmo.model:OLMo.reset_parameters", {"9bad73fdf98f2d15": _ALL})
MODEL_INIT = Target("olmo.model:OLMo.__init__", {"5e2afdb4ab491a38": _ALL})
FROM_CHECKPOINT = Target("olmo.model:OLMo.from_checkpoint", {"985999e7c6535244": _ALL})
SAVE_CONFIG = Target("olmo.checkpoint:Checkpointer._save_config", {"5445348d2bccd279": _ALL})
#: Not replaced: what our blocks' forward was read against (a block of ours runs in place of the first two).
SEQUENTIAL_FORWARD = Target("olmo.model:OLMoSequentialBlock.forward", {"1b54ff4f7ce18113": _ALL})
LLAMA_FORWARD = Target("olmo.model:OLMoLlamaBlock.forward", {"216a531727e38c75": _ALL})
ATTENTION = Target("olmo.model:OLMoBlock.attention", {"9cbcff0c598c8fba": _ALL})
TRAINER_STATE = Target(
    "olmo.train:Trainer.trainer_state_dict", {"e20a78e33ff9ef06": "0.5.0, 0.5.1, 0.6.0", "8092c177c54973cf": "main"}
)
_OLD = "0.5.0, 0.5.1, 0.6.0"
#: Of each checkpointer: what its two functions were in which version.
_CHECKPOINTERS: dict[str, tuple[dict[str, str], dict[str, str]]] = {
    "Full": ({"c1ec2b3a23022a86": _OLD, "c0d0df6412d2f9b2": "main"},
             {"d342138b14e622ad": _OLD, "7305ddc401409e1f": "main"}),
    "TorchNewStyleSharded": ({"ab7df742ba788e22": _ALL}, {"2426ffcba620416c": _ALL}),
    "TorchLegacySharded": ({"4abdbd6c4d580f88": _ALL}, {"3b6082a2c1294afb": _ALL}),
    "LocalSharded": ({"895c36b9bef9aaba": _ALL}, {"611dd569dece440d": _ALL}),
    "OlmoCore": ({"b560df87aa31744b": "0.5.0, 0.5.1", "9a4e4d6d4f8dea8c": "0.6.0", "889bc98e012fcfa0": "main"},
                 {"95265495b1bbbbaf": _ALL}),
}  # fmt: skip
SAVE = [Target(f"olmo.checkpoint:{n}Checkpointer.save_checkpoint", both[0]) for n, both in _CHECKPOINTERS.items()]
RESTORE = [Target(f"olmo.checkpoint:{n}Checkpointer.restore_checkpoint", both[1]) for n, both in _CHECKPOINTERS.items()]

TARGETS = (*(value for value in [*globals().values()] if isinstance(value, Target)), *SAVE, *RESTORE)


def check_version(found: str) -> None:
    """:raises UpstreamChangedError: an OLMo that cannot be supported. Newer ones are judged by fingerprint."""
    if Version(found) < Version(OLDEST):
        raise UpstreamChangedError(
            f"ai2-olmo {found}: LayerNorm Scaling needs at least {OLDEST}, because before it init_fn 'normal' is "
            f"depth-scaled. Verified: {VERIFIED}. Upgrade with pip install 'olmo-lns[olmo]'."
        )
