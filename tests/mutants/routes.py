"""The ways to build a model under the scheme, and stock, in each framework; the one place that knows the package.

Everything here runs in a process that has imported a framework and not yet the package (see driver.py).
"""

import importlib

import pytest
import torch
from support import families, olmo_models
from support import megatron_tiny as tiny
from support.hooked import known

IDS = torch.randint(3, 60, (2, 12), generator=torch.Generator().manual_seed(1))


class Route:
    """The parts that most frameworks have in common."""

    projections, folded, gain = None, False, "weight"

    def register(self):
        importlib.import_module(f"olmo_lns.integrations.{self.package}").register()

    def blocks(self, model):
        return list(known(model)[0](model))


class Olmo(Route):
    """ai2-olmo, drawn by Mitchell's method: std / sqrt(2 l)."""

    package = "olmo"
    norm, block, model = "olmo.model:RMSLayerNorm", "olmo.model:OLMoSequentialBlock", "olmo.model:OLMo"
    norms, depth = ("attn_norm", "ff_norm"), "each"
    touched = (
        "olmo.model:RMSLayerNorm.forward", "olmo.model:LayerNormBase.build", "olmo.model:OLMoBlock.attention",
        "olmo.model:OLMoBlock.reset_parameters", "olmo.model:OLMoSequentialBlock.__init__",
        "olmo.model:OLMoSequentialBlock.forward", "olmo.model:OLMoSequentialBlock.reset_parameters",
        "olmo.model:OLMo.__init__", "olmo.model:OLMo.reset_parameters", "olmo.config:BaseConfig.load",
    )  # fmt: skip

    def stock(self, kind="rms"):
        return olmo_models.build(layer_norm_type=kind, block_type="sequential", init_fn="mitchell", perturb=False)

    def scheme(self):
        return self.stock("lns_rms")

    def output(self, model):
        return model(IDS).logits


class Megatron(Route):
    """Megatron Core's local spec; residual output projections drawn at std / sqrt(2 L)."""

    package = "megatron"
    norm, block = "torch.nn:RMSNorm", "megatron.core.transformer.transformer_layer:TransformerLayer"
    model = "megatron.core.models.gpt.gpt_model:GPTModel"
    norms, depth = ("input_layernorm", "pre_mlp_layernorm"), staticmethod(lambda number, count: 8**0.5)  # L = 4
    touched = (
        f"{block}.__init__", f"{block}._forward_attention", f"{block}._forward_mlp", f"{block}._forward_post_mlp",
        "megatron.core.transformer.transformer_layer:get_transformer_layer_offset",
        "megatron.core.transformer.transformer_block:TransformerBlock.__init__",
        "megatron.core.transformer.transformer_block:TransformerBlock._build_layers",
        "megatron.core.transformer.mlp:MLP.__init__", f"{model}.__init__",
        "megatron.core.fusions.fused_bias_dropout:get_bias_dropout_add",
    )  # fmt: skip

    how: dict = {}  # fields of the config

    def stock(self, config=None):
        return tiny.build(config or tiny.config(**self.how))

    def scheme(self):
        return self.stock(tiny.under(**self.how))

    def output(self, model):
        """The loss; of a pipeline stage, the hidden states of its layers."""
        tokens = tiny.batch()
        if model.pre_process and model.post_process:
            return model(*tiny.inputs(tokens), labels=tokens[:, 1:])
        x = torch.randn(tiny.SEQUENCE, tiny.BATCH, tiny.HIDDEN, generator=torch.Generator().manual_seed(2))
        if not model.pre_process:
            model.decoder.set_input_tensor(x)
        return model.decoder(hidden_states=x, attention_mask=tiny.inputs(tokens)[2])


class MegatronTE(Megatron):
    """Megatron Core's spec for Transformer Engine, whose norms are inside the linear layers: the reference is folded."""

    norm = "megatron.core.extensions.transformer_engine:TELayerNormColumnParallelLinear"
    norms, folded, gain = ("self_attention.linear_qkv", "mlp.linear_fc1"), True, "layer_norm_weight"

    def stock(self, config=None):
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
        from megatron.core.transformer.dot_product_attention import DotProductAttention

        spec = get_gpt_layer_with_transformer_engine_spec()
        spec.submodules.self_attention.submodules.core_attention = DotProductAttention  # TE's runs on GPUs only
        return tiny.build(config or tiny.config(), spec)


