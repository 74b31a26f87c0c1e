# ruff: noqa: E501 - a row is a line of a table
"""Language, speech, protein, medical and multi-modal models of PyPI packages."""

from __future__ import annotations

import sys
import types

import torch
from expectation import ACCEPTED, NORMS, REFUSED, row, sites
from torch import nn

IDS = torch.randint(4, 30, (2, 8), generator=torch.Generator().manual_seed(0))
LITGPT = "litgpt/model.py"


def litgpt(name: str, **settings) -> nn.Module:
    """Build litgpt's GPT with four small blocks of one family."""
    from litgpt import GPT, Config

    small = {"n_layer": 4, "n_embd": 32, "n_head": 4, "vocab_size": 64, "padded_vocab_size": 64, "block_size": 16}
    small |= {"intermediate_size": 64, "head_size": 8}
    return GPT(Config.from_name(name, **(small | settings)))


TWO = sites("transformer.h.{}.norm_1 transformer.h.{}.norm_2", 4)
for name, settings, why, line in (
    ("Llama-2-7b-hf", {"n_query_groups": 4}, "The attention reads norm_1 of the stream and the MLP reads norm_2 of it.", "x_normed = self.norm_1(x)"),
    ("pythia-14m", {}, "A parallel block: both branches read the stream that enters, each through a norm of its own.", "x_normed = self.norm_2(x)"),
    ("Gemma-2b", {"n_query_groups": 1}, "A Pre-LN block whose gains are stored less one.", "x_normed = self.norm_1(x)"),
    ("OLMo-1B-hf", {"n_query_groups": 4}, "A Pre-LN block whose LayerNorm is litgpt's own choice for a norm without gain.", "x_normed = self.norm_1(x)"),
):  # fmt: skip

    @row(f"litgpt {name}", "package:litgpt", ACCEPTED, sites=TWO, why=why, code=(LITGPT, line))
    def _(name=name, settings=settings):
        return litgpt(name, **settings), IDS


@row(
    "litgpt falcon-7b",
    "package:litgpt",
    ACCEPTED,
    sites=sites("transformer.h.{}.norm_1", 4),
    why="A parallel block: attention and MLP share norm_1, and are two outputs of which one mixes positions.",
    code=(LITGPT, "if not self.config.shared_attention_norm:"),
)
def _():
    return litgpt("falcon-7b", n_query_groups=1), IDS


