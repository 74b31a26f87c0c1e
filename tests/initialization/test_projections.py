"""The residual output projections of a block are found by what they do."""

import copy

import pytest
import torch
from support.drawn_models import HIDDEN
from support.other_models import WIDTH
from torch import nn
from torch.nn import functional as F

from olmo_lns import initialization


class Held(nn.Module):
    """In the place of a norm: a fixed output."""

    def __init__(self):
        super().__init__()
        self.output = torch.randn(2, 8, WIDTH)

    def forward(self, x):
        return self.output


def _attention(h):
    return torch.tril(torch.ones(8, 8)) @ h / 8


class Plain(nn.Module):
    """Attention and feed-forward, whose last matrices a subclass applies in another way."""

    found = {"o": 0, "down": 0}

    def __init__(self):
        super().__init__()
        self.n1, self.n2 = Held(), Held()
        self.v, self.o = nn.Parameter(torch.randn(WIDTH, WIDTH)), nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.up, self.down = nn.Parameter(torch.randn(HIDDEN, WIDTH)), nn.Parameter(torch.randn(WIDTH, HIDDEN))

    def attn(self, h):
        return F.linear(_attention(F.linear(h, self.v)), self.o)

    def mlp(self, h):
        return F.linear(F.silu(F.linear(h, self.up)), self.down)

    def forward(self, x):
        x = x + self.attn(self.n1(x))
        return x + self.mlp(self.n2(x))


class LayerScale(Plain):
    """LayerScale, and a multiplier of the residual branch."""

    def __init__(self):
        super().__init__()
        self.gamma = nn.Parameter(torch.rand(2, 1, WIDTH))

    def forward(self, x):
        x = x + self.gamma[0] * self.attn(self.n1(x))
        return x + 0.2 * self.mlp(self.n2(x))


class Transposed(Plain):
    found = {"o": 1, "down": 1}

    def __init__(self):
        super().__init__()
        self.down = nn.Parameter(torch.randn(HIDDEN, WIDTH))

    def attn(self, h):
        return _attention(h @ self.v) @ self.o

    def mlp(self, h):
        return F.silu(F.linear(h, self.up)) @ self.down


class Fused(Plain):
    """PaLM's: one norm, and one matrix after both branches."""

    found = {"out": 0}

    def __init__(self):
        super().__init__()
        self.out = nn.Parameter(torch.randn(WIDTH, WIDTH + HIDDEN))

    def forward(self, x):
        h = self.n1(x)
        branches = torch.cat([_attention(F.linear(h, self.v)), F.silu(F.linear(h, self.up))], dim=-1)
        return x + F.linear(branches, self.out)


class Gated(Plain):
    """The feed-forward's output is gated by the stream, as in RWKV: the gate is not linear."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def mlp(self, h):
        return torch.sigmoid(F.linear(h, self.gate)) * super().mlp(h)


class Experts(Plain):
    """A mixture of experts in parameters of three dimensions."""

    found = {"o": 0, "downs": 2}

    def __init__(self):
        super().__init__()
        self.router, self.ups = nn.Parameter(torch.randn(4, WIDTH)), nn.Parameter(torch.randn(4, WIDTH, HIDDEN))
        self.downs = nn.Parameter(torch.randn(4, HIDDEN, WIDTH))

    def mlp(self, h):
        weights = F.linear(h, self.router).softmax(-1)
        each = torch.einsum("bte,btd,edf->btef", weights, h, self.ups)
        return torch.einsum("btef,efd->btd", F.silu(each), self.downs)


class ExpertModules(Plain):
    """Experts that are modules, of which the router selects the first two."""

    found = {"o": 0, **{f"experts.{number}.1.weight": 0 for number in range(6)}}

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)) for _ in range(6)
        )

    def mlp(self, h):
        return self.experts[0](h) + 0.5 * self.experts[1](h)


class Expert(nn.Module):
    """Mixtral's, as wide as the stream: its three matrices have one shape."""

    def __init__(self):
        super().__init__()
        self.w1, self.w2, self.w3 = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class SquareExperts(Plain):
    found = {"o": 0, **{f"experts.{number}.w2.weight": 0 for number in range(6)}}

    def __init__(self):
        super().__init__()
        self.up = self.down = None
        self.experts = nn.ModuleList(Expert() for _ in range(6))

    def mlp(self, h):
        return self.experts[1](h) + 0.5 * self.experts[2](h) + 0.2 * self.experts[5](h)


class Row(Plain):
    """A feed-forward of many square matrices, of which the last one ends the branch."""

    found = {"o": 0, "net.12.weight": 0}

    def __init__(self):
        super().__init__()
        self.up = self.down = None
        layers = [layer for _ in range(6) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
        self.net = nn.Sequential(*layers, nn.Linear(WIDTH, WIDTH))

    def mlp(self, h):
        return self.net(h)


@pytest.mark.parametrize(
    "kind", [Plain, LayerScale, Transposed, Fused, Gated, Experts, ExpertModules, SquareExperts, Row]
)
def test_residual_output_projections_are_found_by_what_they_do(kind):
    torch.manual_seed(0)
    block, x = kind(), torch.randn(2, 8, WIDTH)
    before = copy.deepcopy(block.state_dict())
    with torch.no_grad():
        assert initialization.residual_projections(block, lambda: block(x) - x, 1e-4) == kind.found
    torch.testing.assert_close(block.state_dict(), before, rtol=0, atol=0)
