"""What the blocks compute, against an independent formula in fp64 and stock models with folded gains."""

import copy
import itertools
import sys

import pytest

pytest.importorskip("olmo_core.nn", reason="needs ai2-olmo-core 2.5 to 3.0 (make test-olmo-core)")

import torch
from olmo_core.nn import layer_norm
from olmo_core.nn.attention import SlidingWindowAttentionConfig
from olmo_core.nn.layer_norm import LayerNormConfig
from olmo_core.nn.moe.parallel_mlp import ParallelMLPBase
from support import olmo_core_models as small

DENSE = ("default", "reordered_norm")
NORMS = {
    "rms": dict(name="rms", eps=1e-6, bias=False),
    "rms with bias": dict(name="rms", bias=True),
    "rms without gain": dict(name="rms", elementwise_affine=False, bias=False),
    "rms, low precision": dict(name="rms", full_precision=False, bias=False),
    "default": dict(name="default"),
    "default without bias": dict(name="default", bias=False),
    "fused_rms": dict(name="fused_rms", bias=False),
    "cute_rms": dict(name="cute_rms", bias=True),
    "l2_norm": dict(name="l2_norm"),
    "qwen_rms": dict(name="qwen_rms", bias=False),
    "nemotron_rms": dict(name="nemotron_rms", bias=True),
}
KNOWN_NORMS = [name for name, values in NORMS.items() if values["name"] in [str(t) for t in layer_norm.LayerNormType]]


def _window():
    return SlidingWindowAttentionConfig(pattern=[4, -1], force_full_attention_on_first_layer=False)


OPTIONS = {
    "plain": {},
    "grouped queries": dict(n_kv_heads=2),
    "one key head": dict(n_kv_heads=1),
    "QK-norm": dict(qk_norm=True),
    "QK-norm per head": dict(qk_norm=True, use_head_qk_norm=True),
    "tied embeddings": dict(tie_word_embeddings=True),
    "sliding window": dict(sliding_window=True),
    "factors of the branches": dict(alpha=True),
}


@pytest.fixture(autouse=True)
def kernels(monkeypatch):
    for name, module in small.kernel_modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(ParallelMLPBase, "forward", small.dense_experts)


