"""The real kernels on a CUDA device equal fp64; the tests on a CPU run a stand-in and cannot show this."""

import pytest
import torch
from support import norm_reference as reference

from olmo_lns import lns_factor
from olmo_lns.norm import Backend
from olmo_lns.norm import transformer_engine as te

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: torch.cuda.is_available() is False"),
]

EPS, SCALE = 1e-6, lns_factor(58)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
#: (rows, width): tuned and odd widths; rows that are not divisible by 4.
SHAPES = [(256, 512), (255, 1024), (64, 4096), (7, 71), (130, 541), (33, 5120), (1, 768)]

#: (dtype of x, dtype of the parameters, autocast).
CASES = [(dtype, dtype, False) for dtype in DTYPES]
CASES += [(torch.bfloat16, torch.float32, True), (torch.float32, torch.bfloat16, False), (torch.float32,) * 2 + (True,)]


@pytest.fixture(params=["te", "torch-fused", "torch"])
def backend(request):
    if request.param == "te" and (problem := te.availability().problem):
        pytest.skip(problem)
    return Backend(request.param, "test")


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("x_dtype", "p_dtype", "autocast"), CASES, ids=str)
@pytest.mark.parametrize("affine", ["weight+bias", "none"])
@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_forward_and_backward_agree_with_fp64(shape, x_dtype, p_dtype, kind, affine, autocast, backend):
    inputs = reference.tensors(shape, x_dtype, p_dtype, affine, "cuda")
    y, expected, errors = reference.compared(kind, inputs, EPS, SCALE, autocast=autocast, backend=backend)
    if autocast and "float32" in (str(x_dtype)[6:], str(p_dtype)[6:]):
        assert y.dtype == torch.float32
    coarsest = max(torch.finfo(y.dtype).eps, torch.finfo(x_dtype).eps, 5e-6)
    assert reference.relative_error(y, expected) < coarsest
    assert all(error < max(coarsest, torch.finfo(tensor.dtype).eps) for tensor, error in errors)


@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_a_captured_cuda_graph_gives_the_same_values(kind, backend):
    x, weight, bias = reference.tensors((128, 1024), torch.bfloat16, torch.bfloat16, device="cuda")

    def run():
        y = reference.ours(kind, x, weight, bias, EPS, SCALE, backend=backend)
        return y, *torch.autograd.grad(y, (x, weight), torch.ones_like(y))

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # kernel plans are built at the first call
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    with torch.no_grad():
        x.copy_(torch.randn_like(x))
        weight.copy_(torch.rand_like(weight))
    graph.replay()
    torch.cuda.synchronize()
    for got, want in zip(captured, run(), strict=True):
        torch.testing.assert_close(got, want, rtol=0.0, atol=0.0)


@pytest.mark.parametrize("layer_norm_type", ["rms", "lns_rms", "lns_default"])
def test_reduce_overhead_captures_blocks_with_a_factor(layer_norm_type):
    """Compiled norms read their factor from a 0-d CPU tensor; Inductor moves it to the GPU and captures the rest."""
    inductor = pytest.importorskip("torch._inductor.config")
    if not getattr(inductor, "graph_partition", False):
        pytest.skip("this torch's Inductor does not partition graphs: any CPU tensor keeps it from CUDA graphs")
    pytest.importorskip("olmo", reason="needs ai2-olmo")
    from support import olmo_models
    from torch._dynamo.utils import counters

    wide = {"d_model": 256, "mlp_hidden_size": 1024, "vocab_size": 512, "embedding_size": 512, "init_device": "cuda"}
    model = olmo_models.build(layer_norm_type=layer_norm_type, max_sequence_length=128, **wide)
    tokens = torch.randint(0, 512, (2, 128), device="cuda")
    expected = model(tokens).logits.detach()
    torch._dynamo.reset()
    counters.clear()
    for block in model.transformer.blocks:
        block.compile(mode="reduce-overhead")
    for _ in range(4):  # warm-up, recording, replay
        torch.compiler.cudagraph_mark_step_begin()
        logits = model(tokens).logits
        logits.float().square().mean().backward()
    assert counters["inductor"]["cudagraph_skips"] == 0
    assert reference.relative_error(logits, expected) < 1e-4
