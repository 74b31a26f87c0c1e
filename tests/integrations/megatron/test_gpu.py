"""On a GPU with the real Transformer Engine: kernels against fp32 torch, CUDA graphs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import megatron_tiny as tiny

from olmo_lns.integrations.megatron import apply
from olmo_lns.integrations.megatron.norms import attach_norm
from olmo_lns.integrations.norm_sites import Site
from olmo_lns.schemes import LNS

pytestmark = pytest.mark.gpu

WIDTH, ROWS, EPS = 1024, 512, 1e-6


@pytest.fixture(autouse=True)
def te() -> Any:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    te = pytest.importorskip("transformer_engine.pytorch", reason="Transformer Engine is not installed")
    if not hasattr(te, "RMSNorm"):
        pytest.skip("transformer_engine.pytorch has no modules: scripts/gpu/te_ctypes.py binds the four kernels only")
    return te


def inputs(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(0)
    x = torch.randn(ROWS, WIDTH, generator=generator, device="cuda", dtype=dtype)
    gain = (1 + 0.3 * torch.randn(WIDTH, generator=generator, device="cuda")).to(dtype)
    return x, gain, torch.randn(ROWS, WIDTH, generator=generator, device="cuda", dtype=dtype)


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_te_norm_against_fp32_torch(te: Any, dtype: torch.dtype) -> None:
    x, gain, upstream = inputs(dtype)
    scale = 7**-0.5
    norm = te.RMSNorm(WIDTH, eps=EPS, params_dtype=dtype)
    with torch.no_grad():
        norm.weight.copy_(gain)
    attach_norm(norm, Site(LNS, 7, 12, "attn"))
    leaf = x.clone().requires_grad_()
    y = norm(leaf)
    y.backward(upstream)
    wide_x, wide_gain = x.float().requires_grad_(), gain.float().requires_grad_()
    right = torch.nn.functional.rms_norm(wide_x, (WIDTH,), wide_gain, EPS) * scale
    right.backward(upstream.float())
    limit = 1e-5 if dtype is torch.float32 else 1e-2
    assert y.dtype == dtype
    assert error(y, right) < limit
    assert error(leaf.grad, wide_x.grad) < limit  # type: ignore[arg-type]
    assert error(norm.weight.grad, wide_gain.grad) < limit


@pytest.mark.parametrize("fp8", [False, True])
def test_fused_linear_against_fp32_torch(te: Any, fp8: bool) -> None:
    if fp8 and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("FP8 needs compute capability 8.9")
    from megatron.core.extensions.transformer_engine import TELayerNormColumnParallelLinear

    cfg = tiny.config(hidden_size=WIDTH, params_dtype=torch.bfloat16, bf16=True, use_cpu_initialization=False)
    fused = TELayerNormColumnParallelLinear(
        WIDTH, 512, config=cfg, init_method=cfg.init_method, gather_output=False, bias=False, skip_bias_add=False,
        is_expert=False,
    )  # fmt: skip
    x, gain, _ = inputs(torch.bfloat16)
    with torch.no_grad():
        fused.layer_norm_weight.copy_(gain)
    scale = 5**-0.5
    attach_norm(fused, Site(LNS, 5, 12, "attn"))
    leaf = x.clone().requires_grad_()
    with te.fp8_autocast(enabled=fp8):
        y, _ = fused(leaf)
    upstream = torch.randn_like(y)
    y.backward(upstream)
    wide_x, wide_gain = x.float().requires_grad_(), gain.float().requires_grad_()
    right = torch.nn.functional.rms_norm(wide_x, (WIDTH,), wide_gain, EPS) * scale @ fused.weight.float().T
    right.backward(upstream.float())
    limit = 0.1 if fp8 else 2e-2
    assert error(y, right) < limit
    assert error(leaf.grad, wide_x.grad) < limit  # type: ignore[arg-type]
    assert error(fused.layer_norm_weight.grad, wide_gain.grad) < limit


def test_cuda_graph_replays_what_eager_computes(te: Any) -> None:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec

    cfg = tiny.config(
        hidden_size=WIDTH, num_attention_heads=16, ffn_hidden_size=4 * WIDTH, bf16=True,
        params_dtype=torch.bfloat16, use_cpu_initialization=False,
    )  # fmt: skip
    apply(cfg)
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
