"""Every architecture of the table, as a real model with random weights, and what is said about the others."""

import logging

import numpy as np
import pytest
import torch
from support import olmo_models
from support.diagnostic_models import ARCHITECTURES, LAYERS, Identity, Linear, Toy, huggingface, ids, matrices
from torch import nn

from olmo_lns.diagnostics.angular import angular_distance
from olmo_lns.diagnostics.gradnorm import gradient_norms
from olmo_lns.diagnostics.jacobian import block_jacobians
from olmo_lns.diagnostics.layer_drop import drop_layers
from olmo_lns.diagnostics.variance import block_output_variance
from olmo_lns.errors import LNSError
from olmo_lns.integrations.transformers.families import FAMILIES
from olmo_lns.models.blocks import find_blocks
from olmo_lns.models.loading import load_model


def test_the_table_and_the_models_here_are_the_same():
    assert {kind for kind, family in FAMILIES.items() if not family.vision} == set(ARCHITECTURES)


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_every_diagnostic_runs(kind):
    model, tokens = huggingface(kind), ids(2, 15)
    mask = torch.ones_like(tokens)
    mask[1, 9:] = 0
    batches, extra = (
        [{"input_ids": tokens, "attention_mask": mask}, tokens],
        {"mask_token": 3} if kind == "bert" else {},
    )
    blocks = find_blocks(model)
    assert len(blocks) == LAYERS
    variance = block_output_variance(model, None, batches)
    assert variance.tokens == 24 + 30
    angular = angular_distance(model, None, batches)
    assert all(0 < d < 1 for row in angular.distance for d in row)
    drop = drop_layers(model, None, batches, **extra)
    assert all(abs(loss - drop.baseline_loss) > 1e-6 for loss in drop.loss)
    jacobian = block_jacobians(model, None, batches)
    assert all(d > 0 for d in jacobian.identity_distance) and jacobian.tokens == 4
    gradients = gradient_norms(model, None, batches, **extra)
    assert gradients.loss == pytest.approx(drop.baseline_loss, rel=1e-5)
    assert all(total > 0 for total in gradients.total)


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_saved_and_loaded_models_give_the_raw_block_outputs(kind, tmp_path):
    model, tokens, outputs = huggingface(kind), ids(), []
    model.save_pretrained(tmp_path)
    loaded = load_model(str(tmp_path), device="cpu")
    assert (loaded.kind, loaded.vocabulary, loaded.max_length, loaded.dtype) == ("huggingface", 97, 64, "float32")
    result = block_output_variance(loaded.model, loaded.blocks, [tokens])
    path = {"gpt2": "transformer.h", "gpt_neox": "gpt_neox.layers", "bert": "bert.encoder.layer"}.get(
        kind, "model.layers"
    )
    for block in model.get_submodule(path):
        block.register_forward_hook(lambda _, __, out: outputs.append(out[0] if isinstance(out, tuple) else out))
    with torch.no_grad():
        model(tokens)
    expected = [out.double().numpy().reshape(-1, 32).var(-1).mean() for out in outputs]
    np.testing.assert_allclose(result.variance, expected, rtol=1e-5)


@pytest.mark.parametrize("group", [1, 2])
def test_olmo_blocks_are_in_order_whatever_the_groups(group):
    model = olmo_models.build(layer_norm_type="lns_rms", block_group_size=group)
    assert [block.layer_id for block in find_blocks(model)] == [0, 1, 2, 3]


def test_bf16():
    model = huggingface("llama").to(torch.bfloat16)
    exact = block_output_variance(huggingface("llama"), None, [ids()])
    found = block_output_variance(model, None, [ids()])
    np.testing.assert_allclose(found.variance, exact.variance, rtol=0.05)
    assert max(angular_distance(model, None, [ids()]).adjacent) < 1


def test_unknown_architecture_with_one_list_is_taken_with_a_warning(caplog):
    model = Toy([Linear(m) for m in matrices(3)])
    with caplog.at_level(logging.WARNING):
        assert find_blocks(model) == list(model.stack)
    assert "Toy is not in the table of architectures; taking stack (3 x Linear)" in caplog.text


def test_unsure_lists_the_candidates():
    model = Toy([Identity(), Identity()])
    model.towers = nn.ModuleList([nn.ModuleList([Identity(), Identity()]) for _ in range(3)])
    with pytest.raises(LNSError) as error:
        find_blocks(model)
    message = str(error.value)
    assert "not sure where the transformer blocks of Toy are" in message and "--blocks" in message
    assert "stack (2 x Identity)" in message and "towers (3 x ModuleList)" in message and "\n" not in message
    assert find_blocks(model, "stack") == list(model.stack)


def test_none_and_wrong_paths():
    with pytest.raises(LNSError, match="Candidates: none"):
        find_blocks(nn.Linear(2, 2))
    model = huggingface("llama")
    with pytest.raises(LNSError, match=r"no list of blocks at 'model.blocks' .*model.layers \(3 x LlamaDecoderLayer\)"):
        find_blocks(model, "model.blocks")
    assert find_blocks(model, "model.layers") == find_blocks(model)


def test_one_layer():
    with pytest.raises(LNSError, match="has 1 transformer block: expected at least 2"):
        find_blocks(huggingface("llama", num_hidden_layers=1))
