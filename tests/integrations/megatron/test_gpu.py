"""On a GPU with the real Transformer Engine: the fused linear against fp32 torch, CUDA graphs."""

import pytest
import torch
from support import megatron_tiny as tiny

from olmo_lns.integrations.megatron import norms

pytestmark = pytest.mark.gpu

WIDTH, ROWS, EPS = 1024, 512, 1e-6


@pytest.fixture(autouse=True)
def te():
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    te = pytest.importorskip("transformer_engine.pytorch", reason="Transformer Engine is not installed")
    if not hasattr(te, "RMSNorm"):
        pytest.skip("transformer_engine.pytorch has no modules: only its kernels are here")
    return te


def error(found, expected):
    return float((found.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize(("fp8", "limit"), [(False, 2e-2), (True, 0.1)])
def test_the_fused_linear_agrees_with_fp32_torch(te, fp8, limit):
    """tests/norm/test_gpu.py compares the norm alone."""
    if fp8 and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("FP8 needs compute capability 8.9")
    from megatron.core.extensions.transformer_engine import TELayerNormColumnParallelLinear

    generator = torch.Generator("cuda").manual_seed(0)
    x = torch.randn(ROWS, WIDTH, generator=generator, device="cuda", dtype=torch.bfloat16)
    gain = (1 + 0.3 * torch.randn(WIDTH, generator=generator, device="cuda")).bfloat16()
    cfg = tiny.config(hidden_size=WIDTH, params_dtype=torch.bfloat16, bf16=True, use_cpu_initialization=False)
    module = TELayerNormColumnParallelLinear(
        WIDTH, 512, config=cfg, init_method=cfg.init_method, gather_output=False, bias=False, skip_bias_add=False,
        is_expert=False,
    )  # fmt: skip
    own, linear = module.layer_norm_weight, module.weight.float().T
    with torch.no_grad():
        own.copy_(gain)
    norms.scale(module, 7**-0.5, where="block 7, attn", width=WIDTH)
    assert isinstance(module, norms.ScaledGainLinear)
    leaf = x.clone().requires_grad_()
    with te.fp8_autocast(enabled=fp8):
        y, _ = module(leaf)
    upstream = torch.randn(y.shape, generator=generator, device="cuda", dtype=y.dtype)
    y.backward(upstream)
    wide_x, wide_gain = x.float().requires_grad_(), gain.float().requires_grad_()
    right = torch.nn.functional.rms_norm(wide_x, (WIDTH,), wide_gain, EPS) * 7**-0.5 @ linear
    right.backward(upstream.float())
    assert y.dtype == torch.bfloat16
    for found, expected in ((y, right), (leaf.grad, wide_x.grad), (own.grad, wide_gain.grad)):
        assert error(found, expected) < limit


def test_a_cuda_graph_replays_what_eager_computes(te):
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec

    cfg = tiny.under(
        hidden_size=WIDTH, num_attention_heads=16, ffn_hidden_size=4 * WIDTH, bf16=True,
        params_dtype=torch.bfloat16, use_cpu_initialization=False,
    )  # fmt: skip
    layer = tiny.build(cfg, get_gpt_layer_with_transformer_engine_spec()).cuda().decoder.layers[3]
    x = torch.randn(tiny.SEQUENCE, tiny.BATCH, WIDTH, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for _ in range(3):  # kernel plans are made at the first calls
                layer.mlp(x)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = layer.mlp(x)[0]
        layer.mlp.linear_fc1.layer_norm_weight.mul_(2)  # s*gain is computed in the graph, never cached
        x.copy_(torch.randn_like(x))
        graph.replay()
        assert error(y, layer.mlp(x)[0]) < 1e-3
