# ruff: noqa: E501 - a row is a line of a table
"""Vision models of timm."""

from __future__ import annotations

import torch
from expectation import ACCEPTED, NORMS, REFUSED, row, sites

IMAGE = 32
BLOCKS = sites("blocks.{}.norm1 blocks.{}.norm2", 4)
VIT = "timm/models/vision_transformer.py"
SMALL = {"img_size": IMAGE, "patch_size": 8, "embed_dim": 32, "depth": 4, "num_heads": 4, "num_classes": 8}
MIXER = {"class": "MlpMixer", "img_size": IMAGE, "patch_size": 8, "embed_dim": 32, "num_blocks": 4, "num_classes": 8}
PYRAMID = {"img_size": IMAGE, "num_classes": 8}


def stages(pattern: str, *depths: int):
    """Return the sites of blocks in stages, in running order: ``"layers.{s}.blocks.{b}.norm1 …"``."""
    return [
        tuple(name.replace("{s}", str(s)).replace("{b}", str(b)) for name in pattern.split())
        for s, depth in enumerate(depths)
        for b in range(depth)
    ]


#: Settings that name something of the model's module.
OF_MODULE = ("class", "token_mixers", "norm_layers", "block_layer", "norm_layer", "mlp_layer")


def model(
    name: str, settings: dict, verdict: str, file: str, line: str, why: str, *, title=None, size=IMAGE, **expected
):
    """Register a model that ``timm.create_model`` builds."""

    @row(title or f"timm {name}", "package:timm", verdict, why=why, code=(f"timm/models/{file}", line), **expected)
    def build():
        import importlib

        import timm

        keywords = dict(settings)
        if "class" not in keywords:
            return timm.create_model(name, pretrained=False, **keywords), torch.randn(2, 3, size, size)
        module = importlib.import_module("timm.models." + file.removesuffix(".py"))
        keywords = {key: getattr(module, value) if key in OF_MODULE else value for key, value in keywords.items()}
        return keywords.pop("class")(**keywords), torch.randn(2, 3, size, size)


PLAIN = "x = x + self.drop_path1(self.ls1(self.attn(self.norm1(x)"
model(
    "vit_tiny_patch16_224", SMALL, ACCEPTED, "vision_transformer.py", PLAIN,
    "Attention reads norm1 of the stream and the MLP reads norm2 of it.", sites=BLOCKS,
)  # fmt: skip
model(
    "vit_base_patch16_clip_224", SMALL, ACCEPTED, "vision_transformer.py", PLAIN,
    "A Pre-LN stack after a norm of the embedding.", sites=BLOCKS,
)  # fmt: skip
model(
    "vit_small_patch14_reg4_dinov2", SMALL | {"init_values": 0.5}, ACCEPTED, "vision_transformer.py", PLAIN,
    "A Pre-LN stack with LayerScale and registers.", sites=BLOCKS,
)  # fmt: skip
model(
    "vit_so150m2_patch16_reg1_gap_256", SMALL | {"mlp_ratio": 2.0, "init_values": 0.5}, ACCEPTED,
    "vision_transformer.py", PLAIN, "A Pre-LN stack with LayerScale and norms of queries and keys.", sites=BLOCKS,
)  # fmt: skip


@row(
    "timm ParallelScalingBlock",
    "package:timm",
    ACCEPTED,
    sites=sites("blocks.{}.in_norm", 4),
    why="One norm and one input projection; of the two output projections one mixes positions and the other does not.",
    code=(VIT, "y = self.attn_out_proj(x_attn) + self.mlp_out_proj(x_mlp)"),
)
def _():
    from timm.models.vision_transformer import ParallelScalingBlock, VisionTransformer

    return VisionTransformer(**SMALL, block_fn=ParallelScalingBlock), torch.randn(2, 3, IMAGE, IMAGE)


@row(
    "timm ResPostBlock",
    "package:timm",
    REFUSED,
    why="Res-post-norm: the norms come after the branches.",
    code=(VIT, "x = x + self.drop_path1(self.norm1(self.attn("),
)
def _():
    from timm.models.vision_transformer import ResPostBlock, VisionTransformer

    return VisionTransformer(**SMALL, block_fn=ResPostBlock), torch.randn(2, 3, IMAGE, IMAGE)


@row(
    "timm DiffParallelScalingBlock",
    "package:timm",
    NORMS,
    sites=sites("blocks.{}.in_norm", 4),
    why="One norm, and one output projection for both branches together: no output shows which branch it ends.",
    code=(VIT, "# Fused output projection for both attention and MLP"),
)
def _():
    from timm.models.vision_transformer import DiffParallelScalingBlock, VisionTransformer

    return VisionTransformer(**SMALL, block_fn=DiffParallelScalingBlock), torch.randn(2, 3, IMAGE, IMAGE)


