"""The one table of the attributes of Megatron's ``TransformerLayer`` that this package reads.

In a checkpoint they are parts of the names of the tensors. This module imports neither torch nor Megatron.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SubLayerNames:
    """The attributes of one sub-layer.

    :param norm: the norm before the sub-layer, if it is a module of the layer.
    :param module: the module of the sub-layer.
    :param may_contain_norm: linear layers in ``module``. One of them contains the norm if ``norm`` is no module.
    :param output: the linear layer in ``module`` whose output is added to the stream.
    """

    norm: str
    module: str
    may_contain_norm: tuple[str, ...]
    output: str


#: Sub-layer -> its attributes.
LAYER = {
    "attn": SubLayerNames("input_layernorm", "self_attention", ("linear_qkv", "linear_qkv_down_proj"), "linear_proj"),
    "ff": SubLayerNames("pre_mlp_layernorm", "mlp", ("linear_fc1",), "linear_fc2"),
}
#: A linear layer that contains a norm has the norm's gain and bias under names that start in this way.
FUSED_NORM = "layer_norm_"
