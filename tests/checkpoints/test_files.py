"""The files that checkpoints are read from and written to: torch.save's archives, safetensors, distributed checkpoints."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

from olmo_lns.checkpoints.distributed import DistributedCheckpoint
from olmo_lns.checkpoints.tensors import LazyTensor, read_archive, read_weights, write_archive
from olmo_lns.errors import LNSConfigError


def _damage(path: Path, record: str, start: int = 0, length: int | None = None) -> None:
    """One byte of the record's data, in a zip of ``length`` bytes that begins at ``start``."""
    content = bytearray(path.read_bytes())
    with zipfile.ZipFile(io.BytesIO(content[start:][:length])) as records:
        info = next(info for info in records.infolist() if info.filename.endswith(record))
        place = start + content[start:].index(records.read(info), info.header_offset)
    content[place + info.file_size // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("record", ["data.pkl", "data/1", "version"])
def test_a_damaged_record_is_found_before_anything_is_loaded(tmp_path: Path, record: str) -> None:
    torch.save({"a": torch.ones(3), "b": torch.full((4,), 2.0)}, tmp_path / "a.pt")
    _damage(tmp_path / "a.pt", record)
    with pytest.raises(LNSConfigError, match=rf"a\.pt is damaged: the checksum of its record \S*{record} does not"):
        read_archive(tmp_path / "a.pt")


def test_no_changed_byte_is_taken_for_another_tensor(tmp_path: Path) -> None:
    """Of a whole file: either it is found, in one line, or the values are the same."""
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


def test_compressed_and_old_files_are_refused(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(3)}, tmp_path / "a.pt")
    with zipfile.ZipFile(tmp_path / "a.pt") as records, zipfile.ZipFile(tmp_path / "b.pt", "w") as smaller:
        for info in records.infolist():
            smaller.writestr(info.filename, records.read(info), zipfile.ZIP_DEFLATED)
    torch.save({"a": torch.ones(2)}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    for name, reason in (("b.pt", "compressed, which torch.save never does"), ("old.pt", "not a file of torch.save")):
        with pytest.raises(LNSConfigError, match=reason):
            read_archive(tmp_path / name)


def test_a_full_device() -> None:
    """A real one: the error is the system's, not torch's words for it."""
    if not Path("/dev/full").exists():
        pytest.skip("this machine has no /dev/full")
    with pytest.raises(OSError, match="No space left on device"):
        write_archive(Path("/dev/full"), {"a": LazyTensor.of(torch.ones(100_000))})


def test_safetensors_damage(tmp_path: Path) -> None:
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


STACK = torch.arange(24.0).view(4, 2, 3)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    state = {"model.w": STACK, "model.b": torch.ones(300).bfloat16(), "optim.step": torch.tensor(3), "rng": [1, 2]}
    dcp.save(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    return tmp_path / "dcp"


def test_a_damaged_chunk_is_found_when_it_is_read(folder: Path) -> None:
    found = DistributedCheckpoint(folder)
    info = next(info for index, info in found.metadata.storage_data.items() if index.fqn == "model.w")
    _damage(folder / info.relative_path, "data/0", info.offset, info.length)
    with pytest.raises(LNSConfigError, match=r"distcp \(model\.w\) is damaged: the checksum of its record \S*data/0"):
        found.tensor("model.w").load()
    assert torch.equal(found.tensor("model.b").load(), torch.ones(300).bfloat16())
