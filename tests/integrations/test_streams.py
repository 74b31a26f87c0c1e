"""Models whose stream is no residual stream, or that read an earlier stream, in one mode or in both."""

import pytest
import torch
from support.block_kinds import Block, D, Stack
from torch import nn
from torch.nn import functional as F

import olmo_lns
from olmo_lns import sites
from olmo_lns.errors import LNSError

X = torch.randn(2, 8, D, generator=torch.Generator().manual_seed(1))


class ReadingTheFirstOutput(Block):
    """A block that also reads what the first block returned.

    :param modes: the values of ``training`` with which it does.
    """

    def __init__(self, modes):
        super().__init__()
        self.modes = modes

    def forward(self, x, first):
        return super().forward(x) + (self.mlp(first) if self.training in self.modes else 0.0)


class WithMemory(nn.Module):
    """The first block has a structure of its own, and all others read the same tensor past their norms."""

    def __init__(self, *modes):
        super().__init__()
        self.layers = nn.ModuleList([Block(), *(ReadingTheFirstOutput(modes) for _ in range(3))])

    def forward(self, x):
        x = first = self.layers[0](x)
        for block in self.layers[1:]:
            x = block(x, first)
        return x


class FirstChange(Block):
    def forward(self, x):
        return super().forward(x) - x


class ReadingChange(ReadingTheFirstOutput):
    def forward(self, x, first):
        return super().forward(x, first) - x


class WithMemoryOutside(WithMemory):
    """The blocks return only the change, and the model adds it to the stream."""

    def __init__(self, *modes):
        super().__init__(*modes)
        self.layers = nn.ModuleList([FirstChange(), *(ReadingChange(modes) for _ in range(3))])

    def forward(self, x):
        x = first = x + self.layers[0](x)
        for block in self.layers[1:]:
            x = x + block(x, first)
        return x


class WithMemoryInADict(WithMemory):
    """The blocks find the earlier stream in a dict, to which the first block writes it."""

    def forward(self, x):
        memory = {}
        for block in self.layers:
            x = block(x, memory)
        return x


class Writing(Block):
    def forward(self, x, memory):
        memory["first"] = x
        return super().forward(x)


class ReadingADict(ReadingTheFirstOutput):
    def forward(self, x, memory):
        return super().forward(x, memory.get("first", torch.zeros_like(x)))


def with_memory_in_a_dict(*modes):
    model = WithMemoryInADict()
    model.layers = nn.ModuleList([Writing(), *(ReadingADict(modes) for _ in range(3))])
    return model


@pytest.mark.parametrize("make", [WithMemory, WithMemoryOutside, with_memory_in_a_dict])
@pytest.mark.parametrize("modes", [(False,), (True,), (False, True)], ids=["eval", "training", "both"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)])
def test_blocks_that_all_read_the_same_earlier_stream_are_refused(make, modes, dtype):
    model = make(*modes).to(dtype)
    with pytest.raises(LNSError):
        olmo_lns.apply(model, example=X.to(dtype))
    assert not list(sites.in_model(model))


def test_blocks_that_return_the_change_of_a_large_stream_are_accepted():
    """``block(x) - x`` then has the rounding of x, which is a thousand times as large."""
    model = olmo_lns.apply(WithMemoryOutside(), example=1000 * X)
    assert len(list(sites.in_model(model))) == 8


class Between(Stack):
    """A model that changes its stream in place between two blocks."""

    def __init__(self, change):
        super().__init__()
        self.change = change

    def forward(self, x):
        for block in self.layers:
            x = block(x)
            self.change(x)
        return x


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.detach().clamp_(-3, 3),
        lambda x: x.detach().div_(x.norm(dim=-1, keepdim=True)),
        lambda x: x.detach().copy_(F.layer_norm(x, (D,))),
    ],
    ids=["clamp", "divide", "normalize"],
)
def test_a_stream_that_is_changed_in_place_between_the_blocks_is_refused(change):
    with pytest.raises(LNSError):
        olmo_lns.apply(Between(change), example=X)


