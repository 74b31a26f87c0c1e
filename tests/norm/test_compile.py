"""torch.compile gives whole graphs and the same values, and layers share their graphs."""

import itertools

import pytest
import torch
from support import norm_reference as reference
from support import olmo_models, tex
from torch._dynamo.testing import CompileCounterWithBackend

from olmo_lns import lns_factor
from olmo_lns.norm import choose_backend

WIDTH, EPS, LAYERS = 16, 1e-6, 24


class Block(torch.nn.Module):
    """Applies a norm whose factor is a float attribute, then a linear layer, as a transformer block does."""

    def __init__(self, layer_number, kind, backend):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.rand(WIDTH) + 0.5)
        self.linear = torch.nn.Linear(WIDTH, WIDTH, bias=False)
        self.lns_scale, self.kind, self.backend = lns_factor(layer_number), kind, backend

    def forward(self, x):
        y = reference.ours(self.kind, x, self.weight, None, EPS, self.lns_scale, backend=self.backend)
        return x + self.linear(y)


@pytest.mark.parametrize(
    ("backend", "kind", "autocast"),
    [
        pytest.param(*case, marks=[pytest.mark.exhaustive] if sum(index) % 2 else [])
        for index, case in zip(
            itertools.product(range(2), repeat=3),
            itertools.product(("torch", "te"), ("rms", "layer"), (False, True)),
            strict=True,
        )  # any two values of two settings meet in half of the cases
    ],
)
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


@pytest.mark.parametrize(("kind", "affine"), [("lns_rms", True), ("lns_default", False)])
@pytest.mark.slow
def test_compiled_blocks_work_under_activation_checkpointing(kind, affine):
    """With the layer's float in the graph, the recomputation would run another graph: torch's CheckpointError."""
    from olmo.config import ActivationCheckpointingStrategy

    def run():
        model.zero_grad()
        model(olmo_models.tokens()).logits.square().mean().backward()
        return [parameter.grad.clone() for parameter in model.parameters()]

    with tex.installed():
        torch._dynamo.reset()
        model = olmo_models.build(layer_norm_type=kind)
        if not affine:
            for norm in (m for m in model.modules() if hasattr(m, "lns_backend")):
                norm.weight = norm.bias = None
        expected = run()
        model.set_activation_checkpointing(ActivationCheckpointingStrategy.whole_layer)
        for block in model.transformer.blocks:
            block.compile(backend="aot_eager", fullgraph=True)
        found = run()
    for got, want in zip(found, expected, strict=True):
        assert reference.relative_error(got, want) < 1e-4
