"""Memory for one weight after another."""

from __future__ import annotations

import mmap
import weakref
from threading import Lock

import numpy
import torch

__all__ = ["Memory"]


class Memory:
    """Uninitialized tensors in memory that was in use before: new pages cost more time than the arithmetic.

    What a tensor lies in is free for the next when nothing refers to it or to a view of it. Threads may share it.
    """

    def __init__(self) -> None:
        self._free: list[mmap.mmap] = []
        self._lock = Lock()

    def empty(self, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        """As ``torch.empty(shape, dtype=dtype)``, on the CPU."""
        size = shape.numel() * dtype.itemsize
        if not size:
            return torch.empty(shape, dtype=dtype)
        block = self._block(size)
        array = numpy.frombuffer(block, dtype=numpy.uint8, count=size)
        weakref.finalize(array, self._free.append, block).atexit = False
        return torch.from_numpy(array).view(dtype).view(shape)

    def _block(self, size: int) -> mmap.mmap:
        """The smallest that is free and large enough; if there is none a new one, in place of those."""
        with self._lock:
            self._free.sort(key=len)
            for index, block in enumerate(self._free):
                if len(block) >= size:
                    return self._free.pop(index)
            self._free.clear()
        return mmap.mmap(-1, size, mmap.MAP_PRIVATE)  # not shared, which is counted as no process's own