class Wrapped(nn.Module):
    """A wrapper of a block, as activation checkpointing and pipelines make them."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args, **keywords):
        return self.inner(*args, **keywords)


@row(
    "litgpt falcon-7b, each block in a wrapper",
    "package:litgpt",
    ACCEPTED,
    sites=sites("transformer.h.{}.inner.norm_1", 4),
    why="A parallel block that shares norm_1, one module deeper.",
    code=(LITGPT, "if not self.config.shared_attention_norm:"),
)
def _():
    model = litgpt("falcon-7b", n_query_groups=1)
    model.transformer.h = nn.ModuleList(Wrapped(block) for block in model.transformer.h)
    return model, IDS


@row(
    "litgpt Llama-2-7b-hf, each block in a wrapper",
    "package:litgpt",
    ACCEPTED,
    sites=sites("transformer.h.{}.inner.norm_1 transformer.h.{}.inner.norm_2", 4),
    why="A Pre-LN block, one module deeper.",
    code=(LITGPT, "x_normed = self.norm_2(x)"),
)
def _():
    model = litgpt("Llama-2-7b-hf", n_query_groups=4)
    model.transformer.h = nn.ModuleList(Wrapped(block) for block in model.transformer.h)
    return model, IDS


for name, why, line in (
    ("OLMo-2-1124-7B", "Reordered norms: norm_1 and norm_2 are identities, and the norms come after the branches.", "nn.Identity() if not config.norm_1"),
    ("Gemma-2-2b", "Sandwich-LN: post_attention_norm and post_mlp_norm end the branches.", "attention_output = self.post_attention_norm(attention_output)"),
):  # fmt: skip

    @row(f"litgpt {name}", "package:litgpt", REFUSED, why=why, code=(LITGPT, line))
    def _(name=name):
        return litgpt(name, n_query_groups=4), IDS


TUNE = "torchtune/modules/transformer.py"
TUNE_SMALL = {"vocab_size": 64, "num_layers": 4, "num_heads": 4, "num_kv_heads": 2, "embed_dim": 32, "max_seq_len": 16}


@row(
    "torchtune Llama 3",
    "package:torchtune",
    ACCEPTED,
    sites=sites("layers.{}.sa_norm layers.{}.mlp_norm", 4),
    why="The attention reads sa_norm of the stream and the MLP reads mlp_norm of it.",
    code=(TUNE, "mlp_out = self.mlp(self.mlp_norm(h))"),
)
def _():
    from torchtune.models.llama3._component_builders import llama3

    return llama3(**TUNE_SMALL), IDS


@row(
    "torchtune Qwen 2",
    "package:torchtune",
    ACCEPTED,
    sites=sites("layers.{}.sa_norm layers.{}.mlp_norm", 4),
    why="The attention reads sa_norm of the stream and the MLP reads mlp_norm of it.",
    code=(TUNE, "h = self.sa_norm(x)"),
)
def _():
    from torchtune.models.qwen2._component_builders import qwen2

    return qwen2(**TUNE_SMALL, intermediate_dim=64), IDS


@row(
    "torchtune Gemma 2",
    "package:torchtune",
    REFUSED,
    why="Sandwich-LN: sa_scale and mlp_scale are norms at the end of the branches.",
    code=("torchtune/models/gemma2/_component_builders.py", "sa_scale=GemmaRMSNorm(embed_dim, eps=norm_eps)"),
)
def _():
    from torchtune.models.gemma2._component_builders import gemma2

    return gemma2(**TUNE_SMALL, head_dim=8, intermediate_dim=64, query_pre_attn_scalar=8), IDS


@row(
    "torchtitan Llama 3",
    "package:torchtitan",
    ACCEPTED,
    sites=sites("layers.{}.attention_norm layers.{}.ffn_norm", 6),
    why="The attention reads attention_norm of the stream and the feed-forward reads ffn_norm of it.",
    code=(
        "torchtitan/models/llama3/model.py",
        "h = x + self.attention(self.attention_norm(x), attention_masks, positions)",
    ),
)
def _():
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.llama3 import llama3_configs

    config = llama3_configs["debugmodel"]("flex")
    for layer in config.layers:  # flex attention needs a compiler
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    model = config.build()
    model.init_states(buffer_device=torch.device("cpu"))
    return model, IDS


WHISPER = "whisper/model.py"


def whisper() -> nn.Module:
    """Build a small Whisper."""
    from whisper.model import ModelDimensions, Whisper

    return Whisper(ModelDimensions(8, 8, 32, 4, 4, 64, 16, 32, 4, 4))


@row(
    "whisper encoder",
    "package:openai-whisper",
    ACCEPTED,
    sites=sites("blocks.{}.attn_ln blocks.{}.mlp_ln", 4),
    why="The attention reads attn_ln of the stream and the MLP reads mlp_ln of it.",
    code=(WHISPER, "x = x + self.mlp(self.mlp_ln(x))"),
)
def _():
    return whisper().encoder, torch.randn(2, 8, 16)


@row(
    "whisper",
    "package:openai-whisper",
    REFUSED,
    why="The decoder's blocks have a third norm before cross-attention; scaling the encoder alone would be half of it.",
    code=(WHISPER, "x = x + self.cross_attn(self.cross_attn_ln(x), xa, kv_cache=kv_cache)[0]"),
)
def _():
    return whisper(), (torch.randn(2, 8, 16), IDS)


@row(
    "ESM-2",
    "package:fair-esm",
    ACCEPTED,
    sites=sites("layers.{}.self_attn_layer_norm layers.{}.final_layer_norm", 4),
    why="The attention reads self_attn_layer_norm of the stream; final_layer_norm, despite its name, is before the MLP.",
    code=("esm/modules.py", "x = self.final_layer_norm(x)"),
)
def _():
    from esm.model.esm2 import ESM2

    return ESM2(num_layers=4, embed_dim=32, attention_heads=4, token_dropout=False), IDS


@row(
    "ESM MSA Transformer",
    "package:fair-esm",
    REFUSED,
    why="A block has three branches, for rows, columns and the MLP, each with a norm.",
    code=("esm/modules.py", "x, column_attn = self.column_self_attention("),
)
def _():
    import argparse

    from esm.data import Alphabet
    from esm.model.msa_transformer import MSATransformer

    settings = argparse.Namespace(
        layers=4, embed_dim=32, ffn_embed_dim=64, attention_heads=4, dropout=0.0, attention_dropout=0.0,
        activation_dropout=0.0, max_tokens=2**14, embed_positions_msa=True, max_positions=64, logit_bias=False,
        max_tokens_per_msa=2**14, embed_positions_msa_dim=32,
    )  # fmt: skip
    return MSATransformer(settings, Alphabet.from_architecture("msa_transformer")), IDS[None]


MONAI = "monai/networks/blocks/transformerblock.py"


@row(
    "monai ViT",
    "package:monai",
    ACCEPTED,
    sites=sites("blocks.{}.norm1 blocks.{}.norm2", 4),
    why="The attention reads norm1 of the stream and the MLP reads norm2 of it; norm_cross_attn does not run.",
    code=(MONAI, "x = x + self.mlp(self.norm2(x))"),
)
def _():
    from monai.networks.nets import ViT

    model = ViT(
        in_channels=1, img_size=(16, 16, 16), patch_size=8, hidden_size=32, mlp_dim=64, num_layers=4, num_heads=4
    )
    return model, torch.randn(2, 1, 16, 16, 16)


@row(
    "monai DecoderOnlyTransformer",
    "package:monai",
    ACCEPTED,
    sites=sites("blocks.{}.norm1 blocks.{}.norm2", 4),
    why="The attention reads norm1 of the stream and the MLP reads norm2 of it; norm_cross_attn does not run.",
    code=(MONAI, "x = x + self.attn(self.norm1(x), attn_mask=attn_mask)"),
)
def _():
    from monai.networks.nets import DecoderOnlyTransformer

    return DecoderOnlyTransformer(64, 16, 32, 4, 4), IDS


@row(
    "monai DecoderOnlyTransformer with cross-attention",
    "package:monai",
    REFUSED,
    why="A third branch attends to the context after norm_cross_attn, and the method defines no third norm.",
    code=(MONAI, "x = x + self.cross_attn(self.norm_cross_attn(x), context=context)"),
)
def _():
    from monai.networks.nets import DecoderOnlyTransformer

    model = DecoderOnlyTransformer(64, 16, 32, 4, 4, with_cross_attention=True)
    return model, {"x": IDS, "context": torch.randn(2, 5, 32)}


def fairscale() -> None:
    """Stand in for fairscale where it is missing: torchscale imports it for wrappers that are not used here."""
    try:
        import fairscale.nn  # noqa: F401
    except ImportError:
        package, module = types.ModuleType("fairscale"), types.ModuleType("fairscale.nn")
        module.checkpoint_wrapper = module.wrap = lambda wrapped, *args, **keywords: wrapped
        package.nn, package.__path__ = module, []
        sys.modules |= {"fairscale": package, "fairscale.nn": module}


def scaled_up(kind: str, **keywords):
    """Build a decoder of torchscale with an embedding of its own."""
    fairscale()
    from torchscale.architecture import config, decoder, retnet

    small = {"decoder_embed_dim": 32, "decoder_ffn_embed_dim": 64, "decoder_layers": 4, "vocab_size": 64}
    if kind == "decoder":
        settings = config.DecoderConfig(**small, decoder_attention_heads=4, **keywords)
        return decoder.Decoder(settings, embed_tokens=nn.Embedding(64, 32))
    settings = config.RetNetConfig(**small, decoder_value_embed_dim=32, decoder_retention_heads=4, **keywords)
    return retnet.RetNetDecoder(settings, embed_tokens=nn.Embedding(64, 32))


@row(
    "torchscale decoder",
    "package:torchscale",
    ACCEPTED,
    sites=sites("layers.{}.self_attn_layer_norm layers.{}.final_layer_norm", 4),
    why="Pre-LN; the further norms of Magneto are inside the branches, before their last projections.",
    code=("torchscale/architecture/decoder.py", "x = self.final_layer_norm(x)"),
)
def _():
    return scaled_up("decoder"), lambda model: model(IDS)[0]


@row(
    "torchscale decoder, DeepNorm",
    "package:torchscale",
    REFUSED,
    why="Post-LN with a scaled residual path.",
    code=("torchscale/architecture/decoder.py", "return residual * self.alpha + x"),
)
def _():
    model = scaled_up("decoder", deepnorm=True, subln=False, decoder_normalize_before=False)
    return model, lambda model: model(IDS)[0]


@row(
    "torchscale RetNet",
    "package:torchscale",
    ACCEPTED,
    sites=sites("layers.{}.retention_layer_norm layers.{}.final_layer_norm", 4),
    why="The retention reads retention_layer_norm of the stream and the feed-forward reads final_layer_norm of it.",
    code=("torchscale/architecture/retnet.py", "x = self.retention_layer_norm(x)"),
)
def _():
    return scaled_up("retnet"), lambda model: model(IDS)[0]


CLIP = "open_clip/transformer.py"
RES = "resblocks.{}.ln_1 resblocks.{}.ln_2"


def clip() -> nn.Module:
    """Build a small CLIP of open_clip, both of whose towers have four blocks."""
    from open_clip.model import CLIP as Model

    vision = {"image_size": 32, "layers": 4, "width": 32, "head_width": 8, "patch_size": 8}
    text = {"context_length": 8, "vocab_size": 64, "width": 32, "heads": 4, "layers": 4}
    return Model(32, vision, text)


CLIP_EXAMPLE = {"image": torch.ones(2, 3, 32, 32).cumsum(-1) / 32, "text": IDS}


@row(
    "open_clip CLIP",
    "package:open_clip_torch",
    NORMS,
    sites=sites(" ".join(f"visual.transformer.{name}" for name in RES.split()), 4),
    why="Two towers: only the owner can say which one is meant. Here it is the image's.",
    code=(CLIP, "x = q_x + self.ls_1(self.attention(q_x=self.ln_1(q_x)"),
)
def _():
    return clip(), CLIP_EXAMPLE


@row(
    "open_clip CLIP, the text tower given",
    "package:open_clip_torch",
    ACCEPTED,
    sites=sites(" ".join(f"transformer.{name}" for name in RES.split()), 4),
    blocks="transformer.resblocks",
    why="Two towers with streams of their own: blocks= says which one is meant.",
    code=(CLIP, "x = q_x + self.ls_1(self.attention(q_x=self.ln_1(q_x)"),
)
def _():
    return clip(), CLIP_EXAMPLE


@row(
    "open_clip VisionTransformer",
    "package:open_clip_torch",
    ACCEPTED,
    sites=sites(" ".join(f"transformer.{name}" for name in RES.split()), 4),
    why="The attention reads ln_1 of the stream and the MLP reads ln_2 of it.",
    code=(CLIP, "x = x + self.ls_2(self.mlp(self.ln_2(x)))"),
)
def _():
    return clip().visual, CLIP_EXAMPLE["image"]


@row(
    "segment-anything image encoder",
    "package:segment-anything",
    ACCEPTED,
    sites=sites("blocks.{}.norm1 blocks.{}.norm2", 4),
    why="The windowed attention reads norm1 of the stream and the MLP reads norm2 of it, in (batch, height, width, channels).",
    code=("segment_anything/modeling/image_encoder.py", "x = x + self.mlp(self.norm2(x))"),
)
def _():
    from segment_anything.modeling import ImageEncoderViT

    model = ImageEncoderViT(32, 8, embed_dim=32, depth=4, num_heads=4, out_chans=16, window_size=2, use_rel_pos=True)
    return model, torch.randn(2, 3, 32, 32)


# transformers has an integration of its own; these rows go past it or try what it must not do.


class Wrapper(nn.Module):
    """A model of one's own that holds a model of transformers."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, ids):
        return self.inner(input_ids=ids, use_cache=False).logits


