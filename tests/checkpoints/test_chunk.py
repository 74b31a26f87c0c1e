"""Chunks of a distributed checkpoint: read where they lie, at any address, and compared with their checksums."""

from __future__ import annotations

import io
import zipfile
from typing import Any

import pytest
import torch

from olmo_lns.checkpoints.chunk import SavedTensor
from olmo_lns.errors import LNSConfigError

WHOLE = torch.arange(24.0).view(4, 6)
TENSORS = {
    "whole": WHOLE,
    "rows": WHOLE[1:3],
    "columns": WHOLE[:, 1:3],
    "transposed": WHOLE.t(),
    "bfloat16": WHOLE.bfloat16(),
    "int64": torch.arange(3),
    "float8": WHOLE.to(torch.float8_e4m3fn),
    "scalar": torch.tensor(3.0),
    "empty": torch.empty(0, 4),
}


def saved(value: Any, shift: int = 0) -> memoryview:
    """``value`` as ``torch.save`` writes it, ``shift`` bytes into a larger writable buffer."""
    file = io.BytesIO()
    torch.save(value, file)
    return memoryview(bytearray(shift) + bytearray(file.getvalue()))[shift:]


@pytest.mark.parametrize("name", TENSORS)
@pytest.mark.parametrize("shift", [0, 1, 3])
def test_values_and_bytes(name: str, shift: int) -> None:
    expected = TENSORS[name]
    found = SavedTensor.read(saved(expected, shift), "a chunk")
    values = found.values()
    assert values.dtype == expected.dtype and values.shape == expected.shape and torch.equal(values, expected)
    assert values.data_ptr() % 64 == 0 or not values.numel() or values.storage_offset()
    raw = found.raw()
    assert raw.dtype == torch.uint8 and raw.shape == (expected.nbytes,)
    assert raw.numpy().tobytes() == expected.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def test_bytes_are_not_copied_and_values_are() -> None:
    content = saved(WHOLE)
    found = SavedTensor.read(content, "a chunk")
    raw, values = found.raw(), found.values()
    values.zero_()
    assert bytes(raw.numpy()) != bytes(values.view(-1).view(torch.uint8).numpy())
    assert torch.frombuffer(content, dtype=torch.uint8).data_ptr() < raw.data_ptr()
    assert raw.data_ptr() < torch.frombuffer(content, dtype=torch.uint8).data_ptr() + len(content)


@pytest.mark.parametrize("record", ["data.pkl", "data/0", "version"])
def test_a_changed_byte_in_any_record_is_found(record: str) -> None:
    content = saved(WHOLE)
    with zipfile.ZipFile(io.BytesIO(bytes(content))) as archive:
        info = next(info for info in archive.infolist() if info.filename.endswith(record))
        start = content.obj.index(archive.read(info), info.header_offset)
    content[start] ^= 1
    with pytest.raises(LNSConfigError, match=rf"a chunk is damaged: the checksum of its record \S*{record}"):
        SavedTensor.read(content, "a chunk")


def test_what_is_no_tensor_with_values_is_refused() -> None:
    noted = WHOLE.clone()
    noted.note = torch.ones(4, 6)  # type: ignore[attr-defined]  # saved beside it
    for value, words in (
        (torch.zeros(3, device="meta"), "a chunk is a tensor without values, which cannot be exported"),
        (torch.eye(3).to_sparse(), "a chunk holds more than the bytes of one tensor"),
        (
            torch._neg_view(WHOLE),
            "a chunk is a view that changes the signs of what is stored, which cannot be exported",
        ),
        (noted, "a chunk holds more than the bytes of one tensor: archive/data/1"),
        ({"a": WHOLE}, "a chunk: expected a tensor, found dict"),
        (zipfile.ZipFile, "a chunk cannot be loaded safely"),
    ):
        with pytest.raises(LNSConfigError, match=words):
            SavedTensor.read(saved(value), "a chunk")
    with pytest.raises(LNSConfigError, match="a chunk is truncated or not a file of torch.save"):
        SavedTensor.read(saved(WHOLE)[:-30], "a chunk")


def test_the_other_byte_order_is_refused() -> None:
    source, target = io.BytesIO(bytes(saved(WHOLE))), io.BytesIO()
    with zipfile.ZipFile(source) as archive, zipfile.ZipFile(target, "w", zipfile.ZIP_STORED) as other:
        for info in archive.infolist():
            content = archive.read(info)
            other.writestr(info.filename, b"big" if info.filename.endswith("byteorder") else content)
    with pytest.raises(LNSConfigError, match="a chunk was written on a machine of the other byte order, b'big'"):
        SavedTensor.read(memoryview(bytearray(target.getvalue())), "a chunk")


def test_no_changed_byte_is_taken_for_another_tensor() -> None:
    """Every byte that is no padding: either it is found, in one line, or the values are the same."""
    content = saved(torch.arange(3.0))
    for place in range(len(content)):
        for flip in (1, 0x80, 0xFF):
            content[place] ^= flip
            try:
                assert torch.equal(SavedTensor.read(content, "a chunk").values(), torch.arange(3.0)), place
            except LNSConfigError as error:
                assert str(error).startswith("a chunk") and "\n" not in str(error)
            content[place] ^= flip
