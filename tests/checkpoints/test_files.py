"""The files that checkpoints are read from and written to: torch.save's archives and safetensors."""

from __future__ import annotations

import zipfile
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from olmo_lns.checkpoints import archive
from olmo_lns.checkpoints.archive import check_archive, map_tensors, read_archive, write_archive
from olmo_lns.checkpoints.shards import read_safetensors, write_safetensors
from olmo_lns.checkpoints.tensors import LazyTensor
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


def test_archive_round_trip(tmp_path: Path) -> None:
    """What is streamed out is what torch.save would have written, for torch.load with and without mmap."""
    torch.save(NESTED, tmp_path / "a.pt")
    write_archive(tmp_path / "b.pt", read_archive(tmp_path / "a.pt"))
    check_archive(tmp_path / "b.pt")
    for mmap in (False, True):
        found = torch.load(tmp_path / "b.pt", weights_only=True, mmap=mmap)
        assert found["param_groups"] == NESTED["param_groups"]
        pairs = _pairs(NESTED, found)
        assert len(pairs) == 5
        for expected, value in pairs:
            assert value.dtype == expected.dtype and torch.equal(value, expected)


def _pairs(expected: Any, found: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
    map_tensors(expected, lambda keys, tensor: pairs.append((tensor, _at(found, keys))))
    return pairs


def _at(value: Any, keys: tuple[Any, ...]) -> Any:
    for key in keys:
        value = value[key]
    return value


def test_archive_records_are_aligned(tmp_path: Path) -> None:
    write_archive(tmp_path / "b.pt", {"a": lazy(torch.ones(3)), "b": lazy(torch.ones(5))})
    with zipfile.ZipFile(tmp_path / "b.pt") as records, (tmp_path / "b.pt").open("rb") as file:
        for info in records.infolist():
            file.seek(info.header_offset + 26)
            name, extra = (int.from_bytes(file.read(2), "little") for _ in range(2))
            assert (info.header_offset + 30 + name + extra) % 64 == 0


def _damage(path: Path, record: str) -> None:
    """One byte of the record's data."""
    with zipfile.ZipFile(path) as records, path.open("r+b") as file:
        info = next(info for info in records.infolist() if info.filename.endswith(record))
        file.seek(info.header_offset + 26)
        name, extra = (int.from_bytes(file.read(2), "little") for _ in range(2))
        file.seek(info.header_offset + 30 + name + extra + info.file_size // 2)
        byte = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte[0] ^ 1]))


def test_a_damaged_tensor_is_found_when_it_is_read(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(3), "b": torch.ones(4)}, tmp_path / "a.pt")
    _damage(tmp_path / "a.pt", "data/1")
    found = read_archive(tmp_path / "a.pt")
    assert torch.equal(found["a"].load(), torch.ones(3))
    for _ in range(2):
        with pytest.raises(
            LNSConfigError, match=r"a\.pt is damaged: the checksum of its record \S*data/1 does not match"
        ):
            found["b"].load()


def test_a_damaged_pickle_is_found_before_it_is_loaded(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(3)}, tmp_path / "a.pt")
    _damage(tmp_path / "a.pt", "data.pkl")
    with pytest.raises(LNSConfigError, match=r"is damaged: the checksum of its record \S*data\.pkl does not match"):
        read_archive(tmp_path / "a.pt")


def test_views_of_one_storage_are_compared_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = torch.arange(8.0)
    torch.save({"a": whole[:3], "b": whole[3:], "c": torch.ones(2)}, tmp_path / "a.pt")
    found, sizes = read_archive(tmp_path / "a.pt"), []
    monkeypatch.setattr(zlib, "crc32", lambda content, real=zlib.crc32: sizes.append(content.nbytes) or real(content))
    for _ in range(2):
        assert torch.equal(found["a"].load(), whole[:3]) and torch.equal(found["b"].load(), whole[3:])
        assert torch.equal(found["c"].load(), torch.ones(2))
    assert sizes == [32, 8]


def test_a_file_is_mapped_once_for_many_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Anew for a tensor that is read again, which is its reader's own, and after a number of bytes."""
    loads: list[Path] = []
    monkeypatch.setattr(archive, "_load", lambda path, real=archive._load: loads.append(path) or real(path))
    whole = torch.arange(8.0)
    torch.save({"a": whole, "b": whole[2:], "c": torch.ones(2), "d": torch.ones(3)}, tmp_path / "a.pt")
    found = read_archive(tmp_path / "a.pt")
    loads.clear()
    found["a"].load().zero_()
    assert torch.equal(found["c"].load(), torch.ones(2)) and len(loads) == 1
    assert torch.equal(found["b"].load(), whole[2:]) and len(loads) == 2
    assert torch.equal(found["b"].load(), whole[2:]) and len(loads) == 3
    monkeypatch.setattr(archive, "_MAPPED", 8)
    assert torch.equal(found["c"].load(), torch.ones(2)) and len(loads) == 4
    assert torch.equal(found["d"].load(), torch.ones(3)) and len(loads) == 5


def test_a_storage_that_torch_maps_in_part_is_no_damage(tmp_path: Path) -> None:
    """Seven bytes, of which a tensor of fp32 has four."""
    torch.save({"a": torch.zeros(7, dtype=torch.uint8)[:4].view(torch.float32)}, tmp_path / "a.pt")
    assert torch.equal(read_archive(tmp_path / "a.pt")["a"].load(), torch.zeros(1))


def test_a_file_that_changes_while_it_is_read(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(3)}, tmp_path / "a.pt")
    found = read_archive(tmp_path / "a.pt")
    torch.save({"a": torch.ones(4)}, tmp_path / "a.pt")
    with pytest.raises(LNSConfigError, match=r"a\.pt was changed while it was read"):
        found["a"].load()


def test_compressed_and_exchanged_records_are_refused(tmp_path: Path) -> None:
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
    with pytest.raises(LNSConfigError, match="c.pt is truncated or not a file of torch.save: File name in directory"):
        read_archive(tmp_path / "c.pt")


def test_old_torch_files_are_refused(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(2)}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    with pytest.raises(LNSConfigError, match=r"not a file of torch\.save"):
        check_archive(tmp_path / "old.pt")


@pytest.mark.parametrize("size", [10, 100, 10_000])
def test_safetensors_round_trip(tmp_path: Path, size: int) -> None:
    tensors = {"a": torch.randn(3, 4), "b": torch.randn(5).bfloat16(), "c": torch.randn(2, 2).half()}
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