@row(
    "transformers GPT-2 inside a wrapper",
    "package:transformers",
    ACCEPTED,
    sites=sites("inner.transformer.h.{}.ln_1 inner.transformer.h.{}.ln_2", 4),
    why="A Pre-LN stack inside a module of one's own; its weights, scaled initialization included, stay as they are.",
    code=("transformers/models/gpt2/modeling_gpt2.py", "hidden_states = self.ln_1(hidden_states)"),
)
def _():
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=64, n_positions=16, n_embd=32, n_layer=4, n_head=4, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0
    )
    return Wrapper(GPT2LMHeadModel(config)), IDS


@row(
    "transformers Llama whose k_proj was drawn at a quarter",
    "package:transformers",
    ACCEPTED,
    sites=sites("model.layers.{}.input_layernorm model.layers.{}.post_attention_layernorm", 8),
    why="k_proj is no residual output projection, so its owner's choice of a standard deviation stays.",
    code=("transformers/models/llama/modeling_llama.py", "hidden_states = self.input_layernorm(hidden_states)"),
)
def _():
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=8, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=16,
    ))  # fmt: skip
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.k_proj.weight.mul_(0.25)
    return model, {"input_ids": IDS, "use_cache": False}


@row(
    "transformers Llama whose up_proj was drawn at 1/sqrt(2 L)",
    "package:transformers",
    ACCEPTED,
    sites=sites("model.layers.{}.input_layernorm model.layers.{}.post_attention_layernorm", 8),
    why="up_proj is no residual output projection, so its owner's choice of a standard deviation stays.",
    code=("transformers/models/llama/modeling_llama.py", "hidden_states = self.mlp(hidden_states)"),
)
def _():
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=8, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=16,
    ))  # fmt: skip
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.up_proj.weight.mul_(0.25)
    return model, {"input_ids": IDS, "use_cache": False}


