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
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, FP16])
def test_blocks_that_all_read_the_same_earlier_stream_are_refused(make, modes, dtype):
    model = make(*modes).to(dtype)
    with pytest.raises(LNSError):
        olmo_lns.apply(model, example=X.to(dtype))
    assert not list(sites.in_model(model))


def test_converted_parameters_share_their_memory():
    block = Block()
    replay = probe.Replay(probe.random_copy(block), probe.Call((X,), {}, 0), torch.float32)
    values = replay.parameters_as([torch.bfloat16 for _ in block.parameters()])
    for value, own in zip(values, replay.block.parameters(), strict=True):
        assert torch.equal(value, own.bfloat16())
    memories = {value.untyped_storage().data_ptr() for value in values}
    assert len(memories) == len({own.untyped_storage().data_ptr() for own in replay.block.parameters()}) < len(values)


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


def test_a_fused_kernel_is_noticed_where_no_block_is_probed():
    model = Unseen()
    with pytest.raises(LNSError, match="outside of its blocks"):
        olmo_lns.apply(model, norms=[*zip(model.norms[::2], model.norms[1::2], strict=True)], example=X)


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
