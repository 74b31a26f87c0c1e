"""For ``--spec support.megatron_hybrid hybrid_stack_spec``: attention and MLP layers of a hybrid model without TE."""

import copy


def attention_and_mlp(layer):
    """The two halves of a transformer layer's spec, each as a layer of its own."""
    from megatron.core.ssm.mlp_layer import MLPLayer
    from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp

    attention, mlp = copy.deepcopy(layer), copy.deepcopy(layer)
    attention.submodules.pre_mlp_layernorm = attention.submodules.mlp = IdentityOp
    attention.submodules.mlp_bda = IdentityFuncOp
    mlp.module = MLPLayer
    mlp.submodules.input_layernorm = mlp.submodules.self_attention = IdentityOp
    mlp.submodules.self_attn_bda = IdentityFuncOp
    return attention, mlp


def _stack_spec():
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    try:
        from megatron.core.models.hybrid import hybrid_block as block

        stack, submodules = block.HybridStack, block.HybridStackSubmodules
    except ImportError:
        from megatron.core.ssm import mamba_block as block

        stack, submodules = block.MambaStack, block.MambaStackSubmodules
    block.TENorm = WrappedTorchNorm  # the class of the final norm, which no spec names
    attention, mlp = attention_and_mlp(get_gpt_layer_local_spec(normalization="RMSNorm"))
    halves = submodules(attention_layer=attention, mlp_layer=mlp)
    return ModuleSpec(module=stack, submodules=halves)


hybrid_stack_spec = _stack_spec()