@row(
    "transformers GPT-J inside a wrapper",
    "package:transformers",
    ACCEPTED,
    sites=sites("inner.transformer.h.{}.ln_1", 4),
    why="A parallel block: attention and MLP share ln_1, and are two outputs of which one mixes positions.",
    code=("transformers/models/gptj/modeling_gptj.py", "hidden_states = self.ln_1(hidden_states)"),
)
def _():
    from transformers import GPTJConfig, GPTJForCausalLM

    config = GPTJConfig(vocab_size=64, n_positions=16, n_embd=32, n_layer=4, n_head=4, rotary_dim=4)
    return Wrapper(GPTJForCausalLM(config)), IDS


@row(
    "transformers Phi inside a wrapper",
    "package:transformers",
    ACCEPTED,
    sites=sites("inner.model.layers.{}.input_layernorm", 4),
    why="A parallel block: attention and MLP share input_layernorm, and are two outputs of which one mixes positions.",
    code=("transformers/models/phi/modeling_phi.py", "hidden_states = self.input_layernorm(hidden_states)"),
)
def _():
    from transformers import PhiConfig, PhiForCausalLM

    config = PhiConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4,
        max_position_embeddings=16,
    )  # fmt: skip
    return Wrapper(PhiForCausalLM(config)), IDS


