"""The point of the package: the export in stock code computes what the LNS model computes."""

import json
import os

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.exports import export, greedy, load_hf, load_olmo, logits, relative, save_olmo
from support.olmo_models import reference_logits, tokens

from olmo_lns.checkpoints.distributed import DistributedCheckpoint

NO_GAIN = {"layer_norm_with_affine": False}
TIED, BIASES = {"weight_tying": True}, {"include_bias": True, "weight_tying": True}
#: Name, which begins with the base norm -> the changed settings of the model.
CHANGES = {
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
IDS = tokens(batch=2, length=16)
#: The NumPy reference has no clipping, no grouped heads and one rotary base.
BEYOND_NUMPY = ("rms_gqa", "rms_multi_query", "default_no_gain_tied_clipped", "default_rope_theta")


@pytest.fixture(scope="module", params=CHANGES)
def case(request, tmp_path_factory):
    """(model, checked against the paper's formula in fp64 NumPy; its checkpoint; the class of its HF export)."""
    folder, name = tmp_path_factory.mktemp(request.param) / "checkpoint", request.param
    base = next(base for base in ("rms", "default", "low_precision") if name.startswith(base))
    model = save_olmo(folder, layer_norm_type=f"lns_{base}", **CHANGES[name])
    if name not in BEYOND_NUMPY:
        assert relative(logits(model, IDS), torch.from_numpy(reference_logits(model, IDS))) <= 1e-5
    like = "Olmo" if "no_gain" in name else "StableLm"
    return model, folder, f"{'Llama' if base == 'rms' else like}ForCausalLM"


def test_stock_software_computes_the_same(case):
    model, folder, class_name = case
    expected, continued = logits(model, IDS), greedy(model, IDS[:, :4])
    assert export(folder, folder.with_name("olmo"), "--format", "olmo") == 0
    words = ("--format", "hf", "--tokenizer", "none", "--max-shard-size", "60KB")
    assert export(folder, folder.with_name("hf"), *words) == 0
    olmo, stock = load_olmo(folder.with_name("olmo")), load_hf(folder.with_name("hf"))
    assert not str(olmo.config.layer_norm_type).startswith("lns")
    assert type(stock).__name__ == class_name and stock.dtype == torch.float32
    for exported in (olmo, stock):
        assert relative(logits(exported, IDS), expected) <= 1e-5
        assert greedy(exported, IDS[:, :4]) == continued
    cached = stock.generate(IDS[:, :4], max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert cached.tolist() == continued
    assert json.loads((folder.with_name("hf") / "config.json").read_text())["lns"] == "folded"
    # From the unfolded weights, stock OLMo computes another function.
    olmo.load_state_dict(torch.load(folder / "model.pt", weights_only=True))
    assert relative(logits(olmo, IDS), expected) > 1e-2, "the factor makes no difference, so this test shows nothing"


def test_another_exponent_is_folded(tmp_path, monkeypatch):
    monkeypatch.setenv("OLMO_LNS_SCHEME", "lns:exponent=0.25")
    model = save_olmo(tmp_path / "checkpoint", layer_norm_type="lns_rms", exponent=0.25)
    assert export(tmp_path / "checkpoint", tmp_path / "hf", "--format", "hf", "--tokenizer", "none") == 0
    assert relative(logits(load_hf(tmp_path / "hf"), IDS), logits(model, IDS)) <= 1e-5


def test_a_sharded_checkpoint_exports_in_every_form_without_its_optimizer(tmp_path):
    model = save_olmo(tmp_path / "checkpoint", sharded=True, optimizer=True, layer_norm_type="lns_rms")
    for form in ("olmo", "olmo-unsharded", "hf"):
        assert export(tmp_path / "checkpoint", tmp_path / form, "--format", form, "--tokenizer", "none") == 0
        assert (tmp_path / form / "model_and_optim").is_dir() == (form == "olmo")
        assert not list((tmp_path / form).rglob("optim*"))
    stock = load_olmo(tmp_path / "olmo-unsharded")
    for exported in (stock, load_hf(tmp_path / "hf")):
        assert relative(logits(exported, IDS), logits(model, IDS)) <= 1e-5
    same_weights(tmp_path / "olmo", stock.state_dict())
    # Another dtype and several files, which torch's metadata must list.
    words = ("--dtype", "bf16", "--max-shard-size", "30KB")
    assert export(tmp_path / "checkpoint", tmp_path / "bf16", *words) == 0
    assert len(list((tmp_path / "bf16" / "model_and_optim").glob("*.distcp"))) > 2
    same_weights(tmp_path / "bf16", stock.state_dict(), torch.bfloat16)


def same_weights(folder, expected, dtype=torch.float32):
    """Compare what torch's own loader reads: OLMo 0.6.0's loader is broken under torch 2.6 and newer."""
    state = {f"model.{name}": torch.full_like(value, torch.nan, dtype=dtype) for name, value in expected.items()}
    dcp.load(state, checkpoint_id=folder / "model_and_optim", no_dist=True)
    assert set(DistributedCheckpoint(folder / "model_and_optim").names) == set(state)
    for name, value in expected.items():
        rtol = 0 if dtype == torch.float32 else 2**-8
        torch.testing.assert_close(state[f"model.{name}"].float(), value, rtol=rtol, atol=0)


def write_on_rank(rank, folder, weights):
    """On one rank: wrap the model in FSDP, take an optimizer step, save as OLMo does."""
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
def test_a_checkpoint_of_two_fsdp_ranks_is_exported_and_unfolded(tmp_path):
    folder = tmp_path / "lns"
    model = save_olmo(folder, layer_norm_type="lns_rms", layer_norm_with_affine=False)
    weights = (folder / "model.pt").rename(tmp_path / "weights.pt")
    torch.multiprocessing.spawn(write_on_rank, (str(folder), str(weights)), nprocs=2)
    state = DistributedCheckpoint(folder / "model_and_optim")
    entry = state.metadata.state_dict_metadata["model.transformer.blocks.0.att_proj.weight"]
    assert len(entry.chunks) == 2, "FSDP must have sharded the weight"
    for form in ("olmo", "olmo-unsharded", "hf"):
        assert export(folder, tmp_path / form, "--format", form, "--tokenizer", "none") == 0
    expected = logits(model, IDS)
    assert relative(logits(load_hf(tmp_path / "hf"), IDS), expected) <= 1e-5
    assert relative(logits(load_olmo(tmp_path / "olmo-unsharded"), IDS), expected) <= 1e-5
    same_weights(tmp_path / "olmo", torch.load(tmp_path / "olmo-unsharded" / "model.pt", weights_only=True))
    # The shards with an optimizer stand for more training of the fold, which is then unfolded.
    (tmp_path / "olmo" / "model_and_optim").rename(tmp_path / "kept")
    (folder / "model_and_optim").rename(tmp_path / "olmo" / "model_and_optim")
    assert export(tmp_path / "olmo", tmp_path / "unfolded", "--unfold") == 0
    name = "optim.state.transformer.blocks.3.att_proj.weight.exp_avg"
    source = DistributedCheckpoint(tmp_path / "olmo" / "model_and_optim").tensor(name).load()
    found = DistributedCheckpoint(tmp_path / "unfolded" / "model_and_optim").tensor(name).load()
    assert source.abs().max() > 0 and torch.allclose(found, source * 0.5, rtol=1e-6)