@row(
    "timm ParallelThingsBlock",
    "package:timm",
    REFUSED,
    why="A block has four norms, one before each of two attentions and two MLPs.",
    code=(VIT, "x = x + torch.stack([attn(x) for attn in self.attns]).sum(dim=0)"),
)
def _():
    from timm.models.vision_transformer import ParallelThingsBlock, VisionTransformer

    return VisionTransformer(**SMALL, block_fn=ParallelThingsBlock), torch.randn(2, 3, IMAGE, IMAGE)


for name, settings, file, line, why in (
    ("deit_tiny_distilled_patch16_224", SMALL, "vision_transformer.py", PLAIN, "A Pre-LN stack with two class tokens."),
    ("beit_base_patch16_224", SMALL | {"init_values": 0.5}, "beit.py", "x = x + self.drop_path1(self.gamma_1 * self.attn(self.norm1(x)", "A Pre-LN stack with learned scales of both branches."),
    ("eva02_tiny_patch14_224", SMALL | {"use_rot_pos_emb": True, "qkv_fused": False}, "eva.py", "self.norm1(x)", "A Pre-LN stack with rotary positions and SwiGLU."),
    ("convit_tiny", SMALL | {"local_up_to_layer": 2}, "convit.py", "x = x + self.drop_path(self.attn(self.norm1(x)))", "A Pre-LN stack; the class token enters after half of the blocks."),
    ("vit_relpos_small_patch16_224", SMALL | {"init_values": 0.5}, "vision_transformer_relpos.py", "x = x + self.drop_path1(self.ls1(self.attn(self.norm1(x)", "A Pre-LN stack with relative positions."),
    ("samvit_base_patch16", SMALL | {"window_size": 2, "global_attn_indexes": (1, 3), "neck_chans": 16}, "vision_transformer_sam.py", "x = self.norm1(x)", "A Pre-LN stack on (batch, height, width, channels), in windows."),
    ("mixer_s16_224", MIXER, "mlp_mixer.py", "x = x + self.drop_path(self.mlp_tokens(self.norm1(x).transpose(1, 2)).transpose(1, 2))", "The token MLP reads norm1 of the stream and the channel MLP reads norm2 of it."),
):  # fmt: skip
    model(name, settings, ACCEPTED, file, line, why, sites=BLOCKS)