@row(
    "transformers OPT inside a wrapper, Post-LN",
    "package:transformers",
    REFUSED,
    why="Post-LN: with do_layer_norm_before=False (OPT-350m) the norms normalize the stream itself.",
    code=("transformers/models/opt/modeling_opt.py", "if not self.do_layer_norm_before:"),
)
def _():
    from transformers import OPTConfig, OPTForCausalLM

    config = OPTConfig(
        vocab_size=64, hidden_size=32, ffn_dim=64, num_hidden_layers=4, num_attention_heads=4, max_position_embeddings=16,
        dropout=0.0, do_layer_norm_before=False, word_embed_proj_dim=32,
    )  # fmt: skip
    return Wrapper(OPTForCausalLM(config)), IDS


@row(
    "transformers Llama inside a wrapper, generation",
    "package:transformers",
    REFUSED,
    why="The stack runs several times in one forward of the example.",
    code=("transformers/models/llama/modeling_llama.py", "hidden_states = self.input_layernorm(hidden_states)"),
)
def _():
    from transformers import LlamaConfig, LlamaForCausalLM

    model = Wrapper(LlamaForCausalLM(LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=16,
    )))  # fmt: skip
    return model, lambda m: torch.cat([m(IDS[:, :4]), m(IDS[:, 1:5]), m(IDS[:, 2:6])])


