"""``olmo_lns.apply`` probes one block of each structure, and confirms the others in two forwards of the model."""

import copy

import pytest
import torch
from support.block_kinds import Block, D, Stack
from support.hooked import hooked
from torch import nn
from torch.nn import functional as F

import olmo_lns
from olmo_lns import probe, sites
from olmo_lns.errors import LNSError
from olmo_lns.integrations.any_model import finding

X = torch.randn(2, 8, D, generator=torch.Generator().manual_seed(1))
#: fp16 takes the same code as bf16, so its tests run with the slow ones.
FP16 = pytest.param(torch.float16, marks=pytest.mark.slow)


class Counting(Stack):
    forwards = 0

    def forward(self, x):
        self.forwards += 1
        type(self).forwards += 1
        return super().forward(x)


class Routing(Block):
    """A block of two experts. In half precision, its router chooses other experts than in fp32."""

    def __init__(self):
        super().__init__()
        self.router, self.other_mlp = nn.Linear(D, 2), nn.Sequential(nn.Linear(D, D), nn.GELU(), nn.Linear(D, D))

    def forward(self, x):
        y = self.n2(x := x + self.attn(self.n1(x)))
        logits = self.router(y) + (y.dtype == torch.float32) * torch.tensor([0.0, 9.0], dtype=y.dtype)
        is_first = (logits.argmax(-1) == 0)[..., None]
        return x + torch.where(is_first, self.mlp(y), self.other_mlp(y))


@pytest.mark.parametrize("block", [Block, Routing])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, FP16])
def test_a_model_runs_five_times(block, dtype):
    """To find its blocks, in each mode, and with and without hooks. The state is restored, so the class counts."""
    Counting.forwards = 0
    model = olmo_lns.apply(Counting(block).to(dtype), example=X.to(dtype))
    assert Counting.forwards == 5
    assert len(list(sites.in_model(model))) == 8


class StreamInFP32(Block):
    """A block whose branches read and return the dtype of the weights, beside a stream in fp32."""

    def forward(self, x):
        dtype = self.o.weight.dtype
        x = x + self.attn(self.n1(x.to(dtype))).float()
        return x + self.mlp(self.n2(x.to(dtype))).float()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_deep_model_in_half_precision_runs_five_times(dtype):
    """Its stream grows with the depth, and the last block still adds as much as the first one."""
    Counting.forwards = 0
    olmo_lns.apply(Counting(count=24).to(dtype), example=100 * X.to(dtype))
    assert Counting.forwards == 5


def test_a_model_in_half_precision_with_a_stream_in_fp32_runs_five_times():
    Counting.forwards = 0
    model = Counting(StreamInFP32, count=12).bfloat16()
    model.out.float()
    olmo_lns.apply(model, example=X)
    assert Counting.forwards == 5


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


class BypassingALittleInTraining(Behaving):
    def differently(self, x):
        return Block.forward(self, x) + (1e-3 * self.mlp(x) if self.training else 0.0)


class BypassingInHalfPrecision(Behaving):
    def differently(self, x):
        return Block.forward(self, x) + (0.1 * x if x.dtype == torch.bfloat16 else 0.0)


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


class RememberingInTraining(Remembering):
    def differently(self, x):
        return Block.forward(self, x) + (0.1 * self.shared["x"] if self.training else 0.0)


class Fused(Behaving):
    """The second block does not call its norm unless there is a hook on it."""

    def is_fused(self):
        return not (self.n1._forward_hooks or self.n1._forward_pre_hooks)

    def differently(self, x):
        if not self.is_fused():
            return Block.forward(self, x)
        x = x + self.attn(F.layer_norm(x, (D,), self.n1.weight, self.n1.bias))
        return x + self.mlp(self.n2(x))


class FusedInTraining(Fused):
    def is_fused(self):
        return self.training and super().is_fused()


@pytest.mark.parametrize("block", [Fused, FusedInTraining])
@pytest.mark.parametrize("passes_blocks", [False, True])
def test_a_fused_kernel_of_a_second_block_is_switched_off(block, passes_blocks):
    torch.manual_seed(0)
    model = Stack(block)
    for number, each in enumerate(model.layers):
        each.number = number
    reference = copy.deepcopy(model)
    hooked(reference, reference.layers, ("n1", "n2"))
    olmo_lns.apply(model, example=X, **({"blocks": model.layers} if passes_blocks else {}))
    for trains in (False, True):
        torch.testing.assert_close(model.train(trains)(X), reference.train(trains)(X))


