"""A damaged, foreign or contradictory checkpoint is refused in one line, and nothing is left behind."""

import json
import os
import pickle
import shutil

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.exports import Hostile, refused


def state_change(change):
    def damage(folder):
        state = torch.load(folder / "model.pt", weights_only=True)
        change(state)
        torch.save(state, folder / "model.pt")

    return damage


def flip(path, start=200, step=400):
    data = bytearray(path.read_bytes())
    for position in range(start, len(data), step):
        data[position] ^= 1
    path.write_bytes(data)


def as_if(name):
    def damage(folder):
        (folder / "model.pt").unlink()
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).touch()

    return damage


def relink(path, target):
    path.unlink()
    path.symlink_to(target)


def edit(old, new):
    def damage(folder):
        text = (folder / "config.yaml").read_text()
        assert old in text
        (folder / "config.yaml").write_text(text.replace(old, new))

    return damage


def record(**changes):
    def damage(folder):
        values = json.loads((folder / "lns.json").read_text())
        (folder / "lns.json").write_text(json.dumps(values | changes))

    return damage


WEIGHT = "transformer.blocks.2.attn_norm.weight"
DAMAGE = {
    "truncated": (lambda f: os.truncate(f / "model.pt", 5000), "truncated"),
    "flipped bit": (lambda f: flip(f / "model.pt", (f / "model.pt").stat().st_size // 2, 1 << 30), "checksum"),
    "missing key": (state_change(lambda s: s.pop(WEIGHT)), f"lacks the weight {WEIGHT}"),
    "extra key": (state_change(lambda s: s.update(extra=s[WEIGHT])), "unexpected the weight extra"),
    "NaN": (state_change(lambda s: s[WEIGHT][3].fill_(torch.nan)), f"{WEIGHT} holds NaN or infinite values (1 of 32)"),
    "infinite": (
        state_change(lambda s: s["transformer.wte.weight"].neg_().div_(0)),
        "transformer.wte.weight holds NaN",
    ),
    "tokenizer": (edit("tokenizer:\n  identifier:", "tokenizer: 5\nx:\n  identifier:"), "tokenizer must be a section"),
    "wrong shape": (state_change(lambda s: s.update({WEIGHT: torch.ones(7)})), "has shape (7,)"),
    "hostile pickle": (state_change(lambda s: s.update(x=Hostile())), "cannot be loaded safely"),
    "not tensors": (state_change(lambda s: s.update({WEIGHT: 3})), "not a state dict of tensors"),
    "no model.pt": (lambda f: (f / "model.pt").unlink(), "neither model.pt nor"),
    "torch_legacy": (
        as_if("rank0.pt"),
        "sharded by torch_legacy, whose files need a full unpickling: unshard it first",
    ),
    "local": (as_if("model/rank0.pt"), "sharded by the local checkpointer (flat FSDP parameters): unshard it first"),
    "olmo_core": (as_if("model/x.safetensors"), "sharded by olmo_core, another format: unshard it first"),
    "wrong depth": (edit("n_layers: 4", "n_layers: 5"), "lacks the weight"),
    "unknown setting": (edit("  n_layers: 4", "  n_layers: 4\n  magic: 1"), "unknown model setting 'magic'"),
    "no heads": (edit("n_heads: 4", "n_heads: 0"), "n_heads must be at least 1, found 0"),
    "ten million layers": (edit("n_layers: 4", "n_layers: 10000000"), "says 10000000 layers, but it holds only 27"),
    "a list as a name": (
        edit("block_type: sequential", "block_type: [1]"),
        "block_type must be of type str, found [1]",
    ),
    "no eps": (edit("layer_norm_eps: 1.0e-06", "layer_norm_eps: null"), "layer_norm_eps must be of type float"),
    "recursive yaml": (edit("n_layers: 4", "n_layers: 4\n  x: &x [*x]"), "holds a YAML alias"),
    "deep yaml": (lambda f: (f / "config.yaml").write_text("[" * 1000), "is not valid YAML"),
    "not a date": (edit("n_layers: 4", "n_layers: 2020-99-99"), "is not valid YAML"),
    "int8 weight": (state_change(lambda s: s.update({WEIGHT: s[WEIGHT].char()})), f"{WEIGHT} is int8: expected fp32"),
    "fp8 weight": (
        state_change(lambda s: s.update({WEIGHT: s[WEIGHT].to(torch.float8_e4m3fn)})),
        f"{WEIGHT} is float8_e4m3fn: expected fp32",
    ),
    "sparse weight": (state_change(lambda s: s.update({WEIGHT: s[WEIGHT].to_sparse()})), "is a sparse tensor"),
    "meta weight": (state_change(lambda s: s.update({WEIGHT: s[WEIGHT].to("meta")})), "on the device meta"),
    "not yaml": (edit("n_layers: 4", "n_layers: [4"), "not valid YAML"),
    "not a number": (edit("n_layers: 4", "n_layers: four"), "n_layers must be of type int"),
    "half a record": (lambda f: (f / "lns.json").write_text("{"), "not valid JSON"),
    "deep record": (lambda f: (f / "lns.json").write_text("[" * 100_000), "not valid JSON"),
    "unreadable record": (lambda f: relink(f / "lns.json", "/proc/self/mem"), "lns.json cannot be read: Input/output"),
    "huge exponent": (record(parameters={"exponent": 1e9}), "exponent must be at most 8"),
    "boolean exponent": (record(parameters={"exponent": True}), "a finite number, found True"),
    "record of another norm": (record(norm="default"), "contradict each other"),
    "record says folded": (record(folded=True), "contradict each other"),
    "config says rms": (edit("layer_norm_type: lns_rms", "layer_norm_type: rms"), "contradict each other"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_checkpoint_is_refused(checkpoint, tmp_path, capsys, name):
    damage, reason = DAMAGE[name]
    copy = shutil.copytree(checkpoint, tmp_path / "checkpoint")
    damage(copy)
    line = refused(capsys, copy, tmp_path / "out", "--format", "hf", "--tokenizer", "none")
    assert reason in line


def shards_of(folder):
    return sorted((folder / "model_and_optim").glob("*.distcp"))


def rewritten(change):
    """Let torch read the shards and write them again with a changed state."""

    def damage(folder):
        place = folder / "model_and_optim"
        stored = dcp.FileSystemReader(place).read_metadata().state_dict_metadata
        state = {name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in stored.items()}
        dcp.load(state, checkpoint_id=place, no_dist=True)
        shutil.rmtree(place)
        change(state)
        dcp.save(state, checkpoint_id=place, no_dist=True)

    return damage


def outside(folder):
    path = folder / "model_and_optim" / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    for info in metadata.storage_data.values():
        info.relative_path = f"../{info.relative_path}"
    path.write_bytes(pickle.dumps(metadata))


SHARD_DAMAGE = {
    "NaN": (
        rewritten(lambda s: s["model.transformer.blocks.1.ff_out.weight"][2, 3].fill_(torch.nan)),
        "transformer.blocks.1.ff_out.weight holds NaN or infinite values (1 of",
    ),
    "truncated shard": (lambda f: os.truncate(shards_of(f)[0], 3000), "is truncated"),
    "flipped bits": (
        lambda f: flip(shards_of(f)[0]),
        "distcp (model.transformer.wte.weight) is truncated or not a file of",
    ),
    "int8 weight": (
        rewritten(lambda s: s.update({f"model.{WEIGHT}": s[f"model.{WEIGHT}"].char()})),
        f"{WEIGHT} is int8: expected fp32",
    ),
    "missing shard": (lambda f: shards_of(f)[0].unlink(), "is missing"),
    "no metadata": (lambda f: (f / "model_and_optim" / ".metadata").unlink(), "not a complete distributed checkpoint"),
    "half metadata": (lambda f: os.truncate(f / "model_and_optim" / ".metadata", 100), "damaged or unsafe"),
    "paths outside the folder": (outside, "'../__0_0.distcp' of this folder is missing"),
    "hostile metadata": (
        lambda f: (f / "model_and_optim" / ".metadata").write_bytes(pickle.dumps(Hostile())),
        "no place in a checkpoint's metadata",
    ),
}


@pytest.mark.parametrize("name", SHARD_DAMAGE)
def test_a_damaged_sharded_checkpoint_is_refused(sharded, tmp_path, capsys, name):
    damage, reason = SHARD_DAMAGE[name]
    copy = shutil.copytree(sharded, tmp_path / "checkpoint")
    damage(copy)
    for form in ("olmo", "hf"):
        assert reason in refused(capsys, copy, tmp_path / "out", "--format", form, "--tokenizer", "none")


@pytest.mark.parametrize("place", ["train.pt", "train/rank0.pt", "train/more/rank1.pt", "train"])
def test_links_are_not_followed(checkpoint, sharded, tmp_path, capsys, place):
    """Exports are given away: no file from outside the checkpoint may get into one."""
    secret = tmp_path / "secret"
    copy = shutil.copytree(checkpoint if place == "train.pt" else sharded, tmp_path / "checkpoint")
    if place == "train":
        secret.mkdir()
        (secret / "rank0.pt").write_text("not for others")
    else:
        secret.write_text("not for others")
        (copy / place).parent.mkdir(parents=True, exist_ok=True)
    if place == "train/more/rank1.pt":
        (copy / "train" / "rank0.pt").touch()
    (copy / place).symlink_to(secret)
    assert f"symbolic link to {secret}" in refused(capsys, copy, tmp_path / "out")
