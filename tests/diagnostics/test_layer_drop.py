"""A block is removed: the loss equals fp64, and the score of a local task equals the one that the logits give."""

import json
import math
import shutil

import numpy as np
import pytest
import torch
from support import multiple_choice, olmo_models
from support import scheme_reference as reference
from support.diagnostic_models import Linear, Toy, huggingface, ids, matrices, numpy_states

from olmo_lns import cli
from olmo_lns.diagnostics.layer_drop import LayerDropResult, bypassed, drop_layers, harness_model, score_tasks
from olmo_lns.errors import LNSError
from olmo_lns.models.loading import load_model, load_tokenizer
from olmo_lns.models.structure import find_blocks


def nll(logits, tokens):
    """Return the negative log-likelihood of the next tokens (batch, length - 1) from fp64 logits."""
    logits = logits[:, :-1]
    shifted = logits - logits.max(-1, keepdims=True)
    log_p = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return -np.take_along_axis(log_p, tokens[:, 1:, None], -1)[..., 0]


def test_loss_and_standard_error_equal_numpy_with_padding():
    blocks = [Linear(m) for m in matrices(3, size=1.0)]
    model, tokens = Toy(blocks), ids(5, 9)
    lengths = np.array([9, 4, 7, 1, 2])
    mask = torch.arange(9) < torch.tensor(lengths)[:, None]
    batches = [{"input_ids": tokens[s], "attention_mask": mask[s].long()} for s in (slice(0, 2), slice(2, 5))]
    result = drop_layers(model, None, batches)
    head = model.head.weight.detach().double().numpy()

    def sums(kept):
        states = numpy_states(_with_blocks(model, kept), tokens)
        return np.where(mask.numpy()[:, 1:], nll(states[-1] @ head.T, tokens.numpy()), 0).sum(1)

    whole, count = sums(blocks), np.maximum(lengths - 1, 0)
    assert result.baseline_loss == pytest.approx(whole.sum() / count.sum(), rel=1e-5)
    assert result.tokens == count.sum()
    for removed in range(3):
        without = sums(blocks[:removed] + blocks[removed + 1 :])
        assert result.loss[removed] == pytest.approx(without.sum() / count.sum(), rel=1e-5)
        residual = (without - whole) - (without - whole).sum() / count.sum() * count
        stderr = math.sqrt((residual**2).sum() * 4 / 3) / count.sum()  # four sequences have a target
        assert result.loss_stderr[removed] == pytest.approx(stderr, rel=1e-3)


def _with_blocks(model, blocks):
    other = Toy(blocks)
    other.embed, other.head = model.embed, model.head
    return other


def test_a_loss_that_is_not_finite_names_the_removed_block():
    class Ones(torch.nn.Module):
        def forward(self, x):
            return torch.ones_like(x)

    class OnlyOnes(torch.nn.Module):
        def forward(self, x):
            return x / (x == 1)

    model = Toy([Linear(next(matrices(1))), Ones(), OnlyOnes()])
    with pytest.raises(LNSError, match="the loss without block 2 is not finite"):
        drop_layers(model, list(model.stack), [ids()])


def test_a_compiled_block_is_removed_too_and_a_block_that_did_not_run_is_refused():
    model = Toy([Linear(m) for m in matrices(2)])
    before = drop_layers(model, None, [ids()]).loss
    for block in model.stack:
        block.compile(backend="eager")
    model(ids())
    assert drop_layers(model, None, [ids()]).loss == pytest.approx(before, rel=1e-6)
    assert all(callable(block._compiled_call_impl) and not block._forward_hooks for block in model.stack)
    with pytest.raises(LNSError, match="a block did not run on this data"), bypassed(model.stack[0]):
        pass


@pytest.mark.parametrize("group", [1, 2])
def test_layer_numbers_are_kept_so_that_lns_factors_do_not_shift(group):
    model, tokens = olmo_models.build(layer_norm_type="lns_rms", block_group_size=group), olmo_models.tokens()
    result = drop_layers(model, None, [tokens])
    kept = [_reference_loss(model, tokens, [1, 2, 3, 4], removed) for removed in range(4)]
    np.testing.assert_allclose(result.loss, kept, rtol=1e-4)
    # Taking the block out of the list would renumber blocks 3 and 4 as 2 and 3.
    shifted = _reference_loss(model, tokens, [1, None, 2, 3], 1)
    assert abs(result.loss[1] - shifted) > 1e-2
    assert [round(b.attn_norm.lns_scale, 6) for b in find_blocks(model)] == [1.0, 0.707107, 0.57735, 0.5]


def _reference_loss(model, tokens, numbers, removed):
    weights, config = reference.weights_of(model), model.config
    x = weights["transformer.wte.weight"][tokens]
    for index, number in enumerate(numbers):
        if index != removed:
            block = reference.block_weights(weights, index, config.block_group_size)
            x = reference.block_of(x, block, config, "lns", "rms", number)
    return float(reference.loss_of(reference.logits_of(weights, config, x, "rms"), tokens))


