import weakref

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

from olmo_lns.diagnostics.angular import angular_distance, pairwise_angles
from olmo_lns.errors import LNSError


def expected(states, keep=None):
    """distance[l-1][n-1], averaged over the kept tokens, in fp64."""
    flat = [s.reshape(-1, s.shape[-1]) if keep is None else s[keep] for s in states]
    unit = [s / np.linalg.norm(s, axis=-1, keepdims=True) for s in flat]
    return [
        [np.mean(np.arccos(np.clip((unit[i] * unit[j]).sum(-1), -1, 1))) / np.pi for j in range(i + 1, len(unit))]
        for i in range(len(unit) - 1)
    ]


def assert_close(found, reference, **tolerance):
    assert [len(row) for row in found] == [len(row) for row in reference]
    np.testing.assert_allclose(np.concatenate(found), np.concatenate(reference), **tolerance)


def test_against_numpy_over_two_batches():
    model, batches = Toy([Mixer(m) for m in matrices(4)]), [ids(), ids(2, 7, seed=5)]
    result = angular_distance(model, None, batches)
    states = [
        np.concatenate([a.reshape(-1, 8), b.reshape(-1, 8)])
        for a, b in zip(*(numpy_states(model, batch) for batch in batches), strict=True)
    ]
    assert_close(result.distance, expected(states), atol=2e-6)
    assert result.tokens == 36 + 14 and result.variant == "all tokens"
    assert result.adjacent == [row[0] for row in result.distance] and len(result.adjacent) == 4


@pytest.mark.parametrize("kind", ["lns_rms", "rms"])
def test_against_numpy_on_olmo(kind):
    model, tokens = olmo_models.build(layer_norm_type=kind), olmo_models.tokens()
    result = angular_distance(model, None, [tokens])
    assert_close(result.distance, expected(olmo_states(model, tokens, lns=kind != "rms")), atol=1e-5)


def test_known_angles():
    same = angular_distance(Toy([Identity() for _ in range(5)]), None, [ids()])
    assert max(map(max, same.distance)) < 1e-7  # rounding leaves cosines above 1: without the clamp these are NaN
    quarter = torch.tensor([[0.0, -1.0], [1.0, 0.0]]) - torch.eye(2)
    turned = angular_distance(Toy([Linear(quarter) for _ in range(3)], width=2), None, [ids()])
    assert_close(turned.distance, [[0.5, 1.0, 0.5], [0.5, 1.0], [0.5]], atol=1e-6)


@given(st.integers(1, 5), st.integers(2, 5), st.integers(1, 16), st.floats(1e-6, 1e6), st.integers(0, 2**31))
@settings(max_examples=50, deadline=None)
def test_angles_are_finite_symmetric_and_ignore_size(tokens, states, width, size, seed):
    x = torch.randn(tokens, states, width, generator=torch.Generator().manual_seed(seed))
    x[:, 1] = x[:, 0] * size
    angles = pairwise_angles(x)
    assert bool(torch.isfinite(angles).all()) and float(angles.min()) >= 0 and float(angles.max()) <= 1
    torch.testing.assert_close(angles, angles.transpose(1, 2))
    assert float(angles[:, 0, 1].max()) < 1e-3
    torch.testing.assert_close(angles[:, 0], angles[:, 1], atol=1e-3, rtol=0)


@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=4).filter(any), st.booleans(), st.booleans(), st.integers(0, 99)
)
@settings(max_examples=25, deadline=None)
def test_padding_and_last_token(lengths, last, left, seed):
    model, tokens = Toy([Mixer(m) for m in matrices(2)]), ids(len(lengths), 9, seed=seed)
    position, length = torch.arange(9), torch.tensor(lengths)[:, None]
    keep = (position == length - 1) if last else (position < length)
    mask = position < length
    if left:  # one place further, with padding in front
        tokens, mask, keep = (torch.nn.functional.pad(x, (1, 0)) for x in (tokens, mask, keep))
    batch = {"input_ids": tokens, "attention_mask": mask.long()}
    result = angular_distance(model, None, [batch], last_token=last)
    assert_close(result.distance, expected(numpy_states(model, tokens), keep.numpy()), atol=3e-6)
    assert result.tokens == int(keep.sum())
    assert result.variant == ("last token" if last else "all tokens")


def test_a_bad_embedding_is_named():
    model = huggingface("llama")
    with torch.no_grad():
        model.model.embed_tokens.weight.fill_(float("nan"))
    with pytest.raises(LNSError, match=r"the input of block 1 \(the embedding\) holds NaN"):
        angular_distance(model, None, [ids()])


def test_memory_is_one_batch():
    """No state of an earlier batch is alive when the next one comes."""
    outputs, alive = [], []

    class Recorded(Linear):
        def forward(self, x):
            y = super().forward(x)[0]
            outputs.append(weakref.ref(y))
            return y

    def batches():
        for seed in range(6):
            yield ids(seed=seed)
            alive.append(sum(output() is not None for output in outputs))

    angular_distance(Toy([Recorded(m) for m in matrices(3)]), None, batches())
    assert len(outputs) == 18 and max(alive) <= 3
