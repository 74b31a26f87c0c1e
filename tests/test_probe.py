"""What the probe finds: each row is a block or a model that is built in one way."""

import copy

import pytest
import torch
from support.hooked import hooked
from torch import nn
from torch.nn import functional as F

import olmo_lns
from olmo_lns import sites
from olmo_lns.errors import LNSError, MeasurementError

D, IDS = 32, torch.randint(0, 96, (2, 8), generator=torch.Generator().manual_seed(1))


class Block(nn.Module):
    half = False

    def __init__(self, number, norm=nn.RMSNorm):
        super().__init__()
        self.number, self.n1, self.n2 = number, norm(D), norm(D)
        self.q, self.k, self.v, self.o, self.gate, self.up, self.down = (nn.Linear(D, D) for _ in range(7))

    def attn(self, x, y=None):
        if self.half and x.dtype == torch.float32:
            raise RuntimeError("only fp16 and bf16")
        y = x if y is None else y
        return self.o(F.scaled_dot_product_attention(self.q(x), self.k(y), self.v(y), is_causal=True))

    def mlp(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))

    def forward(self, x):
        x = x + self.attn(self.n1(x))
        return x + self.mlp(self.n2(x))


class Model(nn.Module):
    def __init__(self, forward=Block.forward, keys="0123", tail=None, **options):
        super().__init__()
        torch.manual_seed(0)
        kind = type("Other", (Block,), {"forward": forward, "half": options.pop("half", False)})
        self.embedding, self.head = nn.Sequential(nn.Embedding(96, D)), nn.Linear(D, 96)
        self.layers = nn.ModuleDict({key: kind(number, **options) for number, key in enumerate(keys)})
        self.norm = nn.RMSNorm(D) if tail is None else tail(self)

    def forward(self, ids):
        x = self.embedding(ids)
        for block in self.layers.values():
            x = block(x)
        return self.head(self.norm(x))


class Running(nn.RMSNorm):
    """Has statistics that a call in training moves, and takes keywords alone."""

    def __init__(self, width):
        super().__init__(width)
        self.register_buffer("size", torch.ones(()))

    def forward(self, hidden_states):
        if self.training:
            self.size.lerp_(hidden_states.detach().square().mean(), 0.5)
        return super().forward(hidden_states) * self.size


def by_keyword(self, x):
    x = x + self.attn(self.n1(hidden_states=x))
    return x + self.mlp(self.n2(hidden_states=x))


def parallel(self, x):
    h = self.n1(x)
    return x + self.attn(h) + self.mlp(h)


def dropped(self, x):
    if self.training and torch.rand(()) < 0.5:
        return x
    return x + F.dropout(self.attn(self.n1(x)), 0.1, self.training) + self.mlp(self.n2(x))


def past_the_norm(self, x):
    return Block.forward(self, x) if not self.training else x + self.attn(x) + self.mlp(self.n2(x))


def fused_in_half(self, x):
    n1 = self.n1(x) if x.dtype == torch.float32 else F.rms_norm(x, (D,), self.n1.weight)
    return x + self.attn(n1) + self.mlp(self.n2(x))


def last_is_post(self, x):
    return Block.forward(self, x) if self.number < 3 else self.n2(self.mlp(self.n1(self.attn(x) + x)) + x)


def first_outside():
    model = Model(keys="0")
    model.embedding.append(type(model.layers["0"])(0))
    return model


