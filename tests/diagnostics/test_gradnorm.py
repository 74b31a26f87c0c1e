import numpy as np
import pytest
import torch
from support.diagnostic_models import Linear, Toy, huggingface, ids, matrices, numpy_states

from olmo_lns.diagnostics.gradnorm import gradient_norms, kind_of
from olmo_lns.errors import LNSError


def by_hand(model, tokens, keep):
    """fp64 back-propagation through x + x A^T blocks; norms of the mean loss's gradients."""
    states = numpy_states(model, tokens)
    head = model.head.weight.detach().double().numpy()
    logits = states[-1][:, :-1] @ head.T
    p = np.exp(logits - logits.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    target = tokens.numpy()[:, 1:]
    loss = -np.log(np.take_along_axis(p, target[..., None], -1)[..., 0])[keep].mean()
    np.put_along_axis(p, target[..., None], np.take_along_axis(p, target[..., None], -1) - 1, -1)
    d_logits = np.where(keep[..., None], p, 0) / keep.sum()
    head_norm = np.linalg.norm(np.einsum("btv,btd->vd", d_logits, states[-1][:, :-1]))
    g = np.zeros_like(states[-1])
    g[:, :-1] = d_logits @ head
    norms = []
    for block, x in zip(reversed(model.stack), reversed(states[:-1]), strict=True):
        norms.insert(0, np.linalg.norm(np.einsum("bti,btj->ij", g, x)))
        g = g + g @ block.proj.detach().double().numpy()
    d_embed = np.zeros(model.embed.weight.shape)
    np.add.at(d_embed, tokens.numpy(), g)
    return loss, norms, np.linalg.norm(d_embed), head_norm


def test_against_numpy_with_padding_and_several_batches():
    model, tokens = Toy([Linear(m) for m in matrices(3)]), ids(4, 9)
    mask = torch.arange(9) < torch.tensor([9, 5, 2, 7])[:, None]
    batches = [{"input_ids": tokens[s], "attention_mask": mask[s].long()} for s in (slice(0, 3), slice(3, 4))]
    result = gradient_norms(model, None, batches)
    loss, norms, embed, head = by_hand(model, tokens, mask.numpy()[:, 1:])
    assert result.loss == pytest.approx(loss, rel=1e-5)
    np.testing.assert_allclose(result.total, norms, rtol=1e-4)
    assert result.outside["embed.weight"] == pytest.approx(embed, rel=1e-4)
    assert result.outside["head.weight"] == pytest.approx(head, rel=1e-4)
    assert result.tokens == 8 + 4 + 1 + 6


def test_parts_add_up_and_the_model_keeps_its_gradients():
    model = huggingface("qwen3")
    weight = model.model.layers[0].mlp.up_proj.weight
    weight.grad = torch.full_like(weight, 7.0)
    result = gradient_norms(model, None, [ids()])
    assert bool((weight.grad == 7).all()) and model.lm_head.weight.grad is None
    for total, kinds, parameters in zip(result.total, result.kinds, result.parameters, strict=True):
        assert set(kinds) == {"norm", "attention", "mlp"}
        assert sum(n**2 for n in kinds.values()) == pytest.approx(total**2)
        assert sum(n**2 for n in parameters.values()) == pytest.approx(total**2)
        assert parameters["self_attn.q_norm.weight"] > 0
    rows = result.frame()
    assert set(rows["block"]) == {0, 1, 2, 3} and set(rows["kind"][rows["block"] == 0]) == {"outside"}


def test_kinds_of_olmo_parameters():
    expected = {
        "attn_out.weight": "attention",
        "att_proj.weight": "attention",
        "q_proj.weight": "attention",
        "ff_proj.weight": "mlp",
        "ff_out.bias": "mlp",
        "attn_norm.weight": "norm",
        "k_norm.weight": "norm",
        "rotary.scale": "other",
    }
    assert {name: kind_of(name) for name in expected} == expected


def test_bad_input():
    model = huggingface("llama")
    with pytest.raises(LNSError, match="no token to predict"):
        gradient_norms(model, None, [ids(2, 1)])
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[0, 0] = float("nan")
    with pytest.raises(LNSError, match="the loss is not finite: run `olmo-lns analyze variance`"):
        gradient_norms(model, None, [ids()])


def test_a_gradient_that_overflows_is_named_where_it_starts():
    """The loss is finite; the gradient becomes infinite in block 2, and the backward pass carries it to block 1."""
    model = huggingface("llama")
    target = model.model.layers[1].mlp.down_proj.weight
    target.register_hook(lambda gradient: gradient * float("inf"))
    model.model.layers[0].self_attn.o_proj.weight.register_hook(lambda gradient: gradient * float("inf"))
    with pytest.raises(LNSError, match="block 2 is the deepest of 2 whose gradient holds NaN or infinity"):
        gradient_norms(model, None, [ids()])
