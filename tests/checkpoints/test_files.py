"""Damage to a checkpoint's files is found: archives of torch.save, safetensors, distributed checkpoints."""

import zipfile

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

from olmo_lns.checkpoints.distributed import DistributedCheckpoint
from olmo_lns.checkpoints.tensors import read_archive, read_weights
from olmo_lns.errors import LNSConfigError


def test_no_changed_byte_makes_another_tensor(tmp_path):
    """Each byte of a file is changed: one line reports the change, or the values are the same."""
    torch.save(torch.arange(3.0), tmp_path / "a.pt")
    content = bytearray((tmp_path / "a.pt").read_bytes())
    for place in range(len(content)):
        flip = (1, 0x80, 0xFF)[place % 3]
        content[place] ^= flip
        (tmp_path / "a.pt").write_bytes(content)
        try:
            assert torch.equal(read_archive(tmp_path / "a.pt").load(), torch.arange(3.0)), place
        except LNSConfigError as error:
            assert "\n" not in str(error)
        content[place] ^= flip


def test_compressed_and_old_files_are_refused(tmp_path):
    torch.save({"a": torch.ones(3)}, tmp_path / "a.pt")
    with zipfile.ZipFile(tmp_path / "a.pt") as records, zipfile.ZipFile(tmp_path / "b.pt", "w") as smaller:
        for info in records.infolist():
            smaller.writestr(info.filename, records.read(info), zipfile.ZIP_DEFLATED)
    torch.save({"a": torch.ones(2)}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    for name, reason in (("b.pt", "compressed, which torch.save never does"), ("old.pt", "not a file of torch.save")):
        with pytest.raises(LNSConfigError, match=reason):
            read_archive(tmp_path / name)


def test_damaged_safetensors_are_refused(tmp_path):
    save_file({"a": torch.ones(1000)}, tmp_path / "model.safetensors")
    data = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(data[:-8])
    with pytest.raises(LNSConfigError, match="truncated"):
        read_weights(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "x.safetensors"}}')
    with pytest.raises(LNSConfigError, match=r"x\.safetensors does not exist"):
        read_weights(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(data)
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"b": "model.safetensors"}}')
    with pytest.raises(LNSConfigError, match="lack b"):
        read_weights(tmp_path)


def test_a_damaged_chunk_is_found_when_it_is_read(tmp_path):
    state = {"model.w": torch.arange(24.0).view(4, 2, 3), "model.b": torch.ones(300).bfloat16(), "rng": [1, 2]}
    dcp.save(state, checkpoint_id=tmp_path, no_dist=True)
    found = DistributedCheckpoint(tmp_path)
    info = next(info for index, info in found.metadata.storage_data.items() if index.fqn == "model.w")
    content = bytearray((tmp_path / info.relative_path).read_bytes())
    place = content.index(state["model.w"].numpy().tobytes(), info.offset, info.offset + info.length)
    content[place + 40] ^= 1
    (tmp_path / info.relative_path).write_bytes(content)
    with pytest.raises(LNSConfigError, match=r"distcp \(model\.w\) is damaged: the checksum of its record \S*data/0"):
        found.tensor("model.w").load()
    assert torch.equal(found.tensor("model.b").load(), torch.ones(300).bfloat16())