@pytest.mark.parametrize(
    ("model", "names"),
    [
        (lambda: Model(by_keyword, norm=Running), ("n1", "n2")),
        (lambda: Model(parallel), ("n1",)),
        (lambda: Model(dropped), ("n1", "n2")),
        (lambda: Model(half=True).bfloat16(), ("n1", "n2")),
        (lambda: Model(tail=lambda model: nn.Sequential(nn.RMSNorm(D), nn.Dropout(0.0))), ("n1", "n2")),
    ],
)
def test_a_model_equals_hooks_in_training(model, names):
    model = model()
    reference = copy.deepcopy(model)
    hooked(reference, reference.layers.values(), names)
    olmo_lns.apply(model, example=IDS)
    found, expected = (torch.random.manual_seed(2) and each(IDS) for each in (model, reference))
    assert (found - expected).norm() <= (1e-6 if found.dtype == torch.float32 else 0.01) * expected.norm()


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (lambda: Model(last_is_post), "block 4 .* is not Pre-LN"),
        (lambda: Model(past_the_norm), "in training"),
        (lambda: Model(fused_in_half).bfloat16(), "n1 of block 1 0 times"),
        (lambda: Model(lambda self, x: x + self.attn(self.n1(x))), "one branch"),
        (lambda: Model(lambda self, x: x + self.mlp(self.n1(x))), "one branch"),
        (lambda: Model(lambda self, x: x + self.attn(self.n1(x), self.n2(x))), "one branch"),
        (lambda: Model(tail=lambda model: model.layers["3"].n2), "n2 of block 4 2 times"),
        (first_outside, "outside of it"),
        (lambda: Model(keys="23"), "stages"),
    ],
)
def test_what_would_be_silently_wrong_is_refused(model, reason):
    model = model()
    with pytest.raises(LNSError, match=reason):
        olmo_lns.apply(model, example=IDS)
    assert not list(sites.sites(model))


def test_a_norm_without_what_its_mixin_reads_has_its_output_multiplied():
    norm, misread = nn.RMSNorm(D), {"forward": lambda self, x: x * self.variance_epsilon}
    sites.scale(norm, 0.5, where="a", width=D, folded=type("Misread", (sites.Scaled,), misread))
    assert isinstance(norm, sites.ScaledOutput)
    with pytest.raises(MeasurementError, match="rows of 16"):
        sites.scale(nn.RMSNorm(D), 0.5, where="a", width=16)


class Stale(nn.Module):
    """Reads eps elsewhere than its old attribute says."""

    def __init__(self):
        super().__init__()
        self.weight, self.eps, self.variance_epsilon = nn.Parameter(torch.ones(D)), 1e-6, 1e-5

    def forward(self, x):
        return F.rms_norm(x, (D,), self.weight, self.eps)


class Clamped(Stale):
    def forward(self, x):
        return F.rms_norm(x.clamp(-1000, 1000), (D,), self.weight, self.variance_epsilon)


class MayAdd(Stale):
    def forward(self, x, residual=None):
        return F.rms_norm(x if residual is None else x + residual, (D,), self.weight, self.variance_epsilon)


class Asked(sites.Scaled):
    """The arithmetic that is known for a norm of this name."""

    def forward(self, x):
        return F.rms_norm(x, (D,), self.weight * self.lns_factor, self.variance_epsilon)


@pytest.mark.parametrize("kind", [Stale, Clamped, MayAdd])
def test_a_norm_that_computes_otherwise_than_is_known_has_its_output_multiplied(kind):
    norm, stock = kind(), kind()
    sites.scale(norm, 0.5, where="a", width=D, folded=Asked)
    assert isinstance(norm, sites.ScaledOutput)
    x = torch.randn(4, D, generator=torch.Generator().manual_seed(1)) * torch.tensor([[1e-3], [1.0], [1.0], [3e4]])
    torch.testing.assert_close(norm(x), 0.5 * stock(x))


class WithDropout(nn.RMSNorm):
    def __init__(self, width):
        super().__init__(width)
        self.dropout = nn.Dropout(0.0)

    def forward(self, x):
        return self.dropout(super().forward(x))


def test_parts_without_parameters_are_neither_blocks_nor_kept_out_of_norms():
    model = Model(norm=WithDropout)
    model.taps = nn.ModuleList(nn.Sequential(nn.Identity()) for _ in model.layers)
    for layer, tap in zip(model.layers.values(), model.taps, strict=True):
        layer.register_forward_hook(lambda module, args, output, tap=tap: tap(output))
    olmo_lns.apply(model, example=IDS)
    assert len(list(sites.sites(model))) == 8
