# ruff: noqa: E501 - a row is a line of a table
"""Models of PyTorch itself: torch.nn's transformer layers and torchvision."""

from __future__ import annotations

import torch
from expectation import ACCEPTED, NORMS, REFUSED, row, sites
from torch import nn

CODE = "torch/nn/modules/transformer.py"
PRE = (CODE, "self.norm1(x), src_mask, src_key_padding_mask, is_causal=is_causal")
BOTH = "layers.{}.norm1 layers.{}.norm2"


def encoder(norm_first: bool = True, **keywords) -> nn.Module:
    """Build four encoder layers; ``enable_nested_tensor`` needs Post-LN."""
    keywords = {"batch_first": True} | keywords
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, norm_first=norm_first, **keywords)
    return nn.TransformerEncoder(layer, 4, nn.LayerNorm(32), enable_nested_tensor=False)


@row(
    "nn.TransformerEncoder norm_first",
    "package:torch",
    ACCEPTED,
    sites=sites(BOTH, 4),
    why="Both branches read a norm of the stream. In eval without gradients a fused path reads norm1.weight itself.",
    code=PRE,
)
def _():
    return encoder(), torch.randn(2, 6, 32)


@row(
    "nn.TransformerEncoder norm_first, GELU, no bias, sequence first",
    "package:torch",
    ACCEPTED,
    sites=sites(BOTH, 4),
    why="Both branches read a norm of the stream.",
    code=PRE,
)
def _():
    return encoder(batch_first=False, activation="gelu", bias=False), torch.randn(6, 2, 32)


@row(
    "nn.TransformerEncoder norm_first, relu, padding mask",
    "package:torch",
    ACCEPTED,
    sites=sites(BOTH, 4),
    why="Both branches read a norm of the stream, also under a padding mask.",
    code=PRE,
)
def _():
    mask = torch.zeros(2, 6, dtype=torch.bool)
    mask[1, 4:] = True
    return encoder(activation="relu"), {"src": torch.randn(2, 6, 32), "src_key_padding_mask": mask}


@row(
    "nn.TransformerEncoder Post-LN",
    "package:torch",
    REFUSED,
    why="Post-LN: norm1 and norm2 normalize the stream itself after each branch.",
    code=(CODE, "x = self.norm2(x + self._ff_block(x))"),
)
def _():
    return encoder(norm_first=False), torch.randn(2, 6, 32)


@row(
    "nn.TransformerEncoder Post-LN, its norms given",
    "package:torch",
    REFUSED,
    given=sites(BOTH, 4),
    why="Post-LN stays Post-LN when its norms are given: the stream itself would be scaled.",
    code=(CODE, "x = self.norm2(x + self._ff_block(x))"),
)
def _():
    return encoder(norm_first=False), torch.randn(2, 6, 32)


@row(
    "nn.TransformerEncoder norm_first, pairs in reverse order",
    "package:torch",
    REFUSED,
    given=[("layers.3.norm1", "layers.3.norm2"), *sites(BOTH, 3)],
    why="The norms run in another order than they were given in, so block 4 would get the factor of block 1.",
    code=PRE,
)
def _():
    return encoder(), torch.randn(2, 6, 32)


@row(
    "nn.TransformerDecoder norm_first",
    "package:torch",
    REFUSED,
    why="A third branch attends to the memory after norm2, and the method defines no third norm.",
    code=(CODE, "x = x + self._mha_block("),
)
def _():
    layer = nn.TransformerDecoderLayer(32, 4, 64, dropout=0.0, norm_first=True, batch_first=True)
    return nn.TransformerDecoder(layer, 4), (torch.randn(2, 6, 32), torch.randn(2, 5, 32))


@row(
    "nn.Transformer norm_first, two source passes",
    "package:torch",
    REFUSED,
    why="The example runs the encoder's stack twice in one forward.",
    code=(CODE, "memory = self.encoder("),
)
def _():
    model = nn.Transformer(32, 4, 4, 4, 64, dropout=0.0, norm_first=True, batch_first=True)
    source, target = torch.randn(2, 6, 32), torch.randn(2, 5, 32)
    return model, lambda m: m(source, target) + m(source.flip(1), target)


