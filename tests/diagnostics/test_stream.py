"""Output variance and angular distance equal NumPy in fp64."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import olmo_models
from support.diagnostic_models import (
    Identity,
    Linear,
    Mixer,
    Toy,
    huggingface,
    ids,
    matrices,
    numpy_states,
    olmo_states,
)

from olmo_lns.diagnostics.angular import angular_distance
from olmo_lns.diagnostics.capture import observe
from olmo_lns.diagnostics.structure import find_blocks
from olmo_lns.diagnostics.variance import Moments, block_output_variance


def expected(states, keep=None):
    """Return (variance, std over tokens, rms, max) of the outputs of each block, in fp64."""
    found = []
    for state in states[1:]:
        tokens = state.reshape(-1, state.shape[-1]) if keep is None else state[keep]
        v = tokens.var(-1)
        found.append((v.mean(), v.std(), np.sqrt((tokens**2).mean()), np.abs(tokens).max()))
    return np.array(found)


def measured(result):
    return np.array([result.blocks[name] for name in ("variance", "variance_std", "rms", "max")]).T


@pytest.mark.parametrize(("kind", "group"), [("lns_rms", 1), ("lns_rms", 2), ("rms", 1)])
def test_output_statistics_of_olmo_equal_numpy(kind, group):
    model, tokens = olmo_models.build(layer_norm_type=kind, block_group_size=group), olmo_models.tokens()
    result = block_output_variance(model, None, [tokens])
    np.testing.assert_allclose(measured(result), expected(olmo_states(model, tokens, lns=kind != "rms")), rtol=2e-4)


@given(st.lists(st.integers(1, 40), min_size=1, max_size=6), st.integers(1, 9), st.integers(0, 2**31))
@settings(max_examples=40, deadline=None)
def test_the_split_into_batches_does_not_change_the_statistics(sizes, width, seed):
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
def test_padding_is_excluded_from_the_statistics(lengths, seed):
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
    single = block_output_variance(huggingface("llama"), None, [ids()])
    np.testing.assert_allclose(result.main, single.main, rtol=0.05)


@pytest.mark.parametrize("compiled", [False, True])
def test_an_observer_sees_each_call_once_and_only_while_open(compiled):
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
    model(tokens)  # compiled before the observer, as in training
    before = len(graphs)
    with observe(find_blocks(model), lambda block, _, __, hidden: seen.append((block, hidden.detach().clone()))):
        model(tokens)
    model(tokens)
    assert [block for block, _ in seen] == [0, 1]
    for (_, hidden), state in zip(seen, numpy_states(model, tokens)[1:], strict=True):
        np.testing.assert_allclose(hidden.numpy(), state, rtol=1e-5, atol=1e-6)
    assert len(graphs) == before, "observing must not recompile"


def angles(states, keep=None):
    """Return the columns d1, d2, ... averaged over the kept tokens, in fp64, NaN for None."""
    flat = [s.reshape(-1, s.shape[-1]) if keep is None else s[keep] for s in states]
    unit = [s / np.linalg.norm(s, axis=-1, keepdims=True) for s in flat]
    found = np.full((len(unit) - 1, len(unit) - 1), np.nan)
    for i in range(len(unit) - 1):
        for j in range(i + 1, len(unit)):
            found[j - i - 1, i] = np.mean(np.arccos(np.clip((unit[i] * unit[j]).sum(-1), -1, 1))) / np.pi
    return found


def assert_close(found, reference, **tolerance):
    np.testing.assert_allclose(np.array(list(found.blocks.values()), dtype=float), reference, **tolerance)


def test_angular_distance_over_two_batches_equals_numpy():
    model, batches = Toy([Mixer(m) for m in matrices(4)]), [ids(), ids(2, 7, seed=5)]
    result = angular_distance(model, None, batches)
    states = [
        np.concatenate([a.reshape(-1, 8), b.reshape(-1, 8)])
        for a, b in zip(*(numpy_states(model, batch) for batch in batches), strict=True)
    ]
    assert_close(result, angles(states), atol=2e-6)
    assert result.tokens == 36 + 14 and len(result.main) == 4


def test_known_angles_are_measured():
    same = angular_distance(Toy([Identity() for _ in range(5)]), None, [ids()])
    assert max(same.main) < 1e-7  # rounding leaves cosines above 1: without the clamp these are NaN
    quarter = torch.tensor([[0.0, -1.0], [1.0, 0.0]]) - torch.eye(2)
    turned = angular_distance(Toy([Linear(quarter) for _ in range(3)], width=2), None, [ids()])
    assert_close(turned, [[0.5, 0.5, 0.5], [1.0, 1.0, np.nan], [0.5, np.nan, np.nan]], atol=1e-6)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=4).filter(any), st.booleans(), st.integers(0, 99))
@settings(max_examples=25, deadline=None)
def test_angular_distance_leaves_out_padding(lengths, left, seed):
    model, tokens = Toy([Mixer(m) for m in matrices(2)]), ids(len(lengths), 9, seed=seed)
    mask = torch.arange(9) < torch.tensor(lengths)[:, None]
    if left:  # shifted by one position, with padding in front
        tokens, mask = (torch.nn.functional.pad(x, (1, 0)) for x in (tokens, mask))
    result = angular_distance(model, None, [{"input_ids": tokens, "attention_mask": mask.long()}])
    assert_close(result, angles(numpy_states(model, tokens), mask.numpy()), atol=3e-6)
    assert result.tokens == int(mask.sum())
