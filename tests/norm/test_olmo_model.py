"""An OLMo model whose norms run on the Transformer Engine operators (over the stand-in) equals it on PyTorch's."""

from __future__ import annotations

import copy
import pickle

import olmo
import pytest
import torch
from olmo.config import InitFnType
from support import norm_reference as reference
from support import tex

from olmo_lns.integrations.olmo import register
from olmo_lns.norm import choose_backend

LAYERS = 3


def build(layer_norm_type):
    register()
    config = olmo.ModelConfig(
        d_model=32, n_heads=4, n_layers=LAYERS, max_sequence_length=16, vocab_size=64, embedding_size=64, rope=True,
        layer_norm_type=layer_norm_type, init_device="cpu", init_fn=InitFnType.normal, include_bias=False,
        attention_dropout=0.0, residual_dropout=0.0, embedding_dropout=0.0, weight_tying=False,
    )  # fmt: skip
    torch.manual_seed(0)
    return olmo.OLMo(config)


def run(model, autocast):
    tokens = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(0))
    model.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        logits = model(tokens).logits
    logits.float().square().mean().backward()
    return logits.detach(), *(p.grad.clone() for p in model.parameters())


@pytest.mark.parametrize("layer_norm_type", ["lns_rms", "lns_default", "lns_low_precision"])
@pytest.mark.parametrize("autocast", [False, True])
def test_te_equals_torch(layer_norm_type, autocast):
    with tex.installed():
        model = build(layer_norm_type)
        norms = [module for module in model.modules() if hasattr(module, "lns_backend")]
        assert len(norms) == 2 * LAYERS and {norm.lns_backend.name for norm in norms} == {"te"}
        with_te = run(model, autocast)
        kind = "rmsnorm" if layer_norm_type == "lns_rms" else "layernorm"
        assert [call[0] for call in tex.CALLS].count(f"{kind}_fwd") == 2 * LAYERS
        assert [call[0] for call in tex.CALLS].count(f"{kind}_bwd") == 2 * LAYERS
        for norm in norms:
            norm.lns_backend = choose_backend("torch")
        with_torch = run(model, autocast)
    for got, want in zip(with_te, with_torch, strict=True):
        assert reference.relative_error(got, want) < (2e-2 if autocast else 1e-5)


def test_a_model_built_with_te_runs_where_there_is_none():
    with tex.installed():
        model = build("lns_rms")
        expected = run(model, False)
        twins = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    for twin in twins:
        for got, want in zip(run(twin, False), expected, strict=True):
            assert reference.relative_error(got, want) < 1e-5


@pytest.mark.parametrize("layer_norm_type", ["lns_rms", "lns_default"])
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.slow
def test_compiled_blocks_may_be_checkpointed(layer_norm_type, affine):
    """A float of the layer would make the recomputation run another graph: torch's CheckpointError."""
    with tex.installed():
        torch._dynamo.reset()
        model = build(layer_norm_type)
        if not affine:
            for norm in (m for m in model.modules() if hasattr(m, "lns_backend")):
                norm.weight = norm.bias = None
        expected = run(model, False)
        model.set_activation_checkpointing(olmo.config.ActivationCheckpointingStrategy.whole_layer)
        for block in model.transformer.blocks:
            block.compile(backend="aot_eager", fullgraph=True)
        found = run(model, False)
    for got, want in zip(found, expected, strict=True):
        assert reference.relative_error(got, want) < 1e-5
