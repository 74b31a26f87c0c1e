"""Reading weights one at a time: in order, the next two meanwhile, never more memory than the largest takes."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby

import pytest
import torch

from olmo_lns.checkpoints.archive import tensor_bytes
from olmo_lns.checkpoints.tensors import LazyTensor, for_each, join_rows, split_rows


@pytest.mark.parametrize("sizes", [[], [5], [8, 1, 3, 4, 4, 6, 2, 1], [1, 1, 1, 9], [4, 4, 4]])
def test_in_order_and_no_more_memory_than_the_largest(sizes):
    held: list[weakref.ref[torch.Tensor]] = []
    most, seen = 0, []

    def read(size):
        nonlocal most
        tensor = torch.full((size,), float(size))
        held.append(weakref.ref(tensor))
        most = max(most, sum(t.numel() for t in (ref() for ref in held) if t is not None))
        return tensor

    def use(tensor, data):
        assert data.shape == tensor.shape
        seen.append(int(data[0]))

    gc.collect()
    for_each([LazyTensor((size,), torch.float32, lambda size=size: read(size)) for size in sizes], use)
    assert seen == sizes
    assert most <= max(sizes, default=0)


@pytest.mark.parametrize("bad", [0, 1, 2])
def test_what_goes_wrong_in_reading_is_raised(bad):
    def fail():
        raise OSError("unreadable")

    seen = []
    good = LazyTensor((2,), torch.float32, lambda: torch.zeros(2))
    large = LazyTensor((9,), torch.float32, lambda: torch.zeros(9))
    tensors = [good, good, good, large]
    tensors[bad] = LazyTensor((2,), torch.float32, fail)
    with pytest.raises(OSError, match="unreadable"):
        for_each(tensors, lambda tensor, data: seen.append(data))
    assert len(seen) == bad


def test_the_next_is_read_while_one_is_used():
    """Shown by the order of events: the second is read before the first has been used up."""
    events = []
    read_second = threading.Event()
    first = LazyTensor((1,), torch.float32, lambda: torch.zeros(1))
    second = LazyTensor((1,), torch.float32, lambda: (read_second.set(), torch.ones(1))[1])
    large = LazyTensor((2,), torch.float32, lambda: torch.zeros(2))

    def use(tensor, data):
        if tensor is first:
            assert read_second.wait(60)
        events.append(tensor)

    for_each([first, second, large], use)
    assert events == [first, second, large]


def test_two_are_read_at_once():
    """Each waits for the other one: the reading of neither ends before that of both has begun."""
    both = threading.Barrier(2, timeout=60)
    using = threading.Event()

    def read():
        assert using.wait(60)
        both.wait()
        return torch.zeros(1)

    first = LazyTensor((1,), torch.float32, lambda: torch.zeros(1))
    pair = [LazyTensor((1,), torch.float32, read) for _ in range(2)]
    large = LazyTensor((9,), torch.float32, lambda: torch.zeros(9))
    used = []
    for_each([first, *pair, large], lambda tensor, data: (using.set(), used.append(tensor)))
    assert used == [first, *pair, large]


def test_rows_that_are_read_at_once_share_the_whole():
    reads, both = [], threading.Barrier(2, timeout=60)
    whole = torch.arange(12.0).view(6, 2)

    def read_whole():
        reads.append(threading.get_ident())
        time.sleep(0.1)  # in which the other thread, if nothing stopped it, would begin to read as well
        return whole.clone()

    parts = split_rows(LazyTensor((6, 2), torch.float32, read_whole), (3, 3))

    def read(part):
        both.wait()
        return part.load()

    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(read, parts))
    assert torch.equal(torch.cat(found), whole) and len(reads) == 1


def test_rows_of_one_tensor_are_read_once():
    """Each while the one before it is in use; nothing is held when the last of them is gone."""
    reads: list[weakref.ref[torch.Tensor]] = []
    whole = torch.arange(12.0).view(6, 2)

    def read():
        tensor = whole.clone()
        reads.append(weakref.ref(tensor))
        return tensor

    parts = split_rows(LazyTensor((6, 2), torch.float32, read), (3, 1, 2))
    assert [part.shape for part in parts] == [(3, 2), (1, 2), (2, 2)]
    first = parts[0].load()
    second = parts[1].load()
    assert torch.equal(first, whole[:3]) and torch.equal(second, whole[3:4])
    del first
    third = parts[2].load()
    assert torch.equal(third, whole[4:]) and len(reads) == 1
    del second, third
    gc.collect()
    assert reads[0]() is None
    assert torch.equal(parts[1].load(), whole[3:4]) and len(reads) == 2


def test_what_is_only_copied_is_read_as_bytes():
    """Also in parts; what is computed with is not."""
    whole, asked = torch.arange(12.0).view(6, 2), []

    def read(kind, tensor):
        asked.append(kind)
        return tensor

    raw = whole.view(-1).view(torch.uint8)
    tensor = LazyTensor((6, 2), torch.float32, lambda: read("values", whole), lambda: read("bytes", raw))
    found = []
    parts, turned = split_rows(tensor, (2, 4)), tensor.with_rows(lambda rows: rows.flip(0))
    for_each(
        [tensor, *parts, turned, tensor.map(torch.neg), parts[1].map(torch.neg), turned.map(torch.neg)],
        lambda tensor, data: found.append(bytes(tensor_bytes(data, tensor))),
    )
    expected = [whole, whole[:2], whole[2:], whole.flip(0), -whole, -whole[2:], -whole.flip(0)]
    assert found == [value.contiguous().numpy().tobytes() for value in expected]
    assert [kind for kind, _ in groupby(asked)] == ["bytes", "values"]
    with pytest.raises(AssertionError):
        tensor_bytes(raw[:-1], tensor)


def test_joined_rows():
    """Cut where they were joined, the parts are read and not the whole; elsewhere, or computed with, the whole is."""
    whole = torch.arange(12.0).view(6, 2)
    raw = whole.view(-1).view(torch.uint8)
    tensor = LazyTensor((6, 2), torch.float32, whole.clone, raw.clone)
    first, second = split_rows(tensor, (4, 2))
    turned = join_rows(second, first)
    expected = torch.cat([whole[4:], whole[:4]])
    assert turned.shape == (6, 2) and turned.dtype == torch.float32
    assert torch.equal(turned.load(), expected)
    assert bytes(tensor_bytes(turned.read(), turned)) == expected.numpy().tobytes()
    assert split_rows(turned, (2, 4)) == [second, first]
    for changed, values in (
        (turned, expected),
        (turned.map(torch.neg), -expected),
        (turned.with_rows(torch.clone), expected),
    ):
        parts = split_rows(changed, (2, 4) if changed is not turned else (3, 3))
        assert torch.equal(torch.cat([part.load() for part in parts]), values)
        assert b"".join(bytes(tensor_bytes(part.read(), part)) for part in parts) == values.numpy().tobytes()
    without = join_rows(turned.map(torch.neg), first)
    assert without.raw is None and torch.equal(without.load(), torch.cat([-expected, whole[:4]]))
