"""The files that checkpoints are read from and written to: torch.save's archives, safetensors, distributed checkpoints."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file

from olmo_lns.checkpoints.archive import check_archive, map_tensors, read_archive, write_archive
from olmo_lns.checkpoints.distributed import DistributedCheckpoint
from olmo_lns.checkpoints.shards import read_safetensors, write_safetensors
from olmo_lns.checkpoints.tensors import LazyTensor, join_rows, split_rows
from olmo_lns.errors import LNSConfigError


def lazy(tensor: torch.Tensor) -> LazyTensor:
    return LazyTensor(tuple(tensor.shape), tensor.dtype, tensor.clone)


NESTED = {
    "state": {
        0: {"step": torch.tensor(3.0), "exp_avg": torch.randn(5, 7)},
        "name": {"x": torch.randn(3).bfloat16(), "empty": torch.empty(0, 4), "count": torch.arange(3)},
    },
    "param_groups": [{"lr": 1e-3, "params": [0, 1], "betas": (0.9, 0.95), "none": None}],
}


# --- torch.save ----------------------------------------------------------------------------------


def test_archive_round_trip(tmp_path: Path) -> None:
    torch.save(NESTED, tmp_path / "a.pt")
    write_archive(tmp_path / "b.pt", read_archive(tmp_path / "a.pt"))
    for mmap in (False, True):
        found = torch.load(tmp_path / "b.pt", weights_only=True, mmap=mmap)
        assert found["param_groups"] == NESTED["param_groups"]
        expected, values = [], []
        map_tensors(NESTED, lambda _, tensor, into=expected: into.append(tensor))
        map_tensors(found, lambda _, tensor, into=values: into.append(tensor))
        assert len(values) == len(expected) == 5
        assert all(v.dtype == e.dtype and torch.equal(v, e) for e, v in zip(expected, values, strict=True))


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


def test_compressed_exchanged_and_old_files_are_refused(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(3), "b": torch.zeros(3)}, tmp_path / "a.pt")
    with zipfile.ZipFile(tmp_path / "a.pt") as records, zipfile.ZipFile(tmp_path / "b.pt", "w") as smaller:
        for info in records.infolist():
            smaller.writestr(info.filename, records.read(info), zipfile.ZIP_DEFLATED)
    with pytest.raises(LNSConfigError, match="is compressed, which torch.save never does"):
        read_archive(tmp_path / "b.pt")
    content = bytearray((tmp_path / "a.pt").read_bytes())
    with zipfile.ZipFile(tmp_path / "a.pt") as records:
        offsets = {info.filename[-6:]: info.header_offset for info in records.infolist()}
    place = {name: content.rindex(name.encode()) for name in ("data/0", "data/1")}
    for name, other in (("data/0", "data/1"), ("data/1", "data/0")):
        start = content.rindex(b"PK\x01\x02", 0, place[name])  # of the entry in the directory; its offset stands at 42
        content[start + 42 : start + 46] = offsets[other].to_bytes(4, "little")
    (tmp_path / "c.pt").write_bytes(content)
    with pytest.raises(LNSConfigError, match=r"c\.pt is"):
        read_archive(tmp_path / "c.pt")
    torch.save({"a": torch.ones(2)}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    with pytest.raises(LNSConfigError, match=r"not a file of torch\.save"):
        check_archive(tmp_path / "old.pt")


def test_a_full_device() -> None:
    """A real one: the error is the system's, not torch's words for it."""
    if not Path("/dev/full").exists():
        pytest.skip("this machine has no /dev/full")
    with pytest.raises(OSError, match="No space left on device"):
        write_archive(Path("/dev/full"), {"a": lazy(torch.ones(100_000))})


# --- safetensors ---------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [10, 100, 10_000])
def test_safetensors_round_trip(tmp_path: Path, size: int) -> None:
    tensors = {"a": torch.randn(3, 4), "b": torch.randn(5).bfloat16(), "c": torch.randn(2, 2).half().t()}
    files = write_safetensors(tmp_path, {name: lazy(t) for name, t in tensors.items()}, size)
    assert len(files) == {10: 3, 100: 1, 10_000: 1}[size]
    found = {name: tensor for file in files for name, tensor in load_file(file).items()}
    again = {name: tensor.load() for name, tensor in read_safetensors(tmp_path).items()}
    for result in (found, again):
        assert set(result) == set(tensors)
        assert all(torch.equal(result[name], tensor) for name, tensor in tensors.items())


def test_safetensors_damage(tmp_path: Path) -> None:
    save_file({"a": torch.ones(1000)}, tmp_path / "model.safetensors")
    data = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(data[:-8])
    with pytest.raises(LNSConfigError, match="truncated"):
        read_safetensors(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "x.safetensors"}}')
    with pytest.raises(LNSConfigError, match=r"x\.safetensors does not exist"):
        read_safetensors(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(data)
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"b": "model.safetensors"}}')
    with pytest.raises(LNSConfigError, match="lack b"):
        read_safetensors(tmp_path)


# --- torch.distributed.checkpoint ----------------------------------------------------------------

STACK = torch.arange(24.0).view(4, 2, 3)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    state = {"model.w": STACK, "model.b": torch.ones(300).bfloat16(), "optim.step": torch.tensor(3), "rng": [1, 2]}
    dcp.save(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    return tmp_path / "dcp"


def test_tensors_rows_and_objects(folder: Path) -> None:
    found = DistributedCheckpoint(folder)
    assert torch.equal(found.tensor("model.w").load(), STACK)
    row = found.tensor("model.w", 2)
    assert row.shape == (2, 3) and torch.equal(row.load(), STACK[2])
    assert found.tensor("optim.step").load() == 3 and found.tensor("model.b").dtype == torch.bfloat16
    assert torch.load(io.BytesIO(found.object("rng") or b"")) == [1, 2] and found.object("model.w") is None


def test_rewritten_and_loaded_by_torch(folder: Path, tmp_path: Path) -> None:
    """Changed, dropped, with another dtype, in files of the size that was asked for."""
    functions = {"model.w": lambda name, offsets, chunk: (chunk * 2).half()}
    source = DistributedCheckpoint(folder)
    options = {"max_bytes": 100, "dtypes": {"model.w": torch.half}, "objects": {"rng": b"new"}}
    source.rewrite(tmp_path / "out", lambda name: not name.startswith("optim"), functions, **options)
    found = DistributedCheckpoint(tmp_path / "out")
    assert "optim.step" not in found.metadata.state_dict_metadata and found.object("rng") == b"new"
    state = {"model.w": torch.zeros(4, 2, 3, dtype=torch.half), "model.b": torch.zeros(300).bfloat16()}
    dcp.load(state, checkpoint_id=tmp_path / "out", no_dist=True)
    assert torch.equal(state["model.w"], (STACK * 2).half()) and torch.equal(
        state["model.b"], torch.ones(300).bfloat16()
    )
    assert found.tensor("model.w").dtype == torch.half
    assert len(list((tmp_path / "out").glob("*.distcp"))) == 2


def test_a_damaged_chunk_is_found_when_it_is_read(folder: Path) -> None:
    found = DistributedCheckpoint(folder)
    info = next(info for index, info in found.metadata.storage_data.items() if index.fqn == "model.w")
    _damage(folder / info.relative_path, "data/0", info.offset, info.length)
    with pytest.raises(LNSConfigError, match=r"distcp \(model\.w\) is damaged: the checksum of its record \S*data/0"):
        found.tensor("model.w").load()
    assert torch.equal(found.tensor("model.b").load(), torch.ones(300).bfloat16())


# --- parts of tensors ----------------------------------------------------------------------------


def test_split_and_joined_rows() -> None:
    whole = torch.arange(12.0).view(6, 2)
    first, second = split_rows(lazy(whole), (4, 2))
    assert torch.equal(second.load(), whole[4:])
    assert second.load().untyped_storage().nbytes() == second.nbytes, "a view would keep the whole"
    turned = join_rows(second, first)
    assert turned.shape == (6, 2) and torch.equal(turned.load(), torch.cat([whole[4:], whole[:4]]))
    assert torch.equal(turned.map(torch.neg).load(), -torch.cat([whole[4:], whole[:4]]))
