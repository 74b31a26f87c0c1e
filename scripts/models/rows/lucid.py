# ruff: noqa: E501 - a row is a line of a table
"""Packages whose blocks are pairs of branches in a list: vit-pytorch, x-transformers, local-attention and their kin."""

from __future__ import annotations

import torch
from expectation import ACCEPTED, NORMS, REFUSED, row, sites

IDS = torch.randint(0, 64, (2, 8), generator=torch.Generator().manual_seed(0))
SMALL = {
    "image_size": 32,
    "patch_size": 8,
    "num_classes": 8,
    "dim": 32,
    "depth": 4,
    "heads": 2,
    "dim_head": 16,
    "mlp_dim": 64,
}
PAIRS = "The blocks are pairs of branches in a ModuleList: no module runs a block, so only its owner can say what a block is."
INSIDE = sites("transformer.layers.{}.0.norm transformer.layers.{}.1.net.0", 4)


def image():
    """Return a batch of images."""
    return torch.randn(2, 3, 32, 32)


for module, name, file, line in (
    ("vit", "ViT", "vit.py", "for attn, ff in self.layers:"),
    ("simple_vit", "SimpleViT", "simple_vit.py", "x = attn(x) + x"),
    ("deepvit", "DeepViT", "deepvit.py", "x = attn(x) + x"),
    ("simple_vit_with_qk_norm", "SimpleViT", "simple_vit_with_qk_norm.py", "x = attn(x) + x"),
    ("vit_for_small_dataset", "ViT", "vit_for_small_dataset.py", "x = attn(x) + x"),
):

    @row(
        f"vit-pytorch {module}",
        "package:vit-pytorch",
        NORMS,
        sites=INSIDE,
        why=PAIRS,
        code=(f"vit_pytorch/{file}", line),
    )
    def _(module=module, name=name):
        import importlib

        return getattr(importlib.import_module(f"vit_pytorch.{module}"), name)(**SMALL), image()


@row(
    "vit-pytorch parallel_vit",
    "package:vit-pytorch",
    REFUSED,
    why="Each block has two attentions and two MLPs, each with a norm of its own.",
    code=("vit_pytorch/parallel_vit.py", "x = attns(x) + x"),
)
def _():
    from vit_pytorch.parallel_vit import ViT

    return ViT(**SMALL), image()


@row(
    "vit-pytorch cross_vit",
    "package:vit-pytorch",
    REFUSED,
    why="Two streams of different patch sizes attend to each other.",
    code=("vit_pytorch/cross_vit.py", "for sm_enc, lg_enc, cross_attend in self.layers:"),
)
def _():
    from vit_pytorch.cross_vit import CrossViT

    model = CrossViT(
        image_size=32, num_classes=8, depth=2, sm_dim=16, lg_dim=16, sm_patch_size=8, sm_enc_depth=2, sm_enc_heads=2,
        sm_enc_mlp_dim=32, sm_enc_dim_head=8, lg_patch_size=16, lg_enc_depth=2, lg_enc_heads=2, lg_enc_mlp_dim=32,
        lg_enc_dim_head=8, cross_attn_depth=2, cross_attn_heads=2, cross_attn_dim_head=8,
    )  # fmt: skip
    return model, image()


def x_transformer(**keywords):
    """Build a decoder of x-transformers with four pairs of layers."""
    from x_transformers import Decoder, TransformerWrapper

    return TransformerWrapper(
        num_tokens=64,
        max_seq_len=16,
        attn_layers=Decoder(**({"dim": 32, "depth": 4, "heads": 2, "attn_dim_head": 16} | keywords)),
    )


X = "x_transformers/x_transformers.py"
X_PAIRS = [(f"attn_layers.layers.{2 * i}.0.0", f"attn_layers.layers.{2 * i + 1}.0.0") for i in range(4)]


@row(
    "x-transformers decoder",
    "package:x-transformers",
    NORMS,
    sites=X_PAIRS,
    why="Norm, branch and residual are triples in a ModuleList, one for each sub-layer: no module runs a block.",
    code=(X, "pre_branch_norm = norm_fn() if pre_norm else None"),
)
def _():
    return x_transformer(), IDS


@row(
    "x-transformers decoder, rotary, RMSNorm, SwiGLU",
    "package:x-transformers",
    NORMS,
    sites=X_PAIRS,
    why="Norm, branch and residual are triples in a ModuleList, one for each sub-layer: no module runs a block.",
    code=(X, "pre_branch_norm = norm_fn() if pre_norm else None"),
)
def _():
    return x_transformer(use_rmsnorm=True, rotary_pos_emb=True, ff_glu=True, ff_swish=True), IDS


@row(
    "x-transformers sandwich_norm, no norm given",
    "package:x-transformers",
    REFUSED,
    why="Sandwich-LN: a second norm ends each branch.",
    code=(X, "post_branch_norm = norm_fn() if sandwich_norm else None"),
)
def _():
    return x_transformer(sandwich_norm=True), IDS


@row(
    "local-attention LocalTransformer",
    "package:local-attention",
    NORMS,
    sites=sites("layers.{}.0.branch.norm layers.{}.1.branch.0", 4),
    why=PAIRS,
    code=(
        "local_attention/transformer.py",
        "init_hyper_conn(dim = dim, branch = FeedForward(dim = dim, mult = ff_mult, dropout = ff_dropout))",
    ),
)
def _():
    return local(1), IDS


@row(
    "local-attention LocalTransformer with four residual streams",
    "package:local-attention",
    REFUSED,
    why="Hyper-connections: four streams are mixed before each branch.",
    code=("local_attention/transformer.py", "num_residual_streams = 4"),
)
def _():
    return local(4), IDS