class InTraining(Stack):
    """A model that changes its stream between two blocks, or the order of the blocks, in training mode only."""

    def __init__(self, change=lambda x: x, order=lambda layers: layers, count=4):
        super().__init__(count=count)
        self.change, self.order = change, order

    def forward(self, x):
        for block in self.order(list(self.layers)) if self.training else self.layers:
            x = block(x)
            if self.training:
                x = self.change(x)
        return self.out(x)


def divided_in_place(x):
    x.data.div_(x.data.norm(dim=-1, keepdim=True))
    return x


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: InTraining(order=lambda layers: layers[::-1]), "in the order 4, 3, 2, 1"),
        (lambda: InTraining(order=lambda layers: [layers[1], layers[0], *layers[2:]]), "in the order 2, 1, 3, 4"),
        (lambda: InTraining(lambda x: F.layer_norm(x, (D,))), "between the blocks 1 and 2 by something else"),
        (lambda: InTraining(lambda x: 0.9 * x + 0.1 * F.rms_norm(x, (D,))), "by something else"),
        (lambda: InTraining(divided_in_place), "by something else"),
    ],
    ids=["reversed", "exchanged", "norm", "a part of a norm", "in place"],
)
def test_another_order_or_a_norm_between_blocks_in_training_is_refused(make, text):
    for options in ({}, {"blocks": True}):
        model = make()
        with pytest.raises(LNSError, match=f"in training mode .*{text}"):
            olmo_lns.apply(model, example=X, **({"blocks": model.layers} if options else {}))
        assert not list(sites.in_model(model))


@pytest.mark.parametrize(
    "make",
    [
        lambda: InTraining(order=lambda layers: layers[::-1]),
        lambda: InTraining(lambda x: F.rms_norm(x, (D,))),
        lambda: InTraining(divided_in_place),
    ],
    ids=["reversed", "norm", "in place"],
)
def test_the_same_in_half_precision_is_refused(make):
    with pytest.raises(LNSError, match="in training mode"):
        olmo_lns.apply(make().bfloat16(), example=X.bfloat16())


@pytest.mark.parametrize(
    "make",
    [
        lambda: InTraining(lambda x: F.dropout(x, 0.2)),
        lambda: InTraining(lambda x: x + 0.1 * torch.randn_like(x)),
        lambda: InTraining(lambda x: x * torch.randint(0, 2, (2, 1, 1)) * 2),
        lambda: InTraining(order=lambda layers: [block for block in layers if torch.rand(()) < 0.6], count=8),
        lambda: InTraining(lambda x: F.dropout(x, 0.2), lambda layers: layers[::2]),
        lambda: InTraining(lambda x: x[:, :, torch.arange(D)]),
    ],
    ids=["dropout", "noise", "examples dropped", "layer drop", "both", "copy"],
)
def test_dropout_noise_and_dropped_blocks_between_the_blocks_are_accepted(make):
    for dtype in (torch.float32, torch.bfloat16):
        model = olmo_lns.apply(make().to(dtype), example=X.to(dtype))
        assert len(list(sites.in_model(model))) == 2 * len(model.layers)


class Rescuing(Stack):
    """A model with a block for a stream that is larger than any real one."""

    def __init__(self):
        super().__init__()
        self.rescue = Block()

    def forward(self, x):
        for block in self.layers:
            x = block(x)
        return self.out(self.rescue(x) if x.std() > 2 else x)


class RescuingBetween(Rescuing):
    def forward(self, x):
        for block in self.layers:
            x = block(x)
            x = self.rescue(x) if self.training and x.std() > 2 else x
        return self.out(x)


@pytest.mark.parametrize("make", [Rescuing, RescuingBetween])
def test_a_block_that_only_the_noise_of_the_confirmation_reaches_does_not_matter(make):
    assert len(list(sites.in_model(olmo_lns.apply(make(), example=0.1 * X)))) == 8
