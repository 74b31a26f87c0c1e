# ruff: noqa: E501 - a row is a line of a table
"""Models of research repositories: DINOv2, MAE, DiT, I-JEPA, Swin, PoolFormer, flash-attn, AudioCraft, Demucs."""

from __future__ import annotations

import sys
import types
from functools import partial

import torch
from expectation import ACCEPTED, NORMS, REFUSED, checkout, load, on_path, row, sites
from torch import nn

from rows.language import xformers

IMAGES = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))


def bare(repository: str, package: str) -> None:
    """Import a package of a checkout without running its __init__, which needs kernels or services."""
    module = types.ModuleType(package)
    module.__path__ = [str(checkout(repository).joinpath(*package.split(".")))]
    sys.modules[package] = module


def dinov2(chunks: int) -> nn.Module:
    """Build DINOv2 with four blocks in some chunks."""
    on_path("facebookresearch/dinov2")
    from dinov2.layers import MemEffAttention, NestedTensorBlock
    from dinov2.models.vision_transformer import DinoVisionTransformer

    return DinoVisionTransformer(
        img_size=32, patch_size=8, embed_dim=32, depth=4, num_heads=4, block_chunks=chunks, init_values=0.5,
        block_fn=partial(NestedTensorBlock, attn_class=MemEffAttention),
    )  # fmt: skip


BLOCK = ("dinov2/layers/block.py", "return self.ls1(self.attn(self.norm1(x)))")
CHUNKS = ("dinov2/models/vision_transformer.py", "self.blocks = nn.ModuleList([BlockChunk(p) for p in chunked_blocks])")
DINO = "facebookresearch/dinov2"


@row(
    "DINOv2 without chunks",
    f"repository:{DINO}",
    ACCEPTED,
    sites=sites("blocks.{}.norm1 blocks.{}.norm2", 4),
    why="The attention reads norm1 of the stream and the MLP reads norm2 of it, each in a function of the block.",
    code=BLOCK,
)
def _():
    return dinov2(0), IMAGES


@row(
    "DINOv2, one chunk of four blocks",
    f"repository:{DINO}",
    ACCEPTED,
    sites=sites("blocks.0.{}.norm1 blocks.0.{}.norm2", 4),
    why="A list of one list of blocks.",
    code=CHUNKS,
)
def _():
    return dinov2(1), IMAGES


@row(
    "DINOv2, two chunks of two blocks",
    f"repository:{DINO}",
    ACCEPTED,
    sites=[(f"blocks.{i // 2}.{i}.norm1", f"blocks.{i // 2}.{i}.norm2") for i in range(4)],
    why="A list of lists; identities take the places of the earlier chunks' blocks.",
    code=CHUNKS,
)
def _():
    return dinov2(2), IMAGES


@row(
    "DINOv2, the second of two chunks given",
    f"repository:{DINO}",
    REFUSED,
    blocks=["blocks.1.2", "blocks.1.3"],
    why="Part of the depth: the blocks of the first chunk ran before the given ones.",
    code=CHUNKS,
)
def _():
    return dinov2(2), IMAGES


@row(
    "DINOv2, the first of two chunks given",
    f"repository:{DINO}",
    REFUSED,
    blocks=["blocks.0.0", "blocks.0.1"],
    why="Part of the depth: the blocks of the second chunk run after the given ones.",
    code=CHUNKS,
)
def _():
    return dinov2(2), IMAGES


@row(
    "MAE",
    "repository:facebookresearch/mae",
    NORMS,
    sites=sites("blocks.{}.norm1 blocks.{}.norm2", 4),
    why="An encoder and a decoder of the same blocks, in two lists: only the owner can say which is meant. Here the encoder.",
    code=("models_mae.py", "self.decoder_blocks = nn.ModuleList(["),
)
def _():
    import numpy

    numpy.float = float
    on_path("facebookresearch/mae")
    import timm.models.vision_transformer as vit

    code = load("facebookresearch/mae", "models_mae.py")
    code.Block = lambda *args, qk_scale=None, **keywords: vit.Block(*args, **keywords)  # timm dropped qk_scale
    model = code.MaskedAutoencoderViT(
        img_size=32, patch_size=8, embed_dim=32, depth=4, num_heads=4, decoder_embed_dim=16, decoder_depth=4,
        decoder_num_heads=4,
    )  # fmt: skip
    return model, IMAGES


