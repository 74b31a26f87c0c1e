"""The point of the package: the export in stock code computes what the LNS model computes."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from support.exports import export, greedy, load_hf, load_olmo, logits, relative, save_olmo
from support.olmo_models import reference_logits, tokens

from olmo_lns.checkpoints.distributed import DistributedCheckpoint

NO_GAIN = {"layer_norm_with_affine": False}
TIED, BIASES = {"weight_tying": True}, {"include_bias": True, "weight_tying": True}
#: Name, which begins with the base norm -> what is changed of the model.
CHANGES: dict[str, dict[str, Any]] = {
    "rms": {},
    "rms_tied": TIED,
    "rms_tied_without_padding": TIED | {"embedding_size": None},
    "rms_gqa": {"n_kv_heads": 2},
    "rms_multi_query": {"multi_query_attention": True},
    "rms_biases": BIASES,
    "rms_no_gain_biases": NO_GAIN | BIASES,
    "rms_llama_block_no_gain": {"block_type": "llama"} | NO_GAIN,
    "rms_groups_llama_block": {"block_group_size": 2, "block_type": "llama"},
    "default_rope_theta": {"rope_theta": 100},
    "default_bias": {"bias_for_layer_norm": True},
    "default_no_gain": NO_GAIN | {"layer_norm_eps": 1e-5},
    "default_no_gain_tied_clipped": NO_GAIN | TIED | {"layer_norm_eps": 1e-5, "clip_qkv": 0.5},
    "low_precision": {},
}
#: The class that the Hugging Face export of each must have.
CLASSES = {
    name: "LlamaForCausalLM"
    if name.startswith("rms")
    else "OlmoForCausalLM"
    if "no_gain" in name
    else "StableLmForCausalLM"
    for name in CHANGES
}


IDS = tokens(batch=2, length=16)
#: The NumPy reference has no clipping, no grouped heads and one rotary base.
BEYOND_NUMPY = ("rms_gqa", "rms_multi_query", "default_no_gain_tied_clipped", "default_rope_theta")


@pytest.fixture(scope="module", params=CHANGES)
def case(request: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path, str]:
    """(model, which is compared with the paper's formula in fp64 NumPy, its checkpoint, expected class)."""
    folder, name = tmp_path_factory.mktemp(request.param) / "checkpoint", request.param
    base = next(base for base in ("rms", "default", "low_precision") if name.startswith(base))
    model = save_olmo(folder, layer_norm_type=f"lns_{base}", **CHANGES[name])
    if name not in BEYOND_NUMPY:
        assert relative(logits(model, IDS), torch.from_numpy(reference_logits(model, IDS))) <= 1e-5
    return model, folder, CLASSES[name]


def test_stock_olmo_computes_the_same(case: tuple[Any, Path, str]) -> None:
    model, folder, _ = case
    out = folder.with_name("olmo")
    assert export(folder, out, "--format", "olmo") == 0
    stock = load_olmo(out)
    assert not str(stock.config.layer_norm_type).startswith("lns")
    assert relative(logits(stock, IDS), logits(model, IDS)) <= 1e-5
    assert greedy(stock, IDS[:, :4]) == greedy(model, IDS[:, :4])
    lost = load_olmo_weights_without_factor(folder)
    assert relative(logits(lost, IDS), logits(model, IDS)) > 1e-2, "the factor makes no difference: no test"


def load_olmo_weights_without_factor(folder: Path) -> Any:
    """What a stock OLMo would make of the unfolded weights."""
    from olmo.config import ModelConfig
    from olmo.model import OLMo

    config = ModelConfig.load(folder / "config.yaml", key="model")
    config.layer_norm_type = str(config.layer_norm_type).removeprefix("lns_")
    model = OLMo(ModelConfig.new(**config.asdict()))
    model.load_state_dict(torch.load(folder / "model.pt", weights_only=True))
    return model.eval()


def test_transformers_computes_the_same(case: tuple[Any, Path, str]) -> None:
    model, folder, class_name = case
    out = folder.with_name("hf")
    assert export(folder, out, "--format", "hf", "--tokenizer", "none", "--max-shard-size", "60KB") == 0
    stock = load_hf(out)
    assert type(stock).__name__ == class_name
    assert stock.dtype == torch.float32
    assert relative(logits(stock, IDS), logits(model, IDS)) <= 1e-5
    assert greedy(stock, IDS[:, :4]) == greedy(model, IDS[:, :4])
    cached = stock.generate(IDS[:, :4], max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert cached.tolist() == greedy(model, IDS[:, :4])
    assert json.loads((out / "config.json").read_text())["lns"] == "folded"


def test_another_exponent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OLMO_LNS_SCHEME", "lns:exponent=0.25")
    model = save_olmo(tmp_path / "checkpoint", layer_norm_type="lns_rms", exponent=0.25)
    assert export(tmp_path / "checkpoint", tmp_path / "hf", "--format", "hf", "--tokenizer", "none") == 0
    assert relative(logits(load_hf(tmp_path / "hf"), IDS), logits(model, IDS)) <= 1e-5


@pytest.mark.parametrize("form", ["olmo", "olmo-unsharded", "hf"])
def test_sharded_checkpoint(tmp_path: Path, form: str) -> None:
    model = save_olmo(tmp_path / "checkpoint", sharded=True, optimizer=True, layer_norm_type="lns_rms")
    out = tmp_path / "out"
    assert export(tmp_path / "checkpoint", out, "--format", form, "--tokenizer", "none") == 0
    assert (out / "model_and_optim").is_dir() == (form == "olmo")
    assert not list(out.rglob("optim*"))
    stock = (
        load_hf(out) if form == "hf" else load_olmo(out) if form == "olmo-unsharded" else load_distributed(out, model)
    )
    assert relative(logits(stock, IDS), logits(model, IDS)) <= 1e-5
    if form == "olmo":  # in another dtype and several files, of which torch's metadata must know
        words = ("--dtype", "bf16", "--max-shard-size", "30KB")
        assert export(tmp_path / "checkpoint", tmp_path / "bf16", *words) == 0
        assert len(list((tmp_path / "bf16" / "model_and_optim").glob("*.distcp"))) > 2
        found = DistributedCheckpoint(tmp_path / "bf16" / "model_and_optim")
        for name, value in stock.state_dict().items():
            written = found.tensor(f"model.{name}").load()
            assert written.dtype == torch.bfloat16
            torch.testing.assert_close(written.float(), value, rtol=2**-8, atol=0)


def load_distributed(folder: Path, like: Any) -> Any:
    """A stock model with the weights that torch's own loader reads (OLMo's is broken under torch 2.13)."""
    import torch.distributed.checkpoint as dcp
    from olmo.config import ModelConfig
    from olmo.model import OLMo

    model = OLMo(ModelConfig.load(folder / "config.yaml", key="model")).eval()
    assert str(model.config.layer_norm_type) == "rms"
    state = {"model": {name: torch.full_like(value, torch.nan) for name, value in like.state_dict().items()}}
    dcp.load(state, checkpoint_id=folder / "model_and_optim")
    model.load_state_dict(state["model"])
    return model


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