class Transformers(Route):
    """A family of transformers; Llama draws without a depth factor."""

    package, kind, depth = "transformers", "llama", None
    norm = "transformers.models.llama.modeling_llama:LlamaRMSNorm"
    block = "transformers.models.llama.modeling_llama:LlamaDecoderLayer"
    model = "transformers.models.llama.modeling_llama:LlamaForCausalLM"
    norms, path = ("input_layernorm", "post_attention_layernorm"), "model.layers"
    touched = (
        f"{norm}.forward", f"{block}.__init__", f"{block}.forward",
        "transformers.models.llama.modeling_llama:LlamaModel.__init__",
        "transformers.models.llama.modeling_llama:LlamaForCausalLM.__init__",
        "transformers.models.llama.modeling_llama:LlamaAttention.forward",
        "transformers.models.llama.modeling_llama:LlamaMLP.forward",
    )  # fmt: skip

    def stock(self):
        torch.manual_seed(0)
        module, _, name = self.model.partition(":")
        return getattr(importlib.import_module(module), name)(families.config_of(self.kind)).eval()

    def scheme(self):
        from olmo_lns.integrations.transformers import apply

        return apply(self.stock(), "lns")

    def output(self, model):
        return model(input_ids=IDS, use_cache=False).logits

    def blocks(self, model):
        return model.get_submodule(self.path)


class Gpt2(Transformers):
    """GPT-2, whose residual output projections are drawn at std / sqrt(2 L)."""

    kind, depth, norms, path = "gpt2", "all", ("ln_1", "ln_2"), "transformer.h"
    model = "transformers.models.gpt2.modeling_gpt2:GPT2LMHeadModel"
    projections = ("attn.c_proj", "mlp.c_proj")


class OlmoCore(Route):
    """ai2-olmo-core; init_method normal has no depth factor."""

    package = "olmo_core"
    norm, block = "olmo_core.nn.layer_norm:RMSNorm", "olmo_core.nn.transformer.block:TransformerBlock"
    model = "olmo_core.nn.transformer.model:Transformer"
    norms, depth = ("attention_norm", "feed_forward_norm"), None
    touched = (
        f"{norm}.forward", f"{block}.__init__", f"{block}.forward", f"{model}.__init__", f"{model}.init_weights",
        "olmo_core.nn.transformer.config:TransformerBlockConfig.build", "olmo_core.config:Config.from_dict",
        "olmo_core.train.checkpoint:Checkpointer.load", "olmo_core.train.checkpoint:Checkpointer.save",
    )  # fmt: skip

    def _config(self):
        from olmo_core.nn.transformer import TransformerConfig

        return TransformerConfig.llama_like(d_model=32, vocab_size=64, n_layers=4, n_heads=4)

    def _build(self, config):
        model = config.build(init_device="meta")
        torch.manual_seed(0)
        model.init_weights(max_seq_len=12, max_local_microbatch_size=24, device=torch.device("cpu"))
        return model

    def stock(self):
        return self._build(self._config())

    def scheme(self):
        from olmo_lns.olmo_core import apply

        return self._build(apply(self._config()))

    def output(self, model):
        return model(IDS)


class Torchtitan(Route):
    """torchtitan's debug model of Llama 3. Output projections, and w3, are drawn at std / sqrt(2 l)."""

    package = "torchtitan"
    norm, block = "torchtitan.models.common.nn_modules:RMSNorm", "torchtitan.models.llama3.model:Llama3TransformerBlock"
    model = "torchtitan.models.llama3.model:Llama3Model"
    norms, depth = ("attention_norm", "ffn_norm"), "each"
    projections = ("attention.wo", "feed_forward.w2", "feed_forward.w3")
    touched = (
        f"{block}.__init__", f"{block}.forward", "torchtitan.models.common.decoder:Decoder.__init__",
        "torchtitan.models.common.decoder:Decoder.init_states", "torchtitan.trainer:Trainer.train",
        "torchtitan.components.checkpointer.dcp:CheckpointManager.dcp_save",
        "torchtitan.components.checkpointer.dcp:CheckpointManager.dcp_load",
    )  # fmt: skip

    def stock(self, *overrides):
        from support import torchtitan_models

        torchtitan_models.eager_attention(pytest.MonkeyPatch())
        return torchtitan_models.with_weights(torchtitan_models.build("llama3", *overrides))

    def scheme(self):
        return self.stock("olmo_lns.torchtitan.lns")

    def output(self, model):
        positions = torch.arange(16)
        tokens, positions = (positions * 7 % 100)[None], positions[None]
        if hasattr(type(model).Config, "max_context_length"):  # newer versions take one packed sequence
            tokens, positions = tokens[0], positions[0]
        return model(tokens, positions, model.get_attention_masks(positions))

    def blocks(self, model):
        return list(model.layers.values())


FRAMEWORKS = {
    "olmo": Olmo,
    "megatron": Megatron,
    "megatron_te": MegatronTE,
    "transformers": Transformers,
    "gpt2": Gpt2,
    "olmo_core": OlmoCore,
    "torchtitan": Torchtitan,
}