@pytest.mark.parametrize(
    ("block", "text"),
    [
        (Bypassing, "block 2 .* is not Pre-LN"),
        (BypassingInTraining, "block 2 .* is not Pre-LN"),
        (BypassingALittleInTraining, "block 2 .* is not Pre-LN"),
        (Scaling, "in its own code"),
        (Remembering, "past its norms"),
        (RememberingInTraining, "in training mode block 2 reads the model's stream past its norms"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_second_block_that_does_something_else_is_refused(block, text, dtype):
    torch.manual_seed(0)
    model, x = Stack(block).to(dtype), X.to(dtype)
    for number, each in enumerate(model.layers):
        each.number = number
    before = model.eval()(x)
    with pytest.raises(LNSError, match=text):
        olmo_lns.apply(model, example=x)
    assert torch.equal(model(x), before)


def test_a_second_block_that_bypasses_its_norms_in_half_precision_only_is_refused():
    torch.manual_seed(0)
    model = Stack(BypassingInHalfPrecision).bfloat16()
    for number, each in enumerate(model.layers):
        each.number = number
    with pytest.raises(LNSError, match="past its norms"):
        olmo_lns.apply(model, example=X.bfloat16())
    assert not list(sites.in_model(model))


def test_converted_parameters_share_their_memory():
    block = Block()
    replay = probe.Replay(probe.random_copy(block), probe.Call((X,), {}, 0), torch.float32)
    values = replay.parameters_as([torch.bfloat16 for _ in block.parameters()])
    for value, own in zip(values, replay.block.parameters(), strict=True):
        assert torch.equal(value, own.bfloat16())
    memories = {value.untyped_storage().data_ptr() for value in values}
    assert len(memories) == len({own.untyped_storage().data_ptr() for own in replay.block.parameters()}) < len(values)


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_hooks_on_the_accumulation_of_gradients_still_run(dtype):
    """DistributedDataParallel has such hooks. Without them, it would no longer average the gradients."""
    model, ran = Stack().to(dtype), []
    nodes = [torch.autograd.graph.get_gradient_edge(parameter).node for parameter in model.parameters()]
    for node in nodes:
        node.register_hook(lambda *gradients: ran.append(gradients))
    olmo_lns.apply(model, example=X.to(dtype))
    model(X.to(dtype)).sum().backward()
    assert len(ran) == len(nodes)


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


class InPlace(Block):
    def forward(self, x):
        x += self.attn(self.n1(x))
        x += self.mlp(self.n2(x))
        return x


def test_blocks_that_add_to_their_stream_in_place_are_confirmed_in_both_modes(monkeypatch):
    separate = []
    monkeypatch.setattr(finding, "require_residual_stream", lambda *_: separate.append(True))
    model = olmo_lns.apply(Stack(InPlace), example=X)
    assert len(list(sites.in_model(model))) == 8 and not separate


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_named(value):
    model = Stack()
    with torch.no_grad():
        model.layers[1].up.weight[0, 0] = value
    with pytest.raises(LNSError, match="layers.1.up.weight has NaN or infinite values"):
        olmo_lns.apply(model, example=X)


class Numbered(Block):
    """A block whose factor the model sets in its forward."""

    factor = 1.0

    def forward(self, x):
        x = x + self.attn(self.n1(x) * self.factor)
        return x + self.mlp(self.n2(x) * self.factor)


class Setting(Stack):
    """:param factor: of the number of a block, which the model sets on the block."""

    def __init__(self, factor):
        super().__init__(Numbered)
        self.factor = factor

    def forward(self, x):
        for number, block in enumerate(self.layers, start=1):
            block.factor = self.factor(number, x)
            x = block(x)
        return self.out(x)


def test_a_factor_that_the_model_sets_on_its_blocks_is_seen():
    with pytest.raises(LNSError):
        olmo_lns.apply(Setting(lambda number, x: number**-0.5), example=X)
    assert len(list(sites.in_model(olmo_lns.apply(Setting(lambda number, x: torch.ones_like(x)), example=X)))) == 8


CACHE = {}


class Caching(nn.Linear):
    """A layer that computes its weight once for each version of it, in training mode."""

    def forward(self, x):
        key = (id(self), self.weight._version)
        if self.training and key not in CACHE:
            CACHE[key] = (self.weight * 8).round().detach() / 8
        return F.linear(x, CACHE.get(key, self.weight), self.bias)


class Quantized(Block):
    def __init__(self):
        super().__init__()
        self.o = Caching(D, D)


def test_a_cache_of_weights_does_not_keep_those_of_the_probe():
    model = Stack(Quantized)
    olmo_lns.apply(model, example=X)
    model.train()(X)
    for block in model.layers:
        cached = CACHE[id(block.o), block.o.weight._version]
        assert torch.equal(cached, (block.o.weight * 8).round() / 8)
