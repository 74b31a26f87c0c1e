"""Jacobians and gradient norms equal references in fp64."""

import numpy as np
import pytest
import torch
from support import olmo_models
from support import scheme_reference as reference
from support.diagnostic_models import Linear, Mixer, Toy, huggingface, ids, matrices

from olmo_lns.diagnostics.gradient_norm import gradient_norms
from olmo_lns.diagnostics.jacobian import block_jacobians
from olmo_lns.errors import LNSError


def metrics(jacobian):
    """Return (distance to the identity, diagonal dominance, mean diagonal) of a full fp64 matrix."""
    width = len(jacobian)
    distance = np.linalg.norm(jacobian - np.eye(width)) / np.sqrt(width)
    dominance = np.mean(np.abs(np.diag(jacobian)) / np.abs(jacobian).sum(1))
    return distance, dominance, np.diag(jacobian).mean()


def test_a_jacobian_under_lns_equals_the_derivative_of_the_fp64_block():
    model, tokens = olmo_models.build(layer_norm_type="lns_rms"), olmo_models.tokens(2, 5)
    result = block_jacobians(model, None, [tokens], seed=3)
    generator = torch.Generator().manual_seed(3)
    positions = torch.multinomial(torch.ones(2, 5).double(), 1, generator=generator).squeeze(1).tolist()
    weights = reference.weights_of(model)
    states = reference.states_of(weights, model.config, "lns", "rms", tokens)
    for index in range(4):
        block = reference.block_weights(weights, index, 1)

        def run(x, block=block, number=index + 1):
            return reference.block_of(x, block, model.config, "lns", "rms", number)

        found = []
        for b, t in enumerate(positions):
            x = states[index][[b]]
            every = torch.autograd.functional.jacobian(lambda x, t=t, run=run: run(x)[0, t], x)
            found.append(every[:, 0, t].numpy())
        measured = [column[index] for column in result.blocks.values()]
        np.testing.assert_allclose(measured, metrics(np.mean(found, axis=0)), rtol=1e-3)
        np.testing.assert_allclose(result.details["heat_maps"][index], np.mean(found, axis=0), rtol=1e-3, atol=1e-5)
    assert result.tokens == 2 and result.details["method"] == "exact"


def test_the_projected_distance_is_unbiased():
    matrix, distances = next(matrices(1)), {}
    model = Toy([Linear(matrix), Linear(matrix)])
    for seed in range(200):
        found = block_jacobians(model, None, [ids(1, 2)], rows=2, seed=seed)
        distances[tuple(found.details["coordinates"])] = found.main[0]
    assert len(distances) == 8 * 7 / 2, "every pair of rows was drawn"
    exact = float((matrix.double() ** 2).sum()) / 8
    assert np.mean(np.square(list(distances.values()))) == pytest.approx(exact, rel=1e-5)


def test_no_jacobian_is_taken_at_a_padded_position():
    model, tokens, mask = Toy([Mixer(m) for m in matrices(2)]), ids(3, 9), torch.zeros(3, 9, dtype=torch.long)
    mask[0, :4] = mask[2, :4] = 1  # the second sequence is padding only
    padded = block_jacobians(model, None, [{"input_ids": tokens, "attention_mask": mask}])
    again = block_jacobians(model, None, [{"input_ids": tokens * mask, "attention_mask": mask}])
    assert padded.tokens == 2 and padded.blocks == again.blocks


def test_gradient_norms_with_padding_and_several_batches_equal_fp64_of_one_loss():
    model, tokens = Toy([Mixer(m) for m in matrices(3)]), ids(4, 9)
    mask = torch.arange(9) < torch.tensor([9, 5, 2, 7])[:, None]
    batches = [{"input_ids": tokens[s], "attention_mask": mask[s].long()} for s in (slice(0, 3), slice(3, 4))]
    model.head.weight.grad = torch.full_like(model.head.weight, 7.0)
    result = gradient_norms(model, None, batches)
    assert bool((model.head.weight.grad == 7).all()) and model.embed.weight.grad is None, "the model keeps its own"
    wide = Toy([Mixer(m) for m in matrices(3)]).double()
    loss = torch.nn.functional.cross_entropy(wide(tokens)[:, :-1][mask[:, 1:]], tokens[:, 1:][mask[:, 1:]])
    loss.backward()
    norms = {name: float(p.grad.norm()) for name, p in wide.named_parameters()}
    assert result.details["loss"] == pytest.approx(loss.item(), rel=1e-5)
    np.testing.assert_allclose(result.main, [norms[f"stack.{i}.proj.weight"] for i in range(3)], rtol=1e-4)
    assert result.details["outside"] == pytest.approx({n: norms[n] for n in ("embed.weight", "head.weight")}, rel=1e-4)
    assert result.tokens == 8 + 4 + 1 + 6


def test_a_gradient_that_is_not_finite_is_refused_with_its_blocks():
    """The loss is finite; the gradient becomes infinite in block 2, and the backward pass carries it to block 1."""
    model = huggingface("llama")
    for layer in model.model.layers[:2]:
        layer.mlp.down_proj.weight.register_hook(lambda gradient: gradient * float("inf"))
    with pytest.raises(LNSError, match="gradnorm: total of block 1, 2 is NaN or infinite"):
        gradient_norms(model, None, [ids()])
