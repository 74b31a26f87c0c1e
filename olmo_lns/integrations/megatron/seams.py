"""The functions of Megatron that this integration wraps, and the classes of its language models."""

from __future__ import annotations

_CONFIG = "core_transformer_config_from_args"
#: Function of Megatron -> its wrapper in ``wrappers``, and whether a scheme needs it.
WRAPPED = {
    "megatron.core.models.gpt.gpt_model:GPTModel.__init__": ("model_init", True),
    "megatron.core.models.hybrid.hybrid_model:HybridModel.__init__": ("model_init", False),
    "megatron.core.models.mamba.mamba_model:MambaModel.__init__": ("model_init", False),
    "megatron.core.models.bert.bert_model:BertModel.__init__": ("model_init", False),
    "megatron.core.models.T5.t5_model:T5Model.__init__": ("model_init", False),
    f"megatron.training.argument_utils:{_CONFIG}": ("config_from_args", False),  # from 0.18 on
    f"megatron.training.arguments:{_CONFIG}": ("config_from_args", True),  # may hold an import of the wrapped one
    "megatron.training.arguments:add_megatron_arguments": ("add_arguments", True),
    "megatron.training.training:get_model": ("model_built", True),
    "megatron.training.training:setup_model_and_optimizer": ("model_built", True),
    "megatron.training.checkpointing:load_args_from_checkpoint": ("load_args", True),
    "megatron.training.checkpointing:_load_base_checkpoint": ("load_base", True),
    "megatron.core.dist_checkpointing:load": ("load_sharded", False),  # for the next one
    "megatron.post_training.checkpointing:load_modelopt_checkpoint": ("load_modelopt", False),
}
#: Names of the models' classes.
MODELS = {path.split(":")[1].split(".")[0] for path in WRAPPED if path.endswith(".__init__")}
