"""``olmo_lns.apply`` probes one block of each structure, and confirms the others in two forwards of the model."""

import pytest
import torch
from support.block_kinds import Block, D, Stack
from torch import nn
from torch.nn import functional as F

import olmo_lns
from olmo_lns import sites
from olmo_lns.errors import LNSError

X = torch.randn(2, 8, D, generator=torch.Generator().manual_seed(1))


class Counting(Stack):
    forwards = 0

    def forward(self, x):
        self.forwards += 1
        type(self).forwards += 1
        return super().forward(x)


def test_a_model_in_fp32_runs_three_times():
    """Once to find its blocks, and once in each mode. The state of the model is restored, so the class counts."""
    Counting.forwards = 0
    model = olmo_lns.apply(Counting(), example=X)
    assert Counting.forwards == 3
    assert len(list(sites.in_model(model))) == 8


class Behaving(Block):
    """A block that does something else if it is not the first one."""

    number = 0

    def forward(self, x):
        return self.differently(x) if self.number else super().forward(x)


class Bypassing(Behaving):
    def differently(self, x):
        return Block.forward(self, x) + 0.1 * self.mlp(x)


class BypassingInTraining(Behaving):
    def differently(self, x):
        return Block.forward(self, x) + (0.1 * self.mlp(x) if self.training else 0.0)


class Scaling(Behaving):
    def differently(self, x):
        x = x + self.attn(self.n1(x) / (self.number + 1) ** 0.5)
        return x + self.mlp(self.n2(x) / (self.number + 1) ** 0.5)


class Remembering(Behaving):
    """The second block reads the stream before the first one, which is in an attribute."""

    shared = {}

    def forward(self, x):
        if not self.number:
            self.shared["x"] = x
        return super().forward(x)

    def differently(self, x):
        return Block.forward(self, x) + 0.1 * self.shared["x"]


class Fused(Behaving):
    """The second block does not call its norm unless there is a hook on it."""

    def differently(self, x):
        if self.n1._forward_hooks or self.n1._forward_pre_hooks:
            return Block.forward(self, x)
        x = x + self.attn(F.layer_norm(x, (D,), self.n1.weight, self.n1.bias))
        return x + self.mlp(self.n2(x))


@pytest.mark.parametrize(
    ("block", "text"),
    [
        (Bypassing, "block 2 .* is not Pre-LN"),
        (BypassingInTraining, "block 2 .* is not Pre-LN"),
        (Scaling, "in its own code"),
        (Remembering, "past its norms"),
        (Fused, "hook"),
    ],
)
def test_a_second_block_that_does_something_else_is_refused(block, text):
    torch.manual_seed(0)
    model = Stack(block)
    for number, each in enumerate(model.layers):
        each.number = number
    before = model.eval()(X)
    with pytest.raises(LNSError, match=text):
        olmo_lns.apply(model, example=X)
    assert torch.equal(model(X), before)
    assert not list(sites.in_model(model))


class Failing(Stack):
    """A model that fails in one of its forwards."""

    forwards = 0

    def forward(self, x):
        x = super().forward(x)
        type(self).forwards += 1
        if self.forwards == 2:
            raise ValueError("this forward fails")
        return x


def test_an_error_in_a_forward_leaves_parameters_and_forwards_as_they_were():
    Failing.forwards = 0
    model = Failing()
    before = {name: (parameter.data_ptr(), parameter.clone()) for name, parameter in model.named_parameters()}
    olmo_lns.apply(model, example=X)
    for name, parameter in model.named_parameters():
        address, values = before[name]
        assert parameter.data_ptr() == address
        assert torch.equal(parameter, values)
    assert not [name for name, module in model.named_modules() if "forward" in vars(module)]


class Gated(Block):
    """A gate that starts at zero, as a buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("gate", torch.zeros(1))

    def forward(self, x):
        return x + self.gate * (super().forward(x) - x)


def test_a_gate_at_zero_is_open_only_while_the_model_is_measured():
    model = olmo_lns.apply(Stack(Gated), example=X)
    assert len(list(sites.in_model(model))) == 8
    assert not any(bool(block.gate.any()) for block in model.layers)


def test_norms_of_other_blocks_without_gain_are_found_as_well():
    model = olmo_lns.apply(Stack(lambda: Block(norm=lambda d: nn.LayerNorm(d, elementwise_affine=False))), example=X)
    assert [site.layer_number for _, _, site in sites.in_model(model)] == [1, 1, 2, 2, 3, 3, 4, 4]
