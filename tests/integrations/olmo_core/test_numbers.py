"""What the blocks compute, against stock models with the factor folded into gains by a formula written out here."""

import copy
import itertools

import pytest

pytest.importorskip("olmo_core.nn", reason="needs ai2-olmo-core 2.5 to 3.0 (make test-olmo-core)")

import torch
from olmo_core.nn.attention import SlidingWindowAttentionConfig
from olmo_core.nn.layer_norm import LayerNormConfig
from olmo_core.nn.moe.parallel_mlp import ParallelMLPBase
from support import olmo_core_models as small

DENSE = ("default", "reordered_norm")
NORMS = {
    "rms": dict(name="rms", eps=1e-6, bias=False),
    "rms with bias, low precision": dict(name="rms", bias=True, full_precision=False),
    "default": dict(name="default"),
    "qwen_rms": dict(name="qwen_rms", bias=False),  # its output is multiplied
}


OPTIONS = {
    "grouped queries": dict(n_kv_heads=2),
    "QK-norm per head": dict(qk_norm=True, use_head_qk_norm=True),
    "tied embeddings": dict(tie_word_embeddings=True),
    "sliding window": {},
    "factors of the branches": {},
}
#: (block, what a dense block has), the norms and options in turn on both dense blocks.
CASES = [*zip(itertools.cycle(DENSE), [*NORMS, *OPTIONS]), *((n, "") for n in small.SCHEMES if n.startswith("moe"))]


@pytest.fixture(autouse=True)
def experts(monkeypatch):
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


@pytest.mark.parametrize(("block", "case"), CASES)
def test_lns_with_every_norm_and_option_equals_folded_gains(block, case):
    if case == "tied embeddings" and "tie_word_embeddings" not in small.config().__dataclass_fields__:
        pytest.skip("this OLMo-core does not tie embeddings")
    made = small.config(block, *([NORMS[case]] if case in NORMS else []), **OPTIONS.get(case, {}))
    if case == "sliding window":
        made.block.sequence_mixer.sliding_window = SlidingWindowAttentionConfig(
            pattern=[4, -1], force_full_attention_on_first_layer=False
        )
    elif case == "factors of the branches":
        made.block.attention_residual_alpha, made.block.feed_forward_residual_alpha = 0.5, 0.25
    _compare(made, block, exponent=0.25 if case == "default" else 0.5, tolerance=2e-6 if case else 5e-6)


@pytest.mark.parametrize("norm", [dict(name="l2_norm"), dict(name="rms", elementwise_affine=False, bias=False)])
def test_the_output_of_a_norm_without_gain_has_the_factor(norm):
    made = small.config("default", norm)
    scaled, stock = small.model(small.with_scheme(made)), small.model(made)
    for number, block in enumerate(stock.blocks.values(), start=1):
        for each in (block.attention_norm, block.feed_forward_norm):
            each.register_forward_hook(lambda _m, _a, y, s=number**-0.5: y * s)
    torch.testing.assert_close(scaled(small.TOKENS), stock(small.TOKENS), rtol=1e-5, atol=2e-6)


def test_embedding_norm_final_norm_and_qk_norm_have_no_factor():
    made = small.config("default", qk_norm=True)
    made.embedding_norm = LayerNormConfig(name="rms", bias=False)
    built = small.model(small.with_scheme(made))
    scaled = [name for name, module in built.named_modules() if hasattr(module, "lns_scale")]
    assert scaled == [f"blocks.{i}.{n}" for i in range(small.LAYERS) for n in ("attention_norm", "feed_forward_norm")]
    _compare(made, "default")


@pytest.mark.parametrize("norm", ["rms", "default", "qwen_rms"])
@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16])
def test_a_scaled_norm_in_bf16_is_as_near_to_fp64_as_the_stock_norm(norm, weights):
    made = small.config("default", NORMS[norm])
    scaled = small.model(small.with_scheme(made)).blocks["2"].feed_forward_norm
    plain = made.block.layer_norm.build(small.WIDTH)
    plain.load_state_dict(scaled.state_dict())
    x = torch.randn(256, small.WIDTH, generator=torch.Generator().manual_seed(0)).bfloat16()
    centred = x.double() - (x.double().mean(-1, keepdim=True) if norm == "default" else 0)
    exact = centred / (centred.pow(2).mean(-1, keepdim=True) + scaled.eps).sqrt() * scaled.weight.double()
    exact = (exact + (0 if scaled.bias is None else scaled.bias.double())) / 3**0.5
    found, stock = scaled.to(weights)(x), plain.to(weights)(x)
    assert found.dtype == stock.dtype == torch.bfloat16
    for dtype in (torch.float32, torch.float16):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert scaled(x.to(dtype)).dtype == plain(x.to(dtype)).dtype == dtype
    rounding = 1.01 * (stock.double() / 3**0.5 - exact).abs().max() + 2**-9 * exact.abs().max()
    assert (found.double() - exact).abs().max() <= rounding