DIFFUSERS = "diffusers/models/transformers/"


@row(
    "diffusers QwenImageTransformer2DModel",
    "package:diffusers",
    REFUSED,
    why="Two streams: image and text have norms and branches of their own in each block.",
    code=(DIFFUSERS + "transformer_qwenimage.py", "txt_normed = self.txt_norm1(encoder_hidden_states)"),
)
def _():
    from diffusers import QwenImageTransformer2DModel

    model = QwenImageTransformer2DModel(
        patch_size=2, in_channels=16, out_channels=4, num_layers=4, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=16, axes_dims_rope=(4, 6, 6),
    )  # fmt: skip
    return model, {
        "hidden_states": torch.randn(1, 4, 16), "encoder_hidden_states": torch.randn(1, 5, 16),
        "encoder_hidden_states_mask": torch.ones(1, 5, dtype=torch.bool), "timestep": torch.tensor([0.5]),
        "img_shapes": [[(1, 2, 2)]], "return_dict": False,
    }  # fmt: skip


def flux(double: int, single: int):
    """Build Flux with some blocks of two streams and some of one, and an example."""
    from diffusers import FluxTransformer2DModel

    model = FluxTransformer2DModel(
        patch_size=1, in_channels=16, num_layers=double, num_single_layers=single, attention_head_dim=16,
        num_attention_heads=2, joint_attention_dim=16, pooled_projection_dim=16, axes_dims_rope=(4, 6, 6),
    )  # fmt: skip
    return model, {
        "hidden_states": torch.randn(1, 4, 16), "encoder_hidden_states": torch.randn(1, 5, 16),
        "pooled_projections": torch.randn(1, 16), "timestep": torch.tensor([0.5]), "img_ids": torch.zeros(4, 3),
        "txt_ids": torch.zeros(5, 3), "return_dict": False,
    }  # fmt: skip


@row(
    "diffusers Flux, double blocks",
    "package:diffusers",
    REFUSED,
    why="Two streams: norm1 reads the image's and norm1_context the text's.",
    code=(
        DIFFUSERS + "transformer_flux.py",
        "norm_encoder_hidden_states, c_gate_msa, c_shift_mlp, c_scale_mlp, c_gate_mlp = self.norm1_context(",
    ),
)
def _():
    return flux(4, 0)


