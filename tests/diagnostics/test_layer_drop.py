"""A block is removed: the loss equals fp64. Scores of tasks are in test_analyze_cli.py."""

import math

import numpy as np
import pytest
import torch
from support import olmo_models
from support import scheme_reference as reference
from support.diagnostic_models import Linear, Toy, ids, matrices

from olmo_lns.diagnostics.layer_drop import bypassed, drop_layers
from olmo_lns.errors import LNSError


def test_loss_and_standard_error_equal_fp64_with_padding():
    weights, tokens, lengths = list(matrices(3, size=1.0)), ids(5, 9), np.array([9, 4, 7, 1, 2])
    mask = torch.arange(9) < torch.tensor(lengths)[:, None]
    batches = [{"input_ids": tokens[s], "attention_mask": mask[s].long()} for s in (slice(0, 2), slice(2, 5))]
    result = drop_layers(Toy([Linear(m) for m in weights]), None, batches)

    def sums(kept):
        logits = Toy([Linear(m) for m in kept]).double()(tokens)[:, :-1]
        nll = torch.nn.functional.cross_entropy(logits.transpose(1, 2), tokens[:, 1:], reduction="none")
        return (nll * mask[:, 1:]).sum(1).detach().numpy()

    whole, count = sums(weights), np.maximum(lengths - 1, 0)
    assert result.details["baseline_loss"] == pytest.approx(whole.sum() / count.sum(), rel=1e-5)
    assert result.tokens == count.sum()
    for removed in range(3):
        without = sums(weights[:removed] + weights[removed + 1 :])
        assert result.blocks["loss"][removed] == pytest.approx(without.sum() / count.sum(), rel=1e-5)
        residual = (without - whole) - (without - whole).sum() / count.sum() * count
        stderr = math.sqrt((residual**2).sum() * 4 / 3) / count.sum()  # four sequences have a target
        assert result.blocks["increase_stderr"][removed] == pytest.approx(stderr, rel=1e-3)


def test_layer_numbers_are_kept_so_that_lns_factors_do_not_shift():
    model, tokens = olmo_models.build(layer_norm_type="lns_rms", block_group_size=2), olmo_models.tokens()
    losses = drop_layers(model, None, [tokens]).blocks["loss"]
    kept = [_reference_loss(model, tokens, [1, 2, 3, 4], removed) for removed in range(4)]
    np.testing.assert_allclose(losses, kept, rtol=1e-4)
    # Taking the block out of the list would renumber blocks 3 and 4 as 2 and 3.
    shifted = _reference_loss(model, tokens, [1, None, 2, 3], 1)
    assert abs(losses[1] - shifted) > 1e-2


def _reference_loss(model, tokens, numbers, removed):
    weights, config = reference.weights_of(model), model.config
    x = weights["transformer.wte.weight"][tokens]
    for index, number in enumerate(numbers):
        if index != removed:
            block = reference.block_weights(weights, index, config.block_group_size)
            x = reference.block_of(x, block, config, "lns", "rms", number)
    return float(reference.loss_of(reference.logits_of(weights, config, x, "rms"), tokens))


def test_a_loss_that_is_not_finite_and_a_block_that_did_not_run_are_refused():
    class Ones(torch.nn.Module):
        def forward(self, x):
            return torch.ones_like(x)

    class OnlyOnes(torch.nn.Module):
        def forward(self, x):
            return x / (x == 1)

    model = Toy([Linear(next(matrices(1))), Ones(), OnlyOnes()])
    with pytest.raises(LNSError, match="A block did not run on these data"), bypassed(model.stack[0]):
        pass
    with pytest.raises(LNSError, match="loss of block 2 is NaN or infinite"):
        drop_layers(model, list(model.stack), [ids()])


def test_a_compiled_block_is_removed_too():
    weights, tokens = list(matrices(3, size=1.0)), ids()
    model = Toy([Linear(m) for m in weights])
    expected = drop_layers(model, None, [tokens])
    for block in model.stack:
        block.compile(backend="eager")
    assert drop_layers(model, None, [tokens]).blocks == expected.blocks
