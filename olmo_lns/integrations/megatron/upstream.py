"""The Megatron symbols that are replaced, with the sources they were read and tested against.

The fingerprints are printed by ``scripts/fingerprints.py olmo_lns.integrations.megatron.upstream``.
"""

from __future__ import annotations

from olmo_lns.integrations.patching import Target

__all__ = ["TARGETS", "VERSIONS"]

#: Verified versions of Megatron Core; "main" is the 0.20.0 of August 2026.
VERSIONS = ("0.14.0", "0.15.3", "0.16.1", "0.17.1", "0.18.2", "0.19.0", "0.19.2", "main")

TARGETS = {
    "layer": Target(
        "megatron.core.transformer.transformer_layer:TransformerLayer.__init__",
        {
            "c6f0dd721ee243d5": "0.14.0",
            "d3c7579db97cc60e": "0.15.3",
            "ab15e1d540a477e3": "0.16.1",
            "e50425622782aa1a": "0.17.1",
            "248526192fc53ae9": "0.18.2",
            "80e601dfb8d54b08": "0.19.0, 0.19.2",
            "79277a589cb93185": "main",
        },
    ),
    "block": Target(
        "megatron.core.transformer.transformer_block:TransformerBlock.__init__",
        {
            "2d6488785d2d2a12": "0.14.0",
            "8ac3a4420885f5be": "0.15.3",
            "f01bec633f84f4d8": "0.16.1",
            "03019aa6d3539499": "0.17.1, 0.18.2, 0.19.0, 0.19.2",
            "a0789e2b7940d3f8": "main",
        },
    ),
    "mtp": Target(
        "megatron.core.transformer.multi_token_prediction:MultiTokenPredictionLayer.__init__",
        {
            "63aa0181f0f4d276": "0.14.0",
            "e70e237aaf4e59af": "0.15.3",
            "b235eaa5447b5803": "0.16.1",
            "b53843abe6cba2ec": "0.17.1",
            "12d96291a444e6fe": "0.18.2, 0.19.0, 0.19.2",
            "5359c20847e79271": "main",
        },
    ),
    "mamba_stack": Target(
        "megatron.core.ssm.mamba_block:MambaStack.__init__",
        {
            "b815ae90de3c14c7": "0.14.0",
            "98c8c1cc3fabae5b": "0.15.3",
            "af27b914d4aa88fa": "0.16.1",
            "7e459f732e0eeab6": "0.17.1",
        },
    ),
    "hybrid_stack": Target(
        "megatron.core.models.hybrid.hybrid_block:HybridStack.__init__",
        {
            "0db5678a6dd5f5e2": "0.18.2",
            "93e8d37748699ff6": "0.19.0, 0.19.2",
            "d60f8228de2c6605": "main",
        },
    ),
    "fused": Target(
        "megatron.core.extensions.transformer_engine:TELayerNormColumnParallelLinear.forward",
        {
            "5c76876f2ad99cc9": "0.14.0, 0.15.3",
            "b55bba7d8480e2f2": "0.16.1, 0.17.1, 0.18.2, 0.19.0, 0.19.2",
            "42eabcd522f3de76": "main",
        },
    ),
    "flags": Target(
        "megatron.training.arguments:add_megatron_arguments",
        {
            "3317a2622778d132": "0.14.0",
            "20e216ec47ccda44": "0.15.3",
            "1f2ef43fce3eacba": "0.16.1, 0.17.1",
            "ae29c970782d41d0": "0.18.2",
            "16fbc976c3946b39": "0.19.0, 0.19.2, main",
        },
    ),
    "config_until_0_17": Target(
        "megatron.training.arguments:core_transformer_config_from_args",
        {
            "ab01e5afec0851a3": "0.14.0",
            "0f888ade4f34e5ca": "0.15.3",
            "d1316accfb29007b": "0.16.1",
            "1a21164e1aa93ce8": "0.17.1",
        },
    ),
    "config": Target(
        "megatron.training.argument_utils:core_transformer_config_from_args",
        {
            "b936a26e8fc86651": "0.18.2",
            "232cfebdfc495690": "0.19.0, 0.19.2, main",
        },
    ),
    "yaml": Target(
        "megatron.training.yaml_arguments:load_yaml",
        {
            "c6a615c10ed442e4": "0.14.0, 0.15.3, 0.16.1, 0.17.1",
            "f8cb9d4e0344afc6": "0.18.2",
            "4664c14e895d1913": "0.19.0, 0.19.2, main",
        },
    ),
    "load_args": Target(
        "megatron.training.checkpointing:load_args_from_checkpoint",
        {
            "5803f7f2eb9c5556": "0.14.0",
            "61eb400cce3c76db": "0.15.3",
            "25ed1e223d821fb5": "0.16.1",
            "f3c31a20316fe81e": "0.17.1",
            "deb382bb857d338b": "0.18.2",
            "fd19c1962b42f5ea": "0.19.0, 0.19.2",
            "cf24618968b6bdfc": "main",
        },
    ),
    "load_base": Target(
        "megatron.training.checkpointing:_load_base_checkpoint",
        {
            "8c92c9144b0a4fbb": "0.14.0",
            "0c81ba6ca7611baf": "0.15.3",
            "e0bf0a0624b11f6d": "0.16.1, 0.17.1",
            "32bdea5769a245b2": "0.18.2",
            "84f32b0c01e91ce6": "0.19.0, 0.19.2",
            "8a45ee49ba555b04": "main",
        },
    ),
}
