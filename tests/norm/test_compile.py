"""torch.compile gives whole graphs and the same values, and layers share their graphs."""

import pytest
import torch
from support import norm_reference as reference
from support import tex
from torch._dynamo.testing import CompileCounterWithBackend

from olmo_lns import lns_scale
from olmo_lns.norm import choose_backend

WIDTH, EPS, LAYERS = 16, 1e-6, 24


class Block(torch.nn.Module):
    """Applies a norm whose factor is a float attribute, then a linear layer, as a transformer block does."""

    def __init__(self, layer_number, kind, backend):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.rand(WIDTH) + 0.5)
        self.linear = torch.nn.Linear(WIDTH, WIDTH, bias=False)
        self.lns_scale, self.kind, self.backend = lns_scale(layer_number), kind, backend

    def forward(self, x):
        y = reference.ours(self.kind, x, self.weight, None, EPS, self.lns_scale, backend=self.backend)
        return x + self.linear(y)


@pytest.mark.parametrize("backend", ["torch", "te"])
@pytest.mark.parametrize(("kind", "autocast"), [("rms", False), ("rms", True), ("layer", False), ("layer", True)])
@pytest.mark.slow
def test_24_layers_compiled_one_by_one_share_their_graphs(kind, autocast, backend):
    torch._dynamo.reset()
    torch.manual_seed(0)
    counter, x = CompileCounterWithBackend("aot_eager"), torch.randn(3, WIDTH)

    def run(layers):
        y = h = x.clone().requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            for layer in layers:
                y = layer(y)
        return y, *torch.autograd.grad(y.square().sum(), [h, blocks[0].weight, blocks[-1].weight])

    with tex.installed():
        blocks = [Block(number, kind, choose_backend(backend)) for number in range(1, LAYERS + 1)]
        eager = run(blocks)
        compiled = run([torch.compile(block, fullgraph=True, backend=counter) for block in blocks])
    assert 1 <= counter.frame_count <= 2  # one for the first float, one for any float
    for got, want in zip(compiled, eager, strict=True):
        assert reference.relative_error(got, want) < (2e-2 if autocast else 1e-5)
