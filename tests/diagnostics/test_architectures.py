"""Every diagnostic on every architecture of the table, with random weights."""

import numpy as np
import pytest
import torch
from support.diagnostic_models import ARCHITECTURES, LAYERS, huggingface, ids

from olmo_lns.diagnostics.angular import angular_distance
from olmo_lns.diagnostics.capture import find_blocks
from olmo_lns.diagnostics.gradient_norm import block_part, gradient_norms
from olmo_lns.diagnostics.jacobian import block_jacobians
from olmo_lns.diagnostics.layer_drop import drop_layers
from olmo_lns.diagnostics.variance import block_output_variance
from olmo_lns.errors import LNSError

PATHS = {"gpt2": "transformer.h", "gpt_neox": "gpt_neox.layers", "bert": "bert.encoder.layer"}


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_every_diagnostic_runs(kind):
    model, tokens, outputs = huggingface(kind), ids(2, 15), []
    blocks = find_blocks(model)
    assert blocks == list(model.get_submodule(PATHS.get(kind, "model.layers"))) and len(blocks) == LAYERS
    hooks = [
        block.register_forward_hook(lambda _, __, out: outputs.append(out[0] if isinstance(out, tuple) else out))
        for block in blocks
    ]
    with torch.no_grad():
        model(tokens[1:, :9])
        model(tokens)
    for hook in hooks:
        hook.remove()
    rows = [out.double().numpy().reshape(-1, 32).var(-1) for out in outputs]
    expected = [np.concatenate(pair).mean() for pair in zip(rows[:LAYERS], rows[LAYERS:], strict=True)]
    padded = {"input_ids": tokens[1:], "attention_mask": (torch.arange(15) < 9).long()[None]}
    common = (model, None, [padded, tokens])
    variance = block_output_variance(*common)
    np.testing.assert_allclose(variance.main, expected, rtol=1e-5)
    assert variance.tokens == 9 + 30
    assert all(0 < d < 1 for d in angular_distance(*common).main)
    jacobian = block_jacobians(*common)
    assert all(d > 0 for d in jacobian.main) and jacobian.tokens == 3
    if kind == "bert":
        with pytest.raises(LNSError, match="predicts masked tokens"):
            drop_layers(*common)
        return
    drop, gradients = drop_layers(*common), gradient_norms(*common)
    assert all(abs(increase) > 1e-6 for increase in drop.main) and all(n > 0 for n in gradients.main)
    assert gradients.details["loss"] == pytest.approx(drop.details["baseline_loss"], rel=1e-5)
    names = [name for name, _ in blocks[0].named_parameters()]
    kinds = {"norm", "attention", "mlp"} - ({"norm"} if kind == "olmo" else set())  # its norms have no parameters
    assert gradients.blocks.keys() == {"total", *kinds, *names}
    for parts in (kinds, names):
        squares = [np.square(gradients.blocks[name]) for name in parts]
        np.testing.assert_allclose(np.sum(squares, axis=0), np.square(gradients.main), rtol=1e-6)
    assert all(block_part(name) == "norm" for name in names if "norm" in name.lower() or "ln_" in name)
