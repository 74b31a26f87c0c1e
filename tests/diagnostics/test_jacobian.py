import numpy as np
import pytest
import torch
from support import olmo_models
from support import scheme_reference as reference
from support.diagnostic_models import Linear, Mixer, Toy, huggingface, ids, matrices

from olmo_lns.diagnostics.jacobian import _coordinates, block_jacobians
from olmo_lns.errors import LNSError


def metrics(jacobian):
    """(distance to the identity, diagonal dominance, mean diagonal) of a full fp64 matrix."""
    width = len(jacobian)
    distance = np.linalg.norm(jacobian - np.eye(width)) / np.sqrt(width)
    dominance = np.mean(np.abs(np.diag(jacobian)) / np.abs(jacobian).sum(1))
    return distance, dominance, np.diag(jacobian).mean()


def test_linear_block_has_the_jacobian_of_its_matrix():
    blocks = [torch.zeros(8, 8), *matrices(2)]  # the first does nothing: distance 0, dominance 1
    result = block_jacobians(Toy([Linear(m) for m in blocks]), None, [ids(), ids(2, 5)])
    for index, matrix in enumerate(blocks):
        reference = np.eye(8) + matrix.double().numpy()
        found = result.identity_distance[index], result.diagonal_dominance[index], result.diagonal_mean[index]
        np.testing.assert_allclose(found, metrics(reference), rtol=1e-5, atol=1e-12)
        np.testing.assert_allclose(result.heat_maps[index], reference, rtol=1e-3)
    assert result.tokens == 5 and result.method == "exact"


@pytest.mark.parametrize(("kind", "scheme"), [("lns_rms", "lns"), ("rms", "preln")])
def test_against_the_derivative_of_the_fp64_block(kind, scheme):
    model, tokens = olmo_models.build(layer_norm_type=kind), olmo_models.tokens(2, 5)
    result = block_jacobians(model, None, [tokens], seed=3)
    generator = torch.Generator().manual_seed(3)
    positions = torch.multinomial(torch.ones(2, 5).double(), 1, generator=generator).squeeze(1).tolist()
    weights = reference.weights_of(model)
    states = reference.states_of(weights, model.config, scheme, "rms", tokens)
    for index in range(4):
        block = reference.block_weights(weights, index, 1)

        def run(x, block=block, number=index + 1):
            return reference.block_of(x, block, model.config, scheme, "rms", number)

        found = []
        for b, t in enumerate(positions):
            x = states[index][[b]]
            every = torch.autograd.functional.jacobian(lambda x, t=t, run=run: run(x)[0, t], x)
            found.append(every[:, 0, t].numpy())
        measured = result.identity_distance[index], result.diagonal_dominance[index], result.diagonal_mean[index]
        np.testing.assert_allclose(measured, metrics(np.mean(found, axis=0)), rtol=1e-3)


def test_projected_rows_are_rows_of_the_exact_one():
    model, tokens = huggingface("llama"), ids()
    exact = block_jacobians(model, None, [tokens], seed=1)
    some = block_jacobians(model, None, [tokens], rows=8, seed=1)
    assert exact.method == "exact" and some.method == "projected"
    assert some.coordinates == some.heat_map_coordinates and len(some.coordinates) == 8
    # The positions are drawn before the coordinates, so both saw the same tokens.
    whole = np.array(exact.heat_maps[1])
    np.testing.assert_allclose(
        np.array(some.heat_maps[1]), whole[np.ix_(some.coordinates, some.coordinates)], rtol=2e-3, atol=1e-5
    )


def test_projected_distance_is_unbiased():
    matrix = next(matrices(1))
    model = Toy([Linear(matrix), Linear(matrix)])
    pairs = [(i, j) for i in range(8) for j in range(i)]
    draws = {tuple(found.coordinates): found.identity_distance[0] for seed in range(200) for found in [block_jacobians(model, None, [ids(1, 2)], rows=2, seed=seed)]}  # fmt: skip
    assert len(draws) == len(pairs), "every pair of rows was drawn"
    exact = float((matrix.double() ** 2).sum()) / 8
    assert np.mean([distance**2 for distance in draws.values()]) == pytest.approx(exact, rel=1e-5)


def test_wide_models_are_projected_by_default():
    generator = torch.Generator().manual_seed(0)
    assert len(_coordinates(256, None, generator)) == 256
    assert len(_coordinates(4096, None, generator)) == 128
    with pytest.raises(LNSError, match="--rows must be at least 1"):
        _coordinates(64, 0, generator)


def test_padding_is_never_chosen():
    model = Toy([Mixer(m) for m in matrices(2)])
    tokens = ids(3, 9)
    mask = torch.zeros(3, 9, dtype=torch.long)
    mask[0, :4] = mask[2, :4] = 1  # the second sequence is padding only
    padded = block_jacobians(model, None, [{"input_ids": tokens, "attention_mask": mask}])
    assert padded.tokens == 2
    changed = tokens.clone()
    changed[:, 4:] = 0
    changed[1] = 5
    again = block_jacobians(model, None, [{"input_ids": changed, "attention_mask": mask}])
    assert padded.identity_distance == again.identity_distance