@row(
    "DiT",
    "repository:facebookresearch/DiT",
    ACCEPTED,
    sites=sites("blocks.{}.norm1 blocks.{}.norm2", 4),
    why="The branches read norm1 and norm2 of the stream, modulated and gated by the conditioning.",
    code=("models.py", "x = x + gate_mlp.unsqueeze(1) * self.mlp(modulate(self.norm2(x), shift_mlp, scale_mlp))"),
)
def _():
    code = load("facebookresearch/DiT", "models.py")
    model = code.DiT(input_size=8, hidden_size=32, depth=4, num_heads=4, num_classes=8, class_dropout_prob=0.0)
    return model, (torch.randn(2, 4, 8, 8), torch.tensor([3.0, 5.0]), torch.tensor([1, 2]))


@row(
    "I-JEPA encoder",
    "repository:facebookresearch/ijepa",
    ACCEPTED,
    sites=sites("blocks.{}.norm1 blocks.{}.norm2", 4),
    why="The attention reads norm1 of the stream and the MLP reads norm2 of it.",
    code=("src/models/vision_transformer.py", "x = x + self.drop_path(self.mlp(self.norm2(x)))"),
)
def _():
    on_path("facebookresearch/ijepa")
    from src.models.vision_transformer import VisionTransformer

    return VisionTransformer(img_size=[32], patch_size=8, embed_dim=32, depth=4, num_heads=4, qkv_bias=True), IMAGES


@row(
    "Microsoft's Swin, two stages",
    "repository:microsoft/Swin-Transformer",
    ACCEPTED,
    sites=[(f"layers.{s}.blocks.{b}.norm1", f"layers.{s}.blocks.{b}.norm2") for s in range(2) for b in range(2)],
    why="Two stages of Pre-LN blocks; the widths differ and l counts through.",
    code=("models/swin_transformer.py", "x = x + self.drop_path(self.mlp(self.norm2(x)))"),
)
def _():
    return swin("swin_transformer.py", "SwinTransformer"), IMAGES


@row(
    "Microsoft's Swin v2",
    "repository:microsoft/Swin-Transformer",
    REFUSED,
    why="Res-post-norm: the norms come after the branches.",
    code=("models/swin_transformer_v2.py", "x = x + self.drop_path(self.norm2(self.mlp(x)))"),
)
def _():
    return swin("swin_transformer_v2.py", "SwinTransformerV2"), IMAGES


def swin(file: str, name: str) -> nn.Module:
    """Build one of Microsoft's Swin Transformers with two stages of two blocks."""
    code = load("microsoft/Swin-Transformer", f"models/{file}")
    return getattr(code, name)(
        img_size=32, patch_size=2, num_classes=8, embed_dim=16, depths=[2, 2], num_heads=[2, 2], window_size=4,
        drop_path_rate=0.0,
    )  # fmt: skip


@row(
    "PoolFormer",
    "repository:sail-sg/poolformer",
    ACCEPTED,
    sites=[(f"network.{s}.{b}.norm1", f"network.{s}.{b}.norm2") for s in (0, 2, 4, 6) for b in range(1)],
    why="Pooling reads norm1 of the stream and the MLP reads norm2 of it; embeddings are between the lists of blocks.",
    code=("models/poolformer.py", "* self.token_mixer(self.norm1(x)))"),
)
def _():
    import timm.layers.helpers

    sys.modules["timm.models.layers.helpers"] = timm.layers.helpers  # the name that it had
    code = load("sail-sg/poolformer", "models/poolformer.py")
    model = code.PoolFormer(
        [1, 1, 1, 1], embed_dims=[16, 16, 32, 32], mlp_ratios=[2, 2, 2, 2], downsamples=[True] * 4, num_classes=8,
        layer_scale_init_value=0.5,
    )  # fmt: skip
    return model, torch.randn(2, 3, 64, 64)


FLASH = "Dao-AILab/flash-attention"


def flash() -> None:
    """Make flash-attn importable without its kernels."""
    bare(FLASH, "flash_attn")
    on_path(FLASH)
    sys.modules["flash_attn.ops.triton.layer_norm"] = None  # asks for a GPU when it is imported


