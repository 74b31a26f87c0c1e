"""``olmo_lns.apply`` leaves no trace of its forwards in a model, also if it refuses the model."""

import collections
import copy
import random

import numpy
import pytest
import torch
from support.block_kinds import Block, D, Stack
from torch import nn

import olmo_lns
from olmo_lns import sites
from olmo_lns.errors import LNSError

X = torch.randn(2, 8, D, generator=torch.Generator().manual_seed(1))


class Cache:
    def __init__(self):
        self.keys, self.lengths, self.last = torch.zeros(2, 8, D), [], None


class Keeping(Block):
    """A block that writes to tensors, containers and objects which are no buffers."""

    def __init__(self):
        super().__init__()
        self.keys = torch.zeros(2, 8, D)
        self.table = torch.arange(3.0).expand(4, 3)
        self.nested = [{"keys": torch.zeros(2, 8, D), "lengths": [1]}, (torch.zeros(1),)]
        self.queue, self.ordered = collections.deque([1], maxlen=2), collections.OrderedDict(a=[1])
        self.cache, self.caches = Cache(), [Cache()]

    def forward(self, x):
        y = super().forward(x)
        for keys in (self.keys, self.nested[0]["keys"], self.cache.keys, self.caches[0].keys):
            keys.copy_(y.detach())
        self.nested[0]["lengths"].append(2)
        self.nested[0]["new"] = 1
        self.nested[1][0].add_(1)
        self.queue.append(2)
        self.ordered["a"].append(2)
        self.ordered["b"] = 1
        self.cache.lengths.append(1)
        self.cache.last = y
        self.caches.append(Cache())
        return y


class Bypassing(Keeping):
    def forward(self, x):
        return super().forward(x) + 0.1 * x.roll(1, -1)


def state_of(value):
    if torch.is_tensor(value):
        return value.tolist()
    if isinstance(value, dict):
        return {key: state_of(each) for key, each in value.items()}
    if isinstance(value, (list, tuple, collections.deque)):
        return [state_of(each) for each in value]
    return state_of(vars(value)) if isinstance(value, Cache) else value


def states(model):
    return [{name: state_of(value) for name, value in vars(b).items() if name[0] != "_"} for b in model.layers]


@pytest.mark.parametrize("block", [Keeping, Bypassing])
def test_what_a_forward_writes_in_place_is_as_before(block):
    model = Stack(block)
    before, objects = copy.deepcopy(states(model)), [id(block.cache) for block in model.layers]
    if block is Keeping:
        olmo_lns.apply(model, example=X)
    else:
        with pytest.raises(LNSError, match="not Pre-LN"):
            olmo_lns.apply(model, example=X)
    assert states(model) == before and [id(block.cache) for block in model.layers] == objects


class Large(Block):
    """A cache of a million keys."""

    def __init__(self):
        super().__init__()
        self.keys = torch.zeros(1001, 1000)

    def forward(self, x):
        self.keys[: x.shape[1], :D] = x[0].detach()
        return super().forward(x)


def test_a_large_new_cache_is_empty_again():
    model = olmo_lns.apply(Stack(Large), example=X)
    assert not any(bool(block.keys.any()) for block in model.layers)


class Drawing(Block):
    """A block with random generators and an array of its own, which writes to them."""

    def __init__(self):
        super().__init__()
        self.generator, self.random = torch.Generator().manual_seed(1), random.Random(1)
        self.numpy, self.counts = numpy.random.default_rng(1), numpy.zeros(3)

    def forward(self, x):
        torch.rand(3, generator=self.generator)
        self.random.random()
        self.numpy.random()
        self.counts += 1
        return super().forward(x)


def test_random_generators_and_arrays_of_a_model_are_as_before():
    model = olmo_lns.apply(Stack(Drawing), example=X)
    for block in model.layers:
        fresh = Drawing()
        assert torch.equal(block.generator.get_state(), fresh.generator.get_state())
        assert block.random.getstate() == fresh.random.getstate()
        assert block.numpy.bit_generator.state == fresh.numpy.bit_generator.state
        assert not block.counts.any()


class CountingNorm(nn.LayerNorm):
    def __init__(self, width):
        super().__init__(width)
        self.calls, self.means = 0, torch.zeros(1)

    def forward(self, x):
        self.calls += 1
        self.means.add_(x.detach().mean())
        return super().forward(x)


@pytest.mark.parametrize("trains", [False, True])
def test_what_a_norm_keeps_when_it_is_measured_is_as_before(trains):
    model = olmo_lns.apply(Stack(lambda: Block(norm=CountingNorm)).train(trains), example=X)
    norms = [norm for block in model.layers for norm in (block.n1, block.n2)]
    assert not any(norm.calls or bool(norm.means.any()) for norm in norms)
    assert [norm.lns_scale for norm in norms[2:4]] == [0.5**0.5] * 2
    olmo_lns.apply(model, example=X)
    assert not any(norm.calls or bool(norm.means.any()) for norm in norms)


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(D, D)
        self.register_buffer("scale", torch.ones(1))

    def forward(self, x):
        return self.linear(x) * self.scale


class WithHead(Stack):
    def __init__(self, make=Block):
        super().__init__(make)
        self.head = torch.jit.script(Head())

    def forward(self, x):
        return self.head(super().forward(x))


class Scripted(Block):
    def __init__(self):
        super().__init__()
        self.o = torch.jit.script(Head())


def test_a_scripted_head_does_not_matter_and_a_scripted_branch_is_named():
    assert len(list(sites.in_model(olmo_lns.apply(WithHead(), example=X)))) == 8
    with pytest.raises(LNSError, match=r"block 1 \(Scripted\): o was compiled by torch.jit.script"):
        olmo_lns.apply(WithHead(Scripted), example=X)


def test_a_traced_head_does_not_matter_and_a_traced_branch_is_named():
    traced = torch.jit.trace(Head(), X)
    model = WithHead()
    model.head = traced
    assert len(list(sites.in_model(olmo_lns.apply(model, example=X)))) == 8
    model = Stack()
    model.layers[2].o = traced
    with pytest.raises(LNSError, match=r"block 3 \(Block\): o was compiled by torch.jit.script"):
        olmo_lns.apply(model, example=X)


class Mapped(Stack):
    def forward(self, x):
        return torch.func.vmap(super().forward, randomness="different")(x)


def test_blocks_inside_of_vmap_are_refused_by_name():
    with pytest.raises(LNSError, match="inside of a transformation of torch.func"):
        olmo_lns.apply(Mapped(), example=X)


class Double(Stack):
    """A model that gives its blocks streams of different dtypes."""

    def forward(self, x):
        for number, block in enumerate(self.layers):
            x = block(x.double() if number % 2 else x.double().float())
        return x


class Single(Block):
    def forward(self, x):
        x = x + self.attn(self.n1(x.float()))
        return x + self.mlp(self.n2(x.float()))


def test_streams_of_different_dtypes_are_accepted():
    assert len(list(sites.in_model(olmo_lns.apply(Double(Single), example=X)))) == 8
