"""Memory that one weight after another is written in: used again only when nothing refers to it."""

from __future__ import annotations

import gc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from olmo_lns.export.fold import Rounding
from olmo_lns.export.memory import Memory


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(3, 5), (7,), (), (0,), (4, 0)])
def test_as_torch_empty(shape, dtype):
    found = Memory().empty(torch.Size(shape), dtype)
    assert found.shape == shape and found.dtype == dtype and found.is_contiguous()
    assert found.untyped_storage().nbytes() == found.nbytes  # torch.save writes the whole storage


def test_memory_is_used_again():
    memory = Memory()
    first = memory.empty(torch.Size((1000,)), torch.float32)
    place = first.data_ptr()
    del first
    gc.collect()
    smaller = memory.empty(torch.Size((10, 10)), torch.float64)
    assert smaller.data_ptr() == place
    assert memory.empty(torch.Size((10,)), torch.float32).data_ptr() != place


def test_not_while_a_view_of_it_is_left():
    memory = Memory()
    whole = memory.empty(torch.Size((6, 4)), torch.float32).fill_(1.0)
    rows = whole[2:4].t().numpy()
    del whole
    gc.collect()
    memory.empty(torch.Size((6, 4)), torch.float32).fill_(2.0)
    assert (rows == 1.0).all()


def test_what_is_too_small_is_given_back():
    memory = Memory()
    for size in (10, 1000, 100_000):
        memory.empty(torch.Size((size,)), torch.float32)
    gc.collect()
    assert [len(block) for block in memory._free] == [400_000]


def test_threads_get_memory_of_their_own():
    rounding, weights = Rounding(), [torch.full((50_000,), float(number)) for number in range(1, 65)]
    with ThreadPoolExecutor(8) as pool:
        scaled = pool.map(lambda weight: rounding.scale("w", weight, 0.5, torch.float32), weights)
        for number, found in enumerate(scaled, 1):
            assert (found == number / 2).all()


@pytest.mark.skipif(not Path("/proc/self/status").is_file(), reason="reads /proc")
def test_it_counts_as_the_process_s_own():
    """Not as shared memory, which measurements of what a process allocated leave out."""

    def own():
        (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon")]
        return int(line.split()[1]) * 1024

    before, size = own(), 1 << 28
    memory = Memory()
    held = memory.empty(torch.Size((size,)), torch.uint8).fill_(1)
    assert own() - before > size * 0.9
    del held
