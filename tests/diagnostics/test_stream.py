"""Output variance and angular distance equal NumPy in fp64."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.diagnostic_models import Linear, Mixer, Toy, ids, matrices, states_of

from olmo_lns.diagnostics.angular import angular_distance
from olmo_lns.diagnostics.variance import block_output_variance


def expected(states, keep):
    """Return (variance, std over tokens, rms, max) of the outputs of each block, in fp64."""
    found = []
    for state in states[1:]:
        tokens = state[keep]
        v = tokens.var(-1)
        found.append((v.mean(), v.std(), np.sqrt((tokens**2).mean()), np.abs(tokens).max()))
    return np.array(found)


def measured(result):
    return np.array([result.blocks[name] for name in ("variance", "variance_std", "rms", "max")]).T


@given(st.lists(st.integers(0, 12), min_size=2, max_size=5).filter(any), st.integers(0, 999), st.booleans())
@settings(max_examples=25, deadline=None)
def test_padding_and_the_split_into_batches_do_not_change_statistics_and_angles(lengths, seed, left):
    model, tokens = Toy([Mixer(m) for m in matrices(2)]), ids(len(lengths), 12, seed=seed)
    mask = torch.arange(12) < torch.tensor(lengths)[:, None]
    if left:  # shifted by one position, with padding in front
        tokens, mask = (torch.nn.functional.pad(x, (1, 0)) for x in (tokens, mask))
    parts = zip(tokens.split(2), mask.long().split(2), strict=True)
    batches = [{"input_ids": some, "attention_mask": real} for some, real in parts]
    result, states = block_output_variance(model, None, batches), states_of(model, tokens)
    np.testing.assert_allclose(measured(result), expected(states, mask.numpy()), rtol=1e-4, atol=1e-6)
    turned = angular_distance(model, None, batches)
    np.testing.assert_allclose(columns(turned), angles(states, mask.numpy()), atol=3e-6)
    assert result.tokens == turned.tokens == sum(lengths)


def angles(states, keep):
    """Return the columns d1, d2, ... averaged over the kept tokens, in fp64, NaN for None."""
    unit = [s[keep] / np.linalg.norm(s[keep], axis=-1, keepdims=True) for s in states]
    found = np.full((len(unit) - 1, len(unit) - 1), np.nan)
    for i in range(len(unit) - 1):
        for j in range(i + 1, len(unit)):
            found[j - i - 1, i] = np.mean(np.arccos(np.clip((unit[i] * unit[j]).sum(-1), -1, 1))) / np.pi
    return found


def columns(result):
    return np.array(list(result.blocks.values()), dtype=float)


def test_a_block_that_does_nothing_turns_nothing_and_a_quarter_turn_is_a_half():
    same = angular_distance(Toy([Linear(torch.zeros(8, 8)) for _ in range(5)]), None, [ids()])
    assert max(same.main) < 1e-7  # rounding leaves cosines above 1: without the clamp these are NaN
    quarter = torch.tensor([[0.0, -1.0], [1.0, 0.0]]) - torch.eye(2)
    turned = angular_distance(Toy([Linear(quarter) for _ in range(2)], width=2), None, [ids()])
    np.testing.assert_allclose(columns(turned), [[0.5, 0.5], [1.0, np.nan]], atol=1e-6)