def test_an_encoder_needs_its_mask_token():
    model, tokens = huggingface("bert"), ids(4, 20)
    with pytest.raises(LNSError, match="predicts masked tokens"):
        drop_layers(model, None, [tokens])
    result = drop_layers(model, None, [tokens], mask_token=3)
    assert result.tokens == 4 * 3 and len(set(result.loss)) == 3  # positions 3, 10 and 17 of 20
    with torch.no_grad():
        chosen = torch.arange(20) % 7 == 3
        logits = model(tokens.masked_fill(chosen, 3)).logits[:, chosen].double()
        reference = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, chosen].flatten())
    assert result.baseline_loss == pytest.approx(float(reference), rel=1e-5)


def test_rows_have_loss_and_perplexity_and_a_loss_that_is_not_finite_is_refused():
    model = Toy([Linear(m) for m in matrices(2)])
    rows = drop_layers(model, None, [ids()]).frame()
    assert list(rows["block"]) == [0, 1, 2] and rows["loss_increase"][0] == 0
    assert rows["perplexity"][1] == pytest.approx(math.exp(rows["loss"][1]))
    assert math.isfinite(LayerDropResult(1.0, [1e9], [None], 1).frame()["perplexity"][1])
    with pytest.raises(LNSError, match="no token to predict"):
        drop_layers(model, None, [ids(3, 1)])
    with torch.no_grad():
        model.embed.weight.fill_(float("nan"))
    with pytest.raises(LNSError, match="loss of the whole model is not finite"):
        drop_layers(model, None, [ids()])


@pytest.fixture(autouse=True)
def offline(monkeypatch, tmp_path):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))


def accuracy(model, documents):
    return multiple_choice.accuracy(lambda ids: model(ids).logits, documents)


@pytest.mark.parametrize("folder", ["llama_folder", "olmo_folder"])
def test_task_scores_with_each_block_removed_equal_those_of_the_logits(folder, task_folder, request):
    loaded = load_model(str(request.getfixturevalue(folder)), device="cpu")
    documents = [json.loads(line) for line in (task_folder / "words.jsonl").read_text().splitlines()]
    lm = harness_model(loaded, load_tokenizer(loaded.tokenizer_name, eos_token_id=loaded.eos_token_id), 8)
    scores = score_tasks(lm, loaded.blocks, ["local_words"], include_path=str(task_folder))["local_words"]
    assert scores.metric == "acc"
    with torch.no_grad():
        assert scores.baseline == pytest.approx(accuracy(loaded.model, documents))
        for block, found, drop in zip(loaded.blocks, scores.without, scores.drop, strict=True):
            with bypassed(block):
                assert found == pytest.approx(accuracy(loaded.model, documents))
            assert drop == pytest.approx(scores.baseline - found)
    for score, stderr in zip(scores.without, scores.without_stderr, strict=True):
        assert stderr == pytest.approx(math.sqrt(score * (1 - score) / 23))
    assert len({scores.baseline, *scores.without}) > 1, "removing a block must change a score"


def test_an_unknown_metric_and_a_tokenizer_without_document_end_are_refused(llama_folder, task_folder, tokenizer_file):
    loaded = load_model(str(llama_folder), device="cpu")
    with pytest.raises(LNSError, match="end-of-text token: found none"):
        harness_model(loaded, load_tokenizer(str(tokenizer_file)), 8)
    lm = harness_model(loaded, load_tokenizer(loaded.tokenizer_name), 8)
    with pytest.raises(LNSError, match="task local_words reports acc,none, expected f1"):
        score_tasks(lm, [], ["local_words"], include_path=str(task_folder), metric="f1", limit=2)


def test_task_data_that_cannot_be_loaded_are_named_before_the_losses(
    llama_folder, task_folder, token_file, tmp_path, capsys, monkeypatch
):
    """The file of the task is gone; the error comes before any loss is computed."""
    from olmo_lns.diagnostics import layer_drop

    monkeypatch.setattr(layer_drop, "drop_layers", lambda *_, **__: pytest.fail("the losses came first"))
    shutil.copytree(task_folder, tmp_path / "tasks")
    for path in (tmp_path / "tasks").glob("*.yaml"):
        path.write_text(path.read_text().replace("words.jsonl", "gone.jsonl"))
    words = f"analyze layer-drop --model {llama_folder} --data {token_file} --quiet --tasks local_words"
    words += f" --task-path {tmp_path / 'tasks'} -o {tmp_path / 'out.json'}"
    assert cli.main(words.split()) == 1
    assert "--tasks local_words: their data cannot be loaded (" in capsys.readouterr().err
