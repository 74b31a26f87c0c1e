import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import olmo_models
from support.diagnostic_models import (
    Identity,
    Mixer,
    Toy,
    huggingface,
    ids,
    matrices,
    numpy_states,
    olmo_states,
)
from torch import nn

from olmo_lns.diagnostics.capture import observe
from olmo_lns.diagnostics.variance import Moments, block_output_variance
from olmo_lns.errors import LNSError
from olmo_lns.models.blocks import find_blocks


def expected(states, keep=None):
    """Per block (variance, std over tokens, rms, max), in fp64 from outputs."""
    found = []
    for state in states[1:]:
        tokens = state.reshape(-1, state.shape[-1]) if keep is None else state[keep]
        v = tokens.var(-1)
        found.append((v.mean(), v.std(), np.sqrt((tokens**2).mean()), np.abs(tokens).max()))
    return np.array(found)


def measured(result):
    return np.array([result.variance, result.variance_std, result.rms, result.max]).T


@pytest.mark.parametrize(("kind", "group"), [("lns_rms", 1), ("lns_rms", 2), ("rms", 1)])
def test_against_numpy_on_olmo(kind, group):
    model, tokens = olmo_models.build(layer_norm_type=kind, block_group_size=group), olmo_models.tokens()
    result = block_output_variance(model, None, [tokens])
    np.testing.assert_allclose(measured(result), expected(olmo_states(model, tokens, lns=kind != "rms")), rtol=2e-4)


def test_scaled_isotropic_noise_has_its_known_variance():
    moments, generator = Moments(2), torch.Generator().manual_seed(0)
    for _ in range(4):
        noise = torch.randn(8, 64, 512, generator=generator)
        moments.add(0, 3.0 * noise)
        moments.add(1, 3.0 * noise + 100.0)
    # The population variance over d features is an estimate with expectation sigma^2 (d - 1) / d.
    result = moments.result()
    assert result.variance[0] == pytest.approx(9.0 * 511 / 512, rel=0.01)
    assert result.variance[1] == pytest.approx(result.variance[0], rel=1e-3)
    assert result.rms[1] == pytest.approx(np.sqrt(10_009), rel=1e-3)


@given(st.lists(st.integers(1, 40), min_size=1, max_size=6), st.integers(1, 9), st.integers(0, 2**31))
@settings(max_examples=40, deadline=None)
def test_batches_do_not_matter(sizes, width, seed):
    tokens = np.random.default_rng(seed).normal(50.0, 2.0, (sum(sizes), width)).astype(np.float32)
    pieces, whole = Moments(1), Moments(1)
    whole.add(0, torch.from_numpy(tokens)[None])
    for piece in np.split(tokens, np.cumsum(sizes)[:-1]):
        pieces.add(0, torch.from_numpy(piece)[None])
    reference = expected([None, tokens.astype(np.float64)])
    np.testing.assert_allclose(measured(whole.result()), reference, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(measured(pieces.result()), measured(whole.result()), rtol=1e-6, atol=1e-6)
    assert pieces.result().tokens == len(tokens)


@given(st.lists(st.integers(0, 12), min_size=1, max_size=4).filter(any), st.integers(0, 2**31))
@settings(max_examples=25, deadline=None)
def test_padding_is_excluded(lengths, seed):
    model = Toy([Mixer(m) for m in matrices(2)])
    tokens = ids(len(lengths), 12, seed=seed % 1000)
    mask = torch.arange(12) < torch.tensor(lengths)[:, None]
    result = block_output_variance(model, None, [{"input_ids": tokens, "attention_mask": mask.long()}])
    reference = expected(numpy_states(model, tokens), mask.numpy())
    np.testing.assert_allclose(measured(result), reference, rtol=1e-4, atol=1e-6)
    assert result.tokens == sum(lengths)


def test_mode_dtype_and_gradients_are_left_alone():
    model = huggingface("llama").to(torch.bfloat16).train()
    model.model.layers[1].eval()
    result = block_output_variance(model, None, [ids()])
    assert model.training and not model.model.layers[1].training
    assert all(p.grad is None and p.dtype == torch.bfloat16 for p in model.parameters())
    np.testing.assert_allclose(
        result.variance, block_output_variance(huggingface("llama"), None, [ids()]).variance, rtol=0.05
    )


@pytest.mark.parametrize("compiled", [False, True])
def test_observer_sees_each_call_once_and_only_while_open(compiled):
    torch.compiler.reset()
    blocks = [Mixer(m) for m in matrices(2)]
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    model = Toy(blocks)
    if compiled:
        for block in blocks:
            block.compile(backend=backend)
    tokens, seen = ids(), []
    model(tokens)  # compiled before anything watches, as in training
    before = len(graphs)
    with observe(find_blocks(model), on_output=lambda block, hidden: seen.append((block, hidden.detach().clone()))):
        model(tokens)
    model(tokens)
    assert [block for block, _ in seen] == [0, 1]
    for (_, hidden), state in zip(seen, numpy_states(model, tokens)[1:], strict=True):
        np.testing.assert_allclose(hidden.numpy(), state, rtol=1e-5, atol=1e-6)
    assert len(graphs) == before, "watching must not recompile"


def test_bad_input_is_named():
    with pytest.raises(LNSError, match="holds no token"):
        block_output_variance(Toy([Identity(), Identity()]), None, [])

    class Odd(nn.Module):
        def forward(self, x):
            return {"x": x}

    class Wrap(Toy):
        def forward(self, tokens, attention_mask=None):
            for block in self.stack:
                block(self.embed(tokens))

    with pytest.raises(LNSError, match="a block returned dict, expected a tensor"):
        block_output_variance(Wrap([Odd(), Odd()]), None, [ids()])
