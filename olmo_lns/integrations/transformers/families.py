"""The transformers families that are known: where their blocks, norms and branches are. Pure data.

One table for this integration and for the diagnostics. A path with ``|`` names the same thing in two
versions of transformers; the first that a block has is taken.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Mapping

from olmo_lns.schemes import Plan

#: Our model types are transformers' with this in front: ``lns_llama``.
PREFIX = "lns_"
#: Both ends of the supported range, where tests/integrations/transformers were run.
VERIFIED = "4.48.0 and 5.23.0"


@dataclass(frozen=True)
class SubLayer:
    """Paths inside a block.

    :param norm: the norm that the family has for the sub-layer. :param branch: the module whose output (or first
        output) is the branch. :param output: its last projection, whose initialization some families scale and into
        which a factor of the branch is folded. :param readers: the projections that read the norm, into which a factor
        is folded where the norm has no gain.
    """

    norm: str
    branch: str
    output: str
    readers: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class Family:
    """One ``model_type``.

    :param stem: how its classes begin. :param blocks: path of the list of blocks below ``base_model``.
    :param sub_layers: ``attn`` and ``ff``; none for a family that the diagnostics know and the integration does not.
    :param form: what a block is without a scheme, as a plan.
    :param activation: name of the config's activation function.
    :param scaled: its residual output projections are drawn times 1/sqrt(2·L).
    :param masked: an encoder whose loss is that of masked tokens.
    """

    model_type: str
    stem: str
    blocks: str
    sub_layers: Mapping[str, SubLayer]
    form: Plan = field(default_factory=Plan)
    activation: str = "hidden_act"
    scaled: bool = False
    masked: bool = False


_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_GATE_UP = ("mlp.gate_proj", "mlp.up_proj")
_LLAMA = dict(
    attn=SubLayer("input_layernorm", "self_attn", "self_attn.o_proj", _QKV),
    ff=SubLayer("post_attention_layernorm", "mlp", "mlp.down_proj", _GATE_UP),
)
#: x + N(f(x)): the norm sits on the branch.
_OLMO2 = dict(
    attn=SubLayer("post_attention_layernorm", "post_attention_layernorm", "self_attn.o_proj"),
    ff=SubLayer("post_feedforward_layernorm", "post_feedforward_layernorm", "mlp.down_proj"),
)
_NORM_ON_BRANCH = Plan(pre=False, branch=True)
_GPT2 = dict(
    attn=SubLayer("ln_1", "attn", "attn.c_proj", ("attn.c_attn",)),
    ff=SubLayer("ln_2", "mlp", "mlp.c_proj", ("mlp.c_fc",)),
)
_NEOX = dict(
    attn=SubLayer("input_layernorm", "attention", "attention.dense", ("attention.query_key_value",)),
    ff=SubLayer("post_attention_layernorm", "mlp", "mlp.dense_4h_to_h", ("mlp.dense_h_to_4h",)),
)
_VIT = dict(
    attn=SubLayer("layernorm_before", "attention", "attention.o_proj|attention.output.dense"),
    ff=SubLayer("layernorm_after", "mlp|output.dense", "mlp.fc2|output.dense"),
)
_DINO = dict(
    attn=SubLayer("norm1", "attention", "attention.o_proj|attention.output.dense"),
    ff=SubLayer("norm2", "mlp", "mlp.fc2|mlp.down_proj|mlp.weights_out"),
)

_ROWS = (
    Family("llama", "Llama", "layers", _LLAMA),
    Family("qwen2", "Qwen2", "layers", _LLAMA),
    Family("qwen3", "Qwen3", "layers", _LLAMA),
    Family("mistral", "Mistral", "layers", _LLAMA),
    Family("olmo", "Olmo", "layers", _LLAMA),
    Family("olmo2", "Olmo2", "layers", _OLMO2, form=_NORM_ON_BRANCH),
    Family("olmo3", "Olmo3", "layers", _OLMO2, form=_NORM_ON_BRANCH),
    Family("gpt2", "GPT2", "h", _GPT2, activation="activation_function", scaled=True),
    Family("gpt_neox", "GPTNeoX", "layers", _NEOX),
    Family("vit", "ViT", "layers|encoder.layer", _VIT),
    Family("dinov2", "Dinov2", "layers|encoder.layer", _DINO),
    Family("bert", "Bert", "encoder.layer", {}, form=Plan(pre=False, post=True), masked=True),
)
FAMILIES: Mapping[str, Family] = {family.model_type: family for family in _ROWS}


def stock_type(model_type: str) -> str:
    """``llama`` for ``llama`` and for ``lns_llama``."""
    return model_type.removeprefix(PREFIX)


def family_of(model: Any) -> Family | None:
    """The family of a transformers model, by its config; None for any other model."""
    kind = getattr(getattr(model, "config", None), "model_type", None)
    return FAMILIES.get(stock_type(kind)) if isinstance(kind, str) and hasattr(model, "base_model") else None


def at(module: Any, path: str) -> Any:
    """The module at ``path``, the first of its alternatives that is there; None where none is."""
    for alternative in path.split("|"):
        found = module
        for name in alternative.split("."):
            found = getattr(found, name, None)
        if found is not None:
            return found
    return None
