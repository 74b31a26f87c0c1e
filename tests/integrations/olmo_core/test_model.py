"""A built model: its keys and weights, and what OLMo-core does with it afterwards."""

import copy
import itertools
import logging

import pytest

pytest.importorskip("olmo_core.nn", reason="needs ai2-olmo-core 2.5 to 3.0 (make test-olmo-core)")

import torch
from olmo_core.nn.moe.parallel_mlp import ParallelMLPBase
from olmo_core.nn.transformer import TransformerActivationCheckpointingMode as Mode
from olmo_core.testing import run_distributed_test
from support import olmo_core_models as small
from support import olmo_core_ranks

from olmo_lns import sites
from olmo_lns.errors import LNSConfigError
from olmo_lns.olmo_core import apply


@pytest.mark.parametrize(
    ("block", "method"), list(zip(small.SCHEMES, itertools.cycle(["normal", "fan_in"]), strict=False))
)
def test_a_model_under_a_scheme_has_the_keys_and_initial_weights_of_stock(block, method, monkeypatch):
    monkeypatch.setattr(ParallelMLPBase, "forward", small.dense_experts)
    config = small.config(block)
    config.init_method = type(config.init_method)(method)
    stock, scaled = small.model(config, seed=None), small.model(small.with_scheme(config), seed=None)
    found, expected = scaled.state_dict(), stock.state_dict()
    assert list(found) == list(expected)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert [n for n, _ in scaled.named_parameters()] == [n for n, _ in stock.named_parameters()]
    assert [n for n, _ in scaled.named_buffers()] == [n for n, _ in stock.named_buffers()]


@pytest.mark.parametrize("method", ["llama", "llama_depth", "normalized"])
def test_depth_scaled_initialization_is_refused_unless_asked_for(method, caplog):
    config = small.config()
    config.init_method = type(config.init_method)(method)
    message = f"init_method={method} draws the residual output projections with a depth factor"
    with pytest.raises(LNSConfigError, match=message):
        small.model(apply(copy.deepcopy(config)))
    with caplog.at_level(logging.INFO, logger="olmo_lns"):
        kept = small.model(apply(copy.deepcopy(config), initialization="upstream"), seed=None)
    assert "s = 1 (block 1) to 0.5 (block 4)" in caplog.text and "measured: sites, output, gradient" in caplog.text
    assert "scaled initialization as upstream" in caplog.text
    stock = small.model(config, seed=None)
    assert all(torch.equal(a, b) for a, b in zip(kept.parameters(), stock.parameters(), strict=True))


@pytest.mark.slow
def test_ddp_fsdp_hsdp_tensor_pipeline_and_context_parallel_equal_one_process():
    """Four gloo processes run on one CPU."""
    blocks, everything = ("default", "reordered_norm"), olmo_core_ranks.everything
    run_distributed_test(everything, world_size=4, backend="gloo", start_method="spawn", func_args=(blocks,))


def _gradients(built):
    built.zero_grad()
    small.loss_of(built(small.TOKENS)).backward()
    return {name.replace("_checkpoint_wrapped_module.", ""): p.grad.clone() for name, p in built.named_parameters()}


@pytest.mark.parametrize(
    ("mode", "arguments"),
    [
        (Mode.full, {}),
        (Mode.selected_blocks, {"block_interval": 2}),
        (Mode.selected_modules, {"modules": ["blocks.*.feed_forward_norm", "blocks.*.attention"]}),
        (Mode.selected_ops, {}),
    ],
)
@pytest.mark.parametrize("block", ["default", "reordered_norm"])
def test_activation_checkpointing_gives_the_same_gradients(mode, arguments, block):
    config = small.with_scheme(small.config(block))
    expected, built = _gradients(small.model(config)), small.model(config)
    built.apply_activation_checkpointing(mode, **arguments)
    found = _gradients(built)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    sites.require_complete(built, config.block.resolved_scheme, small.LAYERS)
    built.init_weights(device=torch.device("cpu"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("norm", "checkpointed"),
    [(dict(name="rms", bias=False), False), (dict(name="rms", bias=False), True), (dict(name="default"), True)],
)
def test_a_compiled_model_gives_the_same_gradients(norm, checkpointed):
    torch._dynamo.reset()
    config = apply(small.config("default", norm))
    expected = _gradients(small.model(config))
    built = small.model(config)
    if checkpointed:
        built.apply_activation_checkpointing(Mode.full)
        for block in built.blocks.values():
            block.compile(backend="aot_eager")  # the same tracing in a fraction of the time
    else:
        built.apply_compile()
    torch._dynamo.utils.counters.clear()
    found = _gradients(built)
    # One graph for all four blocks, and one for the head.
    assert checkpointed or torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2
    for name, grad in expected.items():
        torch.testing.assert_close(found[name], grad, rtol=1e-4, atol=1e-6)
