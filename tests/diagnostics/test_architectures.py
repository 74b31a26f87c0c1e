"""Every diagnostic on every architecture of the table, with random weights; and architectures outside the table."""


import numpy as np
import pytest
import torch
from support.diagnostic_models import ARCHITECTURES, LAYERS, Identity, Linear, Toy, huggingface, ids, matrices
from torch import nn

from olmo_lns.diagnostics.angular import angular_distance
from olmo_lns.diagnostics.gradients import block_jacobians, gradient_norms, kind_of
from olmo_lns.diagnostics.layer_drop import drop_layers
from olmo_lns.diagnostics.variance import block_output_variance
from olmo_lns.errors import LNSError
from olmo_lns.models.loading import load_model
from olmo_lns.models.structure import find_blocks

PATHS = {"gpt2": "transformer.h", "gpt_neox": "gpt_neox.layers", "bert": "bert.encoder.layer"}


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_every_diagnostic_runs_on_a_saved_model(kind, tmp_path):
    model, tokens, outputs = huggingface(kind), ids(2, 15), []
    model.save_pretrained(tmp_path)
    loaded = load_model(str(tmp_path), device="cpu")
    assert (loaded.kind, loaded.vocabulary, loaded.max_length, loaded.dtype) == ("huggingface", 97, 64, "float32")
    assert len(loaded.blocks) == LAYERS
    for block in model.get_submodule(PATHS.get(kind, "model.layers")):
        block.register_forward_hook(lambda _, __, out: outputs.append(out[0] if isinstance(out, tuple) else out))
    with torch.no_grad():
        model(tokens[1:, :9])
        model(tokens)
    rows = [out.double().numpy().reshape(-1, 32).var(-1) for out in outputs]
    expected = [np.concatenate(pair).mean() for pair in zip(rows[:LAYERS], rows[LAYERS:], strict=True)]
    padded = {"input_ids": tokens[1:], "attention_mask": (torch.arange(15) < 9).long()[None]}
    common, extra = (loaded.model, loaded.blocks, [padded, tokens]), {"mask_token": 3} if kind == "bert" else {}
    variance = block_output_variance(*common)
    np.testing.assert_allclose(variance.variance, expected, rtol=1e-5)
    assert variance.tokens == 9 + 30
    assert all(0 < d < 1 for row in angular_distance(*common).distance for d in row)
    drop = drop_layers(*common, **extra)
    assert all(abs(increase) > 1e-6 for increase in drop.increase)
    jacobian = block_jacobians(*common)
    assert all(d > 0 for d in jacobian.identity_distance) and jacobian.tokens == 3
    gradients = gradient_norms(*common, **extra)
    assert gradients.loss == pytest.approx(drop.baseline_loss, rel=1e-5) and all(n > 0 for n in gradients.total)
    # The norms of the first OLMo have no parameters.
    assert {kind_of(name) for name in gradients.parameters[0]} | {"norm"} == {"norm", "attention", "mlp"}
    assert all(kind_of(name) == "norm" for name in gradients.parameters[0] if "norm" in name.lower() or "ln_" in name)


def test_the_blocks_of_an_unknown_architecture_are_found_or_asked_for():
    model = Toy([Linear(m) for m in matrices(3)])
    assert find_blocks(model) == list(model.stack)
    model.stack = nn.ModuleList([Identity(), Identity()])
    model.towers = nn.ModuleList([nn.ModuleList([Identity(), Identity()]) for _ in range(3)])
    with pytest.raises(LNSError) as error:
        find_blocks(model)
    message = str(error.value)
    assert "Toy has no list of blocks" in message and "--blocks" in message
    assert "stack (2 x Identity)" in message and "towers (3 x ModuleList)" in message and "\n" not in message
    assert find_blocks(model, "stack") == list(model.stack)