@row(
    "flash-attn VisionTransformer",
    f"repository:{FLASH}",
    NORMS,
    sites=sites("blocks.{}.norm1 blocks.{}.norm2", 4),
    why="A block takes and returns (hidden states, residual): the stream is the sum of the two.",
    code=("flash_attn/modules/block.py", "residual = (dropped + residual) if residual is not None else dropped"),
)
def _():
    flash()
    from flash_attn.models.vit import VisionTransformer

    return VisionTransformer(img_size=32, patch_size=8, num_classes=8, embed_dim=32, depth=4, num_heads=4), IMAGES


@row(
    "flash-attn Block, Post-LN",
    f"repository:{FLASH}",
    REFUSED,
    why="Post-LN: with prenorm=False the norms normalize the stream itself.",
    code=("flash_attn/modules/block.py", "(self.drop_path1(self.dropout1(mixer_out)) + hidden_states).to("),
)
def _():
    flash()
    from flash_attn.modules.block import Block
    from flash_attn.modules.mha import MHA

    mixer = partial(MHA, num_heads=4)
    return nn.Sequential(*(Block(32, mixer_cls=mixer, prenorm=False) for _ in range(4))), torch.randn(2, 8, 32)


AUDIO = "facebookresearch/audiocraft"


def audiocraft(**keywords) -> nn.Module:
    """Build the transformer of MusicGen with four blocks."""
    xformers()
    for package in ("audiocraft", "audiocraft.modules"):
        bare(AUDIO, package)
    from audiocraft.modules.transformer import StreamingTransformer

    settings = {"d_model": 32, "num_heads": 4, "num_layers": 4, "dim_feedforward": 64, "dropout": 0.0, "causal": True}
    return StreamingTransformer(**(settings | {"norm_first": True, "bias_ff": False, "bias_attn": False} | keywords))


@row(
    "AudioCraft StreamingTransformer",
    f"repository:{AUDIO}",
    ACCEPTED,
    sites=sites("layers.{}.norm1 layers.{}.norm2", 4),
    why="The attention reads norm1 of the stream and the feed-forward reads norm2 of it.",
    code=("audiocraft/modules/transformer.py", "x = x + self.layer_scale_2(self._ff_block(self.norm2(x)))"),
)
def _():
    return audiocraft(), torch.randn(2, 8, 32)


@row(
    "AudioCraft StreamingTransformer with LayerScale and rotary positions",
    f"repository:{AUDIO}",
    ACCEPTED,
    sites=sites("layers.{}.norm1 layers.{}.norm2", 4),
    why="The attention reads norm1 of the stream and the feed-forward reads norm2 of it.",
    code=("audiocraft/modules/transformer.py", "self._sa_block(self.norm1(x), src_mask, src_key_padding_mask))"),
)
def _():
    return audiocraft(layer_scale=0.5, positional_embedding="rope", memory_efficient=True), torch.randn(2, 8, 32)


@row(
    "AudioCraft StreamingTransformer with cross-attention",
    f"repository:{AUDIO}",
    REFUSED,
    why="A third branch attends to the conditioning after norm_cross, and the method defines no third norm.",
    code=("audiocraft/modules/transformer.py", "self.norm_cross(x), cross_attention_src))"),
)
def _():
    return audiocraft(cross_attention=True), {"x": torch.randn(2, 8, 32), "cross_attention_src": torch.randn(2, 5, 32)}


@row(
    "AudioCraft StreamingTransformer, Post-LN",
    f"repository:{AUDIO}",
    REFUSED,
    why="Post-LN: without norm_first the norms normalize the stream itself.",
    code=("audiocraft/modules/transformer.py", "x = self.norm2(x + self.layer_scale_2(self._ff_block(x)))"),
)
def _():
    return audiocraft(norm_first=False), torch.randn(2, 8, 32)


@row(
    "Demucs CrossTransformerEncoder",
    "repository:facebookresearch/demucs",
    REFUSED,
    why="Two streams: spectrogram and waveform have layers of their own and attend to each other.",
    code=("demucs/transformer.py", "x = self.layers[idx](x, xt)"),
)
def _():
    code = load("facebookresearch/demucs", "demucs/transformer.py")
    model = code.CrossTransformerEncoder(32, num_heads=4, num_layers=4, hidden_scale=2.0, norm_first=True)
    return model, (torch.randn(2, 32, 3, 4), torch.randn(2, 32, 6))