def local(streams: int):
    """Build a LocalTransformer."""
    from local_attention import LocalTransformer

    return LocalTransformer(
        num_tokens=64,
        max_seq_len=16,
        dim=32,
        depth=4,
        heads=2,
        dim_head=16,
        local_attn_window_size=4,
        num_residual_streams=streams,
    )


def performer(**keywords):
    """Build a PerformerLM whose random features stay."""
    from performer_pytorch import PerformerLM

    model = PerformerLM(num_tokens=64, max_seq_len=16, dim=32, depth=4, heads=2, dim_head=16, causal=False, **keywords)
    model.fix_projection_matrices_()
    return model


@row(
    "performer-pytorch PerformerLM",
    "package:performer-pytorch",
    NORMS,
    sites=sites("performer.net.layers.{}.0.norm performer.net.layers.{}.1.norm", 4),
    why=PAIRS,
    code=("performer_pytorch/reversible.py", "x = x + f(x, **f_args)"),
)
def _():
    return performer(), IDS


@row(
    "performer-pytorch PerformerLM, reversible",
    "package:performer-pytorch",
    REFUSED,
    why="Two streams: a reversible block adds the attention of one half to the other half.",
    code=("performer_pytorch/reversible.py", "y1 = x1 + self.f(x2, record_rng=self.training, **f_args)"),
)
def _():
    return performer(reversible=True), IDS


@row(
    "linear-attention-transformer",
    "package:linear-attention-transformer",
    NORMS,
    sites=sites("transformer.layers.layers.{}.0.norm transformer.layers.layers.{}.1.norm", 4),
    why=PAIRS,
    code=("linear_attention_transformer/reversible.py", "x = x + f(x, **f_args)"),
)
def _():
    from linear_attention_transformer import LinearAttentionTransformerLM

    model = LinearAttentionTransformerLM(num_tokens=64, dim=32, heads=2, depth=4, max_seq_len=8, dim_head=16)
    return model, IDS


@row(
    "linformer",
    "package:linformer",
    NORMS,
    sites=sites("net.layers.{}.0.norm net.layers.{}.1.norm", 4),
    why=PAIRS,
    code=("linformer/reversible.py", "x = x + f(x, **f_args)"),
)
def _():
    from linformer import Linformer

    return Linformer(dim=32, seq_len=8, depth=4, k=4, heads=2), torch.randn(2, 8, 32)


@row(
    "palm-pytorch",
    "package:PaLM-pytorch",
    ACCEPTED,
    sites=sites("{}.fn.norm", 4, start=1),
    why="One norm and one input projection; attn_out mixes positions and ff_out does not.",
    code=("palm_pytorch/palm_pytorch.py", "return self.attn_out(out) + self.ff_out(ff)"),
)
def _():
    from palm_pytorch import PaLM

    return PaLM(dim=32, num_tokens=64, depth=4, dim_head=16, heads=2), IDS


@row(
    "PaLM-rlhf-pytorch",
    "package:PaLM-rlhf-pytorch",
    ACCEPTED,
    sites=sites("layers.{}.fn.norm", 4),
    why="One norm and one input projection; attn_out mixes positions and ff_out does not.",
    code=("palm_rlhf_pytorch/palm.py", "return attn_out + ff_out"),
)
def _():
    from palm_rlhf_pytorch import PaLM

    return PaLM(num_tokens=64, dim=32, depth=4, dim_head=16, heads=2), IDS


@row(
    "mlp-mixer-pytorch",
    "package:mlp-mixer-pytorch",
    ACCEPTED,
    sites=sites("{}.0.norm {}.1.norm", 4, start=2),
    why="Each block is a Sequential of two residual branches, each with a norm in front.",
    code=("mlp_mixer_pytorch/mlp_mixer_pytorch.py", "return self.fn(self.norm(x)) + x"),
)
def _():
    from mlp_mixer_pytorch import MLPMixer

    return MLPMixer(image_size=32, channels=3, patch_size=8, dim=32, depth=4, num_classes=8), image()


@row(
    "mambapy Mamba",
    "package:mambapy",
    REFUSED,
    why="Mamba: a block has one sub-layer after one norm, so its list would count sub-layers.",
    code=("mambapy/mamba.py", "output = self.mixer(self.norm(x)) + x"),
)
def _():
    from mambapy.mamba import Mamba, MambaConfig

    return Mamba(MambaConfig(d_model=32, n_layers=4, d_state=4)), torch.randn(2, 8, 32)


@row(
    "conformer",
    "package:conformer",
    REFUSED,
    why="A block has four branches with a norm each, and a norm of the stream at its end.",
    code=("conformer/conformer.py", "x = self.post_norm(x)"),
)
def _():
    from conformer import Conformer

    return Conformer(dim=32, depth=4, dim_head=16, heads=2, ff_mult=2, conv_kernel_size=3), torch.randn(2, 8, 32)


@row(
    "perceiver-pytorch",
    "package:perceiver-pytorch",
    REFUSED,
    why="Latents attend to the input by cross-attention before each self-attention: a second stream.",
    code=(
        "perceiver_pytorch/perceiver_pytorch.py",
        "x = self.cross_attn(x, context = context, mask = mask, inverted_attention = inverted_attention) + x",
    ),
)
def _():
    from perceiver_pytorch import Perceiver

    model = Perceiver(
        input_channels=3, input_axis=2, num_freq_bands=2, max_freq=4.0, depth=4, num_latents=4, latent_dim=16,
        cross_heads=1, latent_heads=2, cross_dim_head=8, latent_dim_head=8, num_classes=8, self_per_cross_attn=1,
    )  # fmt: skip
    return model, torch.randn(2, 8, 8, 3)
