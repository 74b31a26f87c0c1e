"""The norms of the blocks that are not probed: each must compute a norm, in both modes."""

import pytest
import torch
from support.block_kinds import Block, D, Stack
from torch import nn
from torch.nn import functional as F

import olmo_lns
from olmo_lns import sites
from olmo_lns.errors import LNSError
from olmo_lns.integrations.any_model import finding

X = torch.randn(2, 8, D, generator=torch.Generator().manual_seed(1))


class OtherNorm(nn.LayerNorm):
    """A norm that computes something else if it is not in the first block. :param otherwise: what it computes then."""

    number, otherwise = 0, staticmethod(lambda norm, x, y: y)

    def forward(self, x):
        y = super().forward(x)
        return self.otherwise(self, x, y) if self.number else y


class OffInTraining(nn.LayerNorm):
    def forward(self, x):
        return x if self.training else super().forward(x)


def with_norms(otherwise, **options):
    model = Stack(lambda: Block(norm=lambda d: OtherNorm(d, **options)))
    for number, block in enumerate(model.layers):
        for norm in (block.n1, block.n2):
            norm.number, norm.otherwise = number, otherwise
    return model


@pytest.mark.parametrize(
    ("otherwise", "text"),
    [
        (lambda norm, x, y: x, "layers.1.n1 .* of block 2 computes no norm in eval mode"),
        (lambda norm, x, y: x - x.mean(-1, keepdim=True), "computes no norm in eval mode"),
        (lambda norm, x, y: y + 0.1 * x, "computes no norm in eval mode"),
        (lambda norm, x, y: x if norm.training else y, "layers.1.n1 .* of block 2 computes no norm in training mode"),
        (lambda norm, x, y: y / (norm.number + 1) ** 0.5, r"multiply their outputs by l\^-0.5"),
        (lambda norm, x, y: y / (norm.number + 1) ** 0.25, r"multiply their outputs by l\^-0.25"),
    ],
    ids=["off", "centers", "leaks", "off in training", "own factor", "own exponent"],
)
def test_a_norm_of_a_second_block_that_computes_something_else_is_refused(otherwise, text):
    for options in ({}, {"dtype": torch.bfloat16}):
        model = with_norms(otherwise, **options).to(options.get("dtype"))
        with pytest.raises(LNSError, match=text):
            olmo_lns.apply(model, example=X.to(options.get("dtype")))
        assert not list(sites.in_model(model))
    with torch.device("meta"):
        model = with_norms(otherwise)
    with pytest.raises(LNSError, match=text):
        olmo_lns.apply(model, example=X)


def test_a_norm_that_is_off_in_training_in_all_blocks_is_refused():
    with pytest.raises(LNSError, match="of block 1 computes no norm in training mode"):
        olmo_lns.apply(Stack(lambda: Block(norm=OffInTraining)), example=X)


class Unseen(nn.Module):
    """A model without a module for a block, whose code bypasses the norms unless they have a hook."""

    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(D) for _ in range(8))
        self.linears = nn.ModuleList(nn.Linear(D, D) for _ in range(8))

    def forward(self, x):
        for norm, linear in zip(self.norms, self.linears, strict=True):
            y = (
                norm(x)
                if norm._forward_hooks or norm._forward_pre_hooks
                else F.layer_norm(x, (D,), norm.weight, norm.bias)
            )
            x = x + linear(y)
        return x


class Centering(nn.LayerNorm):
    def forward(self, x):
        return (x - x.mean(-1, keepdim=True)) * self.weight


def test_modules_in_no_block_that_are_no_norms_are_refused():
    model = Unseen()
    model.norms = nn.ModuleList([Centering(D) for _ in model.norms])
    with pytest.raises(LNSError, match="norms.0 .* of block 1 computes no norm in eval mode"):
        olmo_lns.apply(model, norms=[*zip(model.norms[::2], model.norms[1::2], strict=True)], example=X)


def test_a_norm_in_no_block_that_is_off_is_refused():
    model = Unseen()
    model.norms[4] = OffInTraining(D)
    with pytest.raises(LNSError, match="norms.4 .* of block 3 computes no norm in training mode"):
        olmo_lns.apply(model, norms=[*zip(model.norms[::2], model.norms[1::2], strict=True)], example=X)


@pytest.mark.parametrize(
    "otherwise",
    [
        lambda norm, x, y: 2 * y,
        lambda norm, x, y: y.clamp(-1, 1) if norm.number == 2 else y,
        lambda norm, x, y: F.layer_norm(x, (D,), norm.weight, norm.bias, 1e-2),
        lambda norm, x, y: F.layer_norm(x.bfloat16(), (D,), norm.weight.bfloat16(), norm.bias.bfloat16()).float(),
        lambda norm, x, y: F.rms_norm(x, (D,), norm.weight),
        lambda norm, x, y: F.dropout(y, 0.1, norm.training),
    ],
    ids=["constant", "clamp", "eps", "bf16", "rms", "dropout"],
)
def test_norms_that_differ_but_are_norms_pass_the_check(otherwise):
    model = with_norms(otherwise).eval()
    located = finding.locate(model, X)
    assert [number for number, pair in enumerate(located.norms, 1) for _ in pair] == [1, 1, 2, 2, 3, 3, 4, 4]


def test_a_fused_kernel_is_noticed_where_no_block_is_probed():
    model = Unseen()
    with pytest.raises(LNSError, match="outside of its blocks"):
        olmo_lns.apply(model, norms=[*zip(model.norms[::2], model.norms[1::2], strict=True)], example=X)