@row(
    "diffusers Flux, double and single blocks",
    "package:diffusers",
    REFUSED,
    why="Two streams in the first blocks; the single blocks alone are a part of the depth.",
    code=(
        DIFFUSERS + "transformer_flux.py",
        "norm_encoder_hidden_states, c_gate_msa, c_shift_mlp, c_scale_mlp, c_gate_mlp = self.norm1_context(",
    ),
)
def _():
    return flux(2, 4)


@row(
    "diffusers Stable Diffusion 3",
    "package:diffusers",
    REFUSED,
    why="Two streams: norm1 reads the image's and norm1_context the text's.",
    code=(
        "diffusers/models/attention.py",
        "norm_encoder_hidden_states, c_gate_msa, c_shift_mlp, c_scale_mlp, c_gate_mlp = self.norm1_context(",
    ),
)
def _():
    from diffusers import SD3Transformer2DModel

    model = SD3Transformer2DModel(
        sample_size=8, patch_size=2, in_channels=4, num_layers=4, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=16, caption_projection_dim=32, pooled_projection_dim=16, out_channels=4, pos_embed_max_size=8,
    )  # fmt: skip
    return model, {
        "hidden_states": torch.randn(1, 4, 8, 8), "encoder_hidden_states": torch.randn(1, 5, 16),
        "pooled_projections": torch.randn(1, 16), "timestep": torch.tensor([3.0]), "return_dict": False,
    }  # fmt: skip


@row(
    "diffusers PriorTransformer",
    "package:diffusers",
    ACCEPTED,
    sites=sites("transformer_blocks.{}.norm1 transformer_blocks.{}.norm3", 4),
    why="The attention reads norm1 of the stream and the MLP reads norm3 of it; there is no cross-attention and no norm2.",
    code=("diffusers/models/attention.py", "norm_hidden_states = self.norm3(hidden_states)"),
)
def _():
    from diffusers import PriorTransformer

    model = PriorTransformer(
        num_attention_heads=2, attention_head_dim=16, num_layers=4, embedding_dim=16, num_embeddings=5
    )
    return model, {
        "hidden_states": torch.randn(2, 16), "timestep": torch.tensor([3.0, 4.0]), "proj_embedding": torch.randn(2, 16),
        "encoder_hidden_states": torch.randn(2, 5, 16), "return_dict": False,
    }  # fmt: skip


@row(
    "diffusers LTX-Video",
    "package:diffusers",
    REFUSED,
    why="Cross-attention reads the stream without a norm.",
    code=(DIFFUSERS + "transformer_ltx.py", "attn_hidden_states = self.attn2("),
)
def _():
    from diffusers import LTXVideoTransformer3DModel

    model = LTXVideoTransformer3DModel(
        in_channels=8, out_channels=8, num_attention_heads=2, attention_head_dim=16, cross_attention_dim=32, num_layers=4,
        caption_channels=16,
    )  # fmt: skip
    return model, {
        "hidden_states": torch.randn(1, 8, 8), "encoder_hidden_states": torch.randn(1, 5, 16), "timestep": torch.tensor([3]),
        "encoder_attention_mask": torch.ones(1, 5), "num_frames": 2, "height": 2, "width": 2, "return_dict": False,
    }  # fmt: skip


@row(
    "diffusers Sana",
    "package:diffusers",
    REFUSED,
    why="Cross-attention reads the stream without a norm.",
    code=(DIFFUSERS + "sana_transformer.py", "attn_output = self.attn2("),
)
def _():
    from diffusers import SanaTransformer2DModel

    model = SanaTransformer2DModel(
        in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=16, num_layers=4,
        num_cross_attention_heads=2, cross_attention_head_dim=16, cross_attention_dim=32, caption_channels=16, sample_size=8,
    )  # fmt: skip
    return model, {
        "hidden_states": torch.randn(1, 4, 8, 8), "encoder_hidden_states": torch.randn(1, 5, 16),
        "timestep": torch.tensor([3]), "return_dict": False,
    }  # fmt: skip
