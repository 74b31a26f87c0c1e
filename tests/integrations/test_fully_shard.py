"""``fully_shard`` on two gloo ranks: a plain module and a transformers model train as one process with hooks does."""

import copy

import pytest
import torch
import torch.distributed as dist
from support import forked
from support.hooked import hooked
from support.other_models import own
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy

import olmo_lns

IDS = torch.randint(2, 96, (4, 4, 8), generator=torch.Generator().manual_seed(5))


def llama():
    from support.transformers_models import stock

    return stock("llama", large=False)


#: Name -> how the model is made, its blocks, their norms.
KINDS = {
    "plain module": (lambda: own()[0].eval(), lambda m: m.layers.values(), ("n1", "n2")),
    "transformers": (llama, lambda m: m.model.layers, ("input_layernorm", "post_attention_layernorm")),
}


def losses(model, part=slice(None)):
    optimizer, found = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for ids in IDS[:, part]:
        output = model(ids)
        logits = getattr(output, "logits", output)
        loss = cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach().clone())
    return torch.stack(found)


def train(rank, kind, folder):
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 2), rank=rank, world_size=2)
    torch.manual_seed(0)
    build, blocks, norms = KINDS[kind]
    model = build()
    reference = copy.deepcopy(model)
    stock = losses(copy.deepcopy(model))
    hooked(reference, blocks(reference), norms, exponent=0.7)
    olmo_lns.apply(model, "lns:exponent=0.7", example=IDS[0])
    for block in blocks(model):
        fully_shard(block)
    fully_shard(model)
    assert all(type(parameter).__name__ == "DTensor" for parameter in model.parameters())
    found = losses(model, slice(2 * rank, 2 * rank + 2))
    dist.all_reduce(found)
    expected = losses(reference)
    torch.testing.assert_close(found / 2, expected, rtol=1e-5, atol=0)
    assert (stock - expected).abs().max() > 1e-3
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = get_model_state_dict(model, options=options)
    if rank == 0:
        for name, value in reference.state_dict().items():
            torch.testing.assert_close(state[name], value, rtol=1e-3, atol=1e-4)
        if kind == "transformers":
            model.save_pretrained(folder, state_dict={name: value.contiguous() for name, value in state.items()})
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_train_as_hooks_in_one_process_do(kind, tmp_path):
    if kind == "transformers":
        transformers = pytest.importorskip("transformers")
    forked.run_ranks(__file__, "train", kind, str(tmp_path))
    if kind == "transformers":
        loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
        assert loaded.model.layers[2].input_layernorm.lns_scale == 3**-0.7