def _compare(made, block, *, exponent=0.5, tolerance=2e-6, **fields):
    """Compare an LNS model with a stock model with folded gains: logits, and gradients by the chain rule."""
    scaled = small.model(small.with_scheme(made, exponent=exponent, **fields))
    stock = small.model(copy.deepcopy(made))
    assert list(stock.state_dict()) == list(scaled.state_dict())
    stock.load_state_dict(scaled.state_dict())
    with torch.no_grad():
        assert (stock(small.TOKENS) - scaled(small.TOKENS)).abs().max() > 1e-3  # without the fold it is another model
    small.fold(stock, block, exponent)
    found, expected = scaled(small.TOKENS), stock(small.TOKENS)
    torch.testing.assert_close(found, expected, rtol=tolerance * 10, atol=tolerance)
    small.loss_of(found).backward()
    small.loss_of(expected).backward()
    wanted = dict(stock.named_parameters())
    for name, parameter in scaled.named_parameters():
        grad = wanted[name].grad * small.factor_of(name, block, exponent)
        torch.testing.assert_close(parameter.grad, grad, rtol=1e-4, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize(("block", "exponent"), [("default", 0.5), ("reordered_norm", 0.25)])
def test_logits_and_gradients_equal_a_formula_in_fp64(block, exponent):
    made = small.config(block)
    built = small.model(small.with_scheme(made, exponent=exponent))
    logits = built(small.TOKENS)
    small.loss_of(logits).backward()
    weights = {n: p.detach().double().requires_grad_() for n, p in built.named_parameters()}
    expected = small.reference_logits(weights, made, exponent)
    torch.testing.assert_close(logits.double(), expected, rtol=0, atol=2e-6)
    small.loss_of(expected).backward()
    for name, parameter in built.named_parameters():
        torch.testing.assert_close(parameter.grad.double(), weights[name].grad, rtol=2e-4, atol=1e-7)


WITH_GAIN = [name for name in KNOWN_NORMS if name not in ("l2_norm", "rms without gain")]


@pytest.mark.parametrize(("norm", "block"), list(zip(WITH_GAIN, itertools.cycle(DENSE), strict=False)))
def test_every_norm_with_the_factor_equals_folded_gains(block, norm):
    _compare(small.config(block, NORMS[norm]), block)


@pytest.mark.parametrize("norm", ["l2_norm", "rms without gain"])
def test_the_output_of_a_norm_without_gain_is_multiplied(norm):
    made = small.config("default", NORMS[norm])
    scaled, stock = small.model(small.with_scheme(made)), small.model(made)
    for number, block in enumerate(stock.blocks.values(), start=1):
        for each in (block.attention_norm, block.feed_forward_norm):
            each.register_forward_hook(lambda _m, _a, y, s=number**-0.5: y * s)
    torch.testing.assert_close(scaled(small.TOKENS), stock(small.TOKENS), rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize(("option", "block"), list(itertools.product(OPTIONS, DENSE)))
def test_lns_beside_every_option_of_a_model_equals_folded_gains(block, option):
    kwargs = dict(OPTIONS[option])
    window, alpha = kwargs.pop("sliding_window", False), kwargs.pop("alpha", False)
    if "tie_word_embeddings" in kwargs and "tie_word_embeddings" not in small.config().__dataclass_fields__:
        pytest.skip("this OLMo-core does not tie embeddings")
    made = small.config(block, **kwargs)
    if window:
        made.block.sequence_mixer.sliding_window = _window()
    if alpha:
        made.block.attention_residual_alpha, made.block.feed_forward_residual_alpha = 0.5, 0.25
    _compare(made, block)


def test_embedding_norm_final_norm_and_qk_norm_have_no_factor():
    made = small.config("default", qk_norm=True)
    made.embedding_norm = LayerNormConfig(name="rms", bias=False)
    built = small.model(small.with_scheme(made))
    scaled = [name for name, module in built.named_modules() if hasattr(module, "lns_scale")]
    assert scaled == [f"blocks.{i}.{n}" for i in range(small.LAYERS) for n in ("attention_norm", "feed_forward_norm")]
    _compare(made, "default")


@pytest.mark.parametrize("block", [name for name in small.SCHEMES if name.startswith("moe")])
def test_lns_in_a_mixture_of_experts_equals_folded_gains(block):
    _compare(small.config(block), block, tolerance=5e-6)


@pytest.mark.parametrize("norm", ["rms", "default", "qwen_rms", "fused_rms"])
@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16])
def test_a_scaled_norm_in_bf16_is_as_near_to_fp64_as_the_stock_norm(norm, weights):
    if norm not in KNOWN_NORMS:
        pytest.skip(f"this OLMo-core has no {norm}")
    made = small.config("default", NORMS[norm])
    built = small.model(small.with_scheme(made))
    scaled = built.blocks["2"].feed_forward_norm
    plain = made.block.layer_norm.build(small.WIDTH)
    plain.load_state_dict(scaled.state_dict())
    x = torch.randn(256, small.WIDTH, generator=torch.Generator().manual_seed(0)).bfloat16()
    wide = NORMS[norm]["name"] == "default"
    centred = x.double() - (x.double().mean(-1, keepdim=True) if wide else 0)
    exact = centred / (centred.pow(2).mean(-1, keepdim=True) + scaled.eps).sqrt() * scaled.weight.double()
    exact = (exact + scaled.bias.double() if scaled.bias is not None else exact) / 3**0.5
    found, stock = scaled.to(weights)(x), plain.to(weights)(x)
    assert found.dtype == stock.dtype == torch.bfloat16
    for dtype in (torch.float32, torch.float16):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert scaled(x.to(dtype)).dtype == plain(x.to(dtype)).dtype == dtype
    assert (found.double() - exact).abs().max() <= 1.01 * (
        stock.double() / 3**0.5 - exact
    ).abs().max() + 2**-9 * exact.abs().max()
