"""The outputs of the blocks, against stock models whose norms are multiplied by hooks."""

import copy
import itertools

import pytest

pytest.importorskip("olmo_core.nn", reason="needs ai2-olmo-core 2.5 to 3.0 (make test-olmo-core)")

import torch
from olmo_core.nn.attention import SlidingWindowAttentionConfig
from olmo_core.nn.layer_norm import LayerNormConfig
from olmo_core.nn.moe.parallel_mlp import ParallelMLPBase
from support import olmo_core_models as small
from support.hooked import hooked

DENSE = ("default", "reordered_norm")
NORMS = {
    "rms": dict(name="rms", eps=1e-6, bias=False),
    "rms with bias, low precision": dict(name="rms", bias=True, full_precision=False),
    "default": dict(name="default"),
    "qwen_rms": dict(name="qwen_rms", bias=False),  # its output is multiplied
    "l2_norm": dict(name="l2_norm"),
    "rms without gain": dict(name="rms", elementwise_affine=False, bias=False),
}
OPTIONS = {
    "grouped queries": dict(n_kv_heads=2),
    "QK-norm per head": dict(qk_norm=True, use_head_qk_norm=True),
    "tied embeddings": dict(tie_word_embeddings=True),
    "embedding norm": dict(qk_norm=True),
    "sliding window": {},
    "factors of the branches": {},
}
#: (block, what a dense block has), the norms and options in turn on both dense blocks.
CASES = [*zip(itertools.cycle(DENSE), [*NORMS, *OPTIONS]), *((n, "") for n in small.SCHEMES if n.startswith("moe"))]


@pytest.mark.parametrize(("block", "case"), CASES)
def test_logits_and_gradients_equal_those_of_hooks(block, case, monkeypatch):
    """The factor is on the norms of the two sub-layers only."""
    monkeypatch.setattr(ParallelMLPBase, "forward", small.dense_experts)
    if case == "tied embeddings" and "tie_word_embeddings" not in small.config().__dataclass_fields__:
        pytest.skip("this OLMo-core does not tie embeddings")
    config = small.config(block, *([NORMS[case]] if case in NORMS else []), **OPTIONS.get(case, {}))
    if case == "sliding window":
        config.block.sequence_mixer.sliding_window = SlidingWindowAttentionConfig(
            pattern=[4, -1], force_full_attention_on_first_layer=False
        )
    elif case == "factors of the branches":
        config.block.attention_residual_alpha, config.block.feed_forward_residual_alpha = 0.5, 0.25
    elif case == "embedding norm":
        config.embedding_norm = LayerNormConfig(name="rms", bias=False)
    exponent, tolerance = 0.25 if case == "default" else 0.5, 2e-6 if case else 5e-6
    scaled, stock = small.model(small.with_scheme(config, exponent=exponent)), small.model(copy.deepcopy(config))
    assert list(stock.state_dict()) == list(scaled.state_dict())
    names = [f"blocks.{i}.{name}" for i in range(small.LAYERS) for name in small.SCHEMES[block][1]]
    assert sorted(name for name, module in scaled.named_modules() if hasattr(module, "lns_scale")) == sorted(names)
    stock.load_state_dict(scaled.state_dict())
    with torch.no_grad():
        assert (stock(small.TOKENS) - scaled(small.TOKENS)).abs().max() > 1e-3  # without the hooks it is another model
    hooked(stock, stock.blocks.values(), small.SCHEMES[block][1], exponent)
    found, expected = scaled(small.TOKENS), stock(small.TOKENS)
    torch.testing.assert_close(found, expected, rtol=tolerance * 10, atol=tolerance)
    for logits in (found, expected):
        small.loss_of(logits).backward()
    wanted = dict(stock.named_parameters())
    for name, parameter in scaled.named_parameters():
        grad = wanted[name].grad
        torch.testing.assert_close(parameter.grad, grad, rtol=1e-4, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("norm", ["rms", "default", "qwen_rms"])
@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16])
def test_a_scaled_norm_in_bf16_has_the_dtype_and_values_of_the_stock_norm(norm, weights):
    config = small.config("default", NORMS[norm])
    scaled = small.model(small.with_scheme(config)).blocks["2"].feed_forward_norm
    plain = config.block.layer_norm.build(small.WIDTH)
    plain.load_state_dict(scaled.state_dict())
    x = torch.randn(256, small.WIDTH, generator=torch.Generator().manual_seed(0))
    exact = plain(x.bfloat16().float()) / 3**0.5
    found, stock = scaled.to(weights)(x.bfloat16()), plain.to(weights)(x.bfloat16())
    assert found.dtype == stock.dtype == torch.bfloat16
    assert (found - exact).abs().max() <= 1.01 * (stock / 3**0.5 - exact).abs().max() + 2**-9 * exact.abs().max()
    for dtype in (torch.float32, torch.float16):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert scaled(x.to(dtype)).dtype == plain(x.to(dtype)).dtype == dtype