model(
    "vit_relpos_base_patch32_plus_rpn_256", SMALL, REFUSED, "vision_transformer_relpos.py",
    "x = x + self.drop_path1(self.norm1(self.attn(x", "Res-post-norm: the norms come after the branches.",
)  # fmt: skip
model(
    "resmlp_12_224", MIXER | {"mlp_ratio": 4, "block_layer": "ResBlock", "norm_layer": "Affine"}, REFUSED,
    "mlp_mixer.py", "return torch.addcmul(self.beta, self.alpha, x)", "The modules named norm are affine and normalize nothing.",
)  # fmt: skip
model(
    "gmlp_s16_224", MIXER | {"mlp_ratio": 4, "block_layer": "SpatialGatingBlock", "mlp_layer": "GatedMlp"}, REFUSED,
    "mlp_mixer.py", "x = x + self.drop_path(self.mlp_channels(self.norm(x)))",
    "A block has one gated branch whose end does not split into one that mixes positions and one that does not.",
)  # fmt: skip
TWO = "layers.{s}.blocks.{b}.norm1 layers.{s}.blocks.{b}.norm2"
SWIN = PYRAMID | {"patch_size": 2, "window_size": 4, "embed_dim": 16}
model(
    "swin_tiny_patch4_window7_224", SWIN | {"depths": (4,), "num_heads": (2,)}, ACCEPTED, "swin_transformer.py",
    "x = x + self.drop_path1(self._attn(self.norm1(x)))", "One stage: a list that holds one list of Pre-LN blocks.",
    title="timm Swin, one stage", sites=stages(TWO, 4),
)  # fmt: skip
model(
    "swin_tiny_patch4_window7_224", SWIN | {"depths": (2, 2), "num_heads": (2, 2)}, ACCEPTED, "swin_transformer.py",
    "x = x + self.drop_path1(self._attn(self.norm1(x)))", "Two stages of Pre-LN blocks; the widths differ and l counts through.",
    title="timm Swin, two stages", sites=stages(TWO, 2, 2),
)  # fmt: skip
model(
    "swin_tiny_patch4_window7_224", SWIN | {"depths": (2, 4), "num_heads": (2, 2)}, REFUSED, "swin_transformer.py",
    "x = self.layers(x)", "Part of the depth: the blocks of the first stage ran before the given ones.",
    title="timm Swin, the second stage given", blocks="layers.1.blocks",
)  # fmt: skip
model(
    "swinv2_tiny_window8_256", SWIN | {"depths": (2, 2), "num_heads": (2, 2)}, REFUSED, "swin_transformer_v2.py",
    "x = x + self.drop_path1(self.norm1(self._attn(x)))", "Res-post-norm: the norms come after the branches.",
    title="timm Swin v2",
)  # fmt: skip
META = {
    "class": "MetaFormer",
    "token_mixers": "Pooling",
    "norm_layers": "GroupNorm1",
    "num_classes": 8,
    "depths": (2, 2),
    "dims": (16, 32),
}
FORMER = "stages.{s}.blocks.{b}.norm1 stages.{s}.blocks.{b}.norm2"
MIX = "self.token_mixer(self.norm1(x))"
model(
    "poolformer_s12", META | {"layer_scale_init_values": 0.5}, ACCEPTED, "metaformer.py", MIX,
    "Pooling reads norm1 of the stream and the MLP reads norm2 of it; GroupNorm on (batch, channels, height, width).",
    title="timm PoolFormer, two stages", sites=stages(FORMER, 2, 2), size=64,
)  # fmt: skip
model(
    "poolformer_s12", META | {"depths": (4,), "dims": (16,), "layer_scale_init_values": 0.5}, ACCEPTED, "metaformer.py", MIX,
    "One stage, with a GroupNorm on (batch, channels, height, width).",
    title="timm PoolFormer, one stage", sites=stages(FORMER, 4), size=64,
)  # fmt: skip
model(
    "convformer_s18", META | {"token_mixers": "SepConv", "norm_layers": "LayerNorm2dNoBias"}, ACCEPTED, "metaformer.py", MIX,
    "A separable convolution reads norm1 of the stream and the MLP reads norm2 of it.",
    title="timm ConvFormer", sites=stages(FORMER, 2, 2), size=64,
)  # fmt: skip
model(
    "pvt_v2_b0", {"class": "PyramidVisionTransformerV2", "num_classes": 8, "depths": (2, 2, 2, 2), "embed_dims": (8, 16, 16, 32), "num_heads": (1, 1, 2, 2)},
    ACCEPTED, "pvt_v2.py", "x = x + self.drop_path1(self.attn(self.norm1(x), feat_size))",
    "Four stages of Pre-LN blocks; the norm inside the attention reads what norm1 gave.",
    sites=stages(FORMER, 2, 2, 2, 2), size=64,
)  # fmt: skip
model(
    "twins_svt_small", PYRAMID | {"class": "Twins", "img_size": 64, "depths": (2, 2), "embed_dims": (16, 32), "num_heads": (2, 2), "mlp_ratios": (2, 2), "sr_ratios": (2, 1), "wss": (4, 4)},
    ACCEPTED, "twins.py", "x = x + self.drop_path1(self.attn(self.norm1(x), size))",
    "Two stages of Pre-LN blocks, in lists in a list; a convolution of positions stands between blocks.",
    sites=stages("blocks.{s}.{b}.norm1 blocks.{s}.{b}.norm2", 2, 2), size=64,
)  # fmt: skip
model(
    "nest_tiny", PYRAMID | {"class": "Nest", "img_size": 64, "patch_size": 4, "num_levels": 2, "embed_dims": (16, 32), "num_heads": (2, 2), "depths": (2, 2)},
    ACCEPTED, "nest.py", "x = x + self.drop_path1(self.attn(y))",
    "Two levels of Pre-LN blocks on (batch, blocks, positions, channels).",
    sites=stages("levels.{s}.transformer_encoder.{b}.norm1 levels.{s}.transformer_encoder.{b}.norm2", 2, 2), size=64,
)  # fmt: skip
model(
    "sequencer2d_s", {"class": "Sequencer2d", "img_size": 64, "num_classes": 8, "layers": (2, 2), "patch_sizes": (4, 2), "embed_dims": (16, 32), "hidden_sizes": (8, 16), "mlp_ratios": (2.0, 2.0)},
    ACCEPTED, "sequencer.py", "x = x + self.drop_path(self.rnn_tokens(self.norm1(x)))",
    "Recurrent layers read norm1 of the stream and the MLP reads norm2 of it.",
    sites=stages("stages.{s}.blocks.{b}.norm1 stages.{s}.blocks.{b}.norm2", 2, 2), size=64,
)  # fmt: skip
model(
    "focalnet_tiny_srf", {"class": "FocalNet", "drop_path_rate": 0.0, "num_classes": 8, "depths": (2, 2), "embed_dim": 16, "focal_levels": (2, 2), "focal_windows": (3, 3)},
    ACCEPTED, "focalnet.py", "x = self.norm1(x)",
    "Focal modulation reads norm1 of the stream and the MLP reads norm2 of it, on (batch, channels, height, width).",
    sites=stages(TWO, 2, 2), size=64,
)  # fmt: skip
model(
    "focalnet_huge_fl3", {"class": "FocalNet", "drop_path_rate": 0.0, "use_post_norm": True, "num_classes": 8, "depths": (2, 2), "embed_dim": 16, "focal_levels": (2, 2), "focal_windows": (3, 3)},
    REFUSED, "focalnet.py", "x = x + self.drop_path2(self.ls2(self.norm2_post(self.mlp(self.norm2(x)))))",
    "Res-post-norm: norm1_post and norm2_post come after the branches, and norm1 and norm2 are identities.", size=64,
)  # fmt: skip
model(
    "tnt_s_patch16_224", {"img_size": IMAGE, "num_classes": 8, "depth": 4, "embed_dim": 32, "inner_dim": 8, "num_heads_inner": 2, "num_heads_outer": 4},
    REFUSED, "tnt.py", "pixel_embed = pixel_embed + self.drop_path(self.attn_in(self.norm_in(pixel_embed)))",
    "Two streams: a block reads and writes the pixels' stream and the patches' stream, with norms in both.",
)  # fmt: skip
model(
    "crossvit_tiny_240", {"class": "CrossVit", "img_size": 48, "img_scale": (1.0, 1.0), "patch_size": (12, 16), "num_classes": 8, "embed_dim": (16, 32), "depth": ((1, 2, 0), (1, 2, 0)), "num_heads": (2, 2), "mlp_ratio": (2, 2, 1)},
    REFUSED, "crossvit.py", "outs_b.append(block(x[i]))",
    "Two streams: each block runs two branches of different patch sizes and lets them attend to each other.", size=48,
)  # fmt: skip
model(
    "coat_tiny", {"class": "CoaT", "patch_size": 4, "img_size": 64, "num_classes": 8, "embed_dims": (16, 16, 16, 16), "serial_depths": (1, 1, 1, 1), "parallel_depth": 4, "num_heads": 8, "mlp_ratios": (2, 2, 2, 2)},
    REFUSED, "coat.py", "cur2 = self.norm12(x2)", "Four streams: a parallel block reads and writes maps of four sizes.", size=64,
)  # fmt: skip
model(
    "mvitv2_tiny", {"img_size": 64, "num_classes": 8}, REFUSED,
    "mvitv2.py", "x_shortcut = x if self.shortcut_proj_attn is None else self.shortcut_proj_attn(x_norm)",
    "The residual path of a stage's first block is a projection of the normed stream.", size=64,
)  # fmt: skip
model(
    "davit_tiny", {"class": "DaVit", "num_classes": 8, "depths": (2, 2), "embed_dims": (16, 32), "num_heads": (2, 2), "window_size": 4}, REFUSED,
    "davit.py", "shortcut = self.cpe1(x).flatten(2).transpose(1, 2)", "Convolutions of positions read the stream without a norm.", size=64,
)  # fmt: skip
model(
    "xcit_nano_12_p16_224", {"class": "Xcit", "img_size": IMAGE, "patch_size": 8, "num_classes": 8, "embed_dim": 32, "depth": 4, "num_heads": 4, "cls_attn_layers": 1, "eta": 1.0}, REFUSED,
    "xcit.py", "x = x + self.drop_path3(self.gamma3 * self.local_mp(self.norm3(x), H, W))", "A block has three branches with a norm each.",
)  # fmt: skip
model(
    "convnext_atto", {"class": "ConvNeXt", "num_classes": 8, "depths": (1, 1, 2, 1), "dims": (8, 16, 16, 32)}, REFUSED, "convnext.py", "x = self.conv_dw(x)",
    "A block has one norm, and a depthwise convolution reads the stream before it.", size=64,
)  # fmt: skip
model(
    "mambaout_femto", {"class": "MambaOut", "num_classes": 8, "depths": (2, 2), "dims": (16, 32)}, REFUSED, "mambaout.py", "x = self.norm(x)",
    "A block is one gated branch after one norm: numbering its blocks 1 … L would count sub-layers.", size=64,
)  # fmt: skip
model(
    "resnet18", {"num_classes": 8}, REFUSED, "resnet.py", "x = self.bn2(x)", "A convolutional network with batch norms inside the branches.", size=64,
)  # fmt: skip