@row(
    "nn.Transformer norm_first",
    "package:torch",
    REFUSED,
    why="Encoder and decoder are two stacks, and the decoder's blocks have a third norm before cross-attention.",
    code=(CODE, "x = x + self._mha_block("),
)
def _():
    model = nn.Transformer(32, 4, 4, 4, 64, dropout=0.0, norm_first=True, batch_first=True)
    return model, (torch.randn(2, 6, 32), torch.randn(2, 5, 32))


def vision(name: str, **keywords) -> nn.Module:
    """Build a torchvision model without weights."""
    import torchvision

    return getattr(torchvision.models, name)(weights=None, num_classes=8, **keywords)


@row(
    "torchvision VisionTransformer",
    "package:torchvision",
    ACCEPTED,
    sites=sites("encoder.layers.encoder_layer_{}.ln_1 encoder.layers.encoder_layer_{}.ln_2", 4),
    why="Attention reads ln_1 of the stream and the MLP reads ln_2 of it.",
    code=("torchvision/models/vision_transformer.py", "x = self.ln_1(input)"),
)
def _():
    from torchvision.models.vision_transformer import VisionTransformer

    return VisionTransformer(32, 8, 4, 4, 32, 64, num_classes=8), torch.randn(2, 3, 32, 32)


def swin(**keywords) -> nn.Module:
    """Build a small Swin Transformer of torchvision."""
    from torchvision.models.swin_transformer import SwinTransformer

    return SwinTransformer([4, 4], 16, [2, 2], [2, 2], [4, 4], stochastic_depth_prob=0.0, num_classes=8, **keywords)


SWIN = sites("features.1.{}.norm1 features.1.{}.norm2", 2) + sites("features.3.{}.norm1 features.3.{}.norm2", 2)


@row(
    "torchvision Swin, two stages",
    "package:torchvision",
    ACCEPTED,
    sites=SWIN,
    why="Each stage is a list of Pre-LN blocks; the widths differ and l counts through.",
    code=("torchvision/models/swin_transformer.py", "x = x + self.stochastic_depth(self.attn(self.norm1(x)))"),
)
def _():
    return swin(), torch.randn(2, 3, 32, 32)


@row(
    "torchvision Swin, the second stage given",
    "package:torchvision",
    REFUSED,
    blocks="features.3",
    why="Part of the depth: the blocks of the first stage are alike and ran before, and l would start at 1 in the middle.",
    code=("torchvision/models/swin_transformer.py", "self.features = nn.Sequential(*layers)"),
)
def _():
    return swin(), torch.randn(2, 3, 32, 32)


@row(
    "torchvision Swin v2",
    "package:torchvision",
    REFUSED,
    why="Res-post-norm: norm1 and norm2 come after the branches.",
    code=("torchvision/models/swin_transformer.py", "x = x + self.stochastic_depth(self.norm1(self.attn(x)))"),
)
def _():
    from torchvision.models.swin_transformer import PatchMergingV2, SwinTransformerBlockV2

    return swin(block=SwinTransformerBlockV2, downsample_layer=PatchMergingV2), torch.randn(2, 3, 32, 32)


@row(
    "torchvision ConvNeXt",
    "package:torchvision",
    REFUSED,
    why="A block has one norm, and a depthwise convolution reads the stream before it.",
    code=("torchvision/models/convnext.py", "result = self.layer_scale * self.block(input)"),
)
def _():
    from torchvision.models.convnext import CNBlockConfig, ConvNeXt

    return ConvNeXt([CNBlockConfig(16, 32, 4), CNBlockConfig(32, None, 4)], num_classes=8), torch.randn(2, 3, 32, 32)


@row(
    "torchvision MaxViT",
    "package:torchvision",
    REFUSED,
    why="A block is a convolution with batch norm and two Pre-LN attention layers, each in lists of pairs of branches.",
    code=("torchvision/models/maxvit.py", "x = x + self.stochastic_dropout(self.attn_layer(x))"),
)
def _():
    from torchvision.models.maxvit import MaxVit

    model = MaxVit(
        (32, 32), 16, 2, [16, 32], [2, 2], 8, 0.0, num_classes=8
    )  # fmt: skip
    return model, torch.randn(2, 3, 32, 32)


@row(
    "torchvision RegNet",
    "package:torchvision",
    REFUSED,
    why="A convolutional network: batch norms inside the branches, and no norm before them.",
    code=("torchvision/models/regnet.py", "x = x + self.f(x)"),
)
def _():
    return vision("regnet_y_400mf"), torch.randn(2, 3, 32, 32)


assert NORMS
