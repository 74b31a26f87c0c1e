"""A checkpoint that OLMo's sharded checkpointer wrote on two ranks, with its real cuts."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from support.exports import export, load_hf, load_olmo, logits, relative, save_olmo
from support.olmo_models import tokens

from olmo_lns.checkpoints.distributed import DistributedCheckpoint

IDS = tokens(batch=2, length=16)


def write_on_rank(rank: int, folder: str, weights: str) -> None:
    """One rank: wrap the model in FSDP, take an optimizer step's state, save as OLMo does."""
    import torch.distributed as dist
    from olmo.checkpoint import save_fsdp_model_and_optim_state
    from olmo.config import ModelConfig
    from olmo.model import OLMo
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

    from olmo_lns.integrations.olmo import register

    register()
    store = dist.FileStore(f"{folder}/../store", 2)
    dist.init_process_group("gloo", rank=rank, world_size=2, store=store)
    os.environ.update(LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE="2", FS_LOCAL_RANK=str(rank))
    model = OLMo(ModelConfig.load(f"{folder}/config.yaml", key="model"))
    model.load_state_dict(torch.load(weights, weights_only=True))
    wrapped = FullyShardedDataParallel(
        model,
        sharding_strategy=ShardingStrategy.FULL_SHARD,
        use_orig_params=True,
        auto_wrap_policy=model.get_fsdp_wrap_policy("by_block"),
        device_id=torch.device("cpu"),
    )
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=0.0)
    wrapped(IDS).logits.sum().backward()
    optimizer.step()
    save_fsdp_model_and_optim_state(folder, wrapped, optimizer)
    dist.destroy_process_group()


@pytest.mark.slow
def test_two_ranks(tmp_path: Path) -> None:
    folder = tmp_path / "lns"
    model = save_olmo(folder, layer_norm_type="lns_rms", layer_norm_with_affine=False)
    weights = (folder / "model.pt").rename(tmp_path / "weights.pt")
    torch.multiprocessing.spawn(write_on_rank, (str(folder), str(weights)), nprocs=2)
    state = DistributedCheckpoint(folder / "model_and_optim")
    entry: Any = state.metadata.state_dict_metadata["model.transformer.blocks.0.att_proj.weight"]
    assert len(entry.chunks) == 2, "FSDP must have cut it"
    for form in ("olmo", "olmo-unsharded", "hf"):
        assert export(folder, tmp_path / form, "--format", form, "--tokenizer", "none") == 0
    expected = logits(model, IDS)
    assert relative(logits(load_hf(tmp_path / "hf"), IDS), expected) <= 1e-5
    assert relative(logits(load_olmo(tmp_path / "olmo-unsharded"), IDS), expected) <= 1e-5
    again = DistributedCheckpoint(tmp_path / "olmo" / "model_and_optim")
    unsharded = torch.load(tmp_path / "olmo-unsharded" / "model.pt", weights_only=True)
    assert {name.removeprefix("model.") for name in again.names} == set(unsharded)
    for name, tensor in unsharded.items():
        assert torch.equal(again.tensor(f"model.{name}").load(), tensor), name
    # Trained on as a folded model, with its optimizer, then unfolded.
    (tmp_path / "olmo" / "model_and_optim").rename(tmp_path / "kept")
    (folder / "model_and_optim").rename(tmp_path / "olmo" / "model_and_optim")
    assert export(tmp_path / "olmo", tmp_path / "unfolded", "--unfold") == 0
    name = "optim.state.transformer.blocks.3.att_proj.weight.exp_avg"
    source = DistributedCheckpoint(tmp_path / "olmo" / "model_and_optim").tensor(name).load()
    found = DistributedCheckpoint(tmp_path / "unfolded" / "model_and_optim").tensor(name).load()
    assert source.abs().max() > 0 and torch.allclose(found, source * 0.5, rtol=1e-6)
