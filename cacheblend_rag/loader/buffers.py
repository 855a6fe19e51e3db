"""Memory for layers on their way to the model, used again prompt after prompt.

The system gives memory page by page, as each is first touched. For a prompt of a few thousand tokens on a small model that takes
longer than moving the KV.
"""

from __future__ import annotations

import math
import mmap
import weakref
from collections import deque
from collections.abc import Sequence

import torch

__all__ = ["BufferPool", "empty_buffer"]

# Smaller ones are not worth it. Few sizes, so that prompts of other lengths can have the same memory.
_LEAST_BYTES = 1 << 18
_HUGE_PAGE = 1 << 21


class BufferPool:
    """Lends memory to any thread until no tensor is in it any more, and keeps up to `kept_bytes` of what is not lent."""

    def __init__(self, kept_bytes: int) -> None:
        self.kept_bytes = kept_bytes
        self._free: deque[mmap.mmap] = deque()

    @property
    def free_bytes(self) -> int:
        """Bytes that are kept and not lent."""
        return sum(map(len, list(self._free)))

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor on the CPU with undefined contents."""
        nbytes = math.prod(shape) * dtype.itemsize
        if nbytes < _LEAST_BYTES:
            return torch.empty(*shape, dtype=dtype)
        step = min(1 << (nbytes - 1).bit_length(), _HUGE_PAGE)
        memory = self._take(-(-nbytes // step) * step)
        # The tensor holds the view, and nothing else does.
        view = memoryview(memory)
        weakref.finalize(view, self._give_back, memory).atexit = False
        return torch.frombuffer(view, dtype=dtype, count=math.prod(shape)).view(*shape)

    def _take(self, size: int) -> mmap.mmap:
        for _ in range(len(self._free)):
            try:
                memory = self._free.popleft()
            except IndexError:
                break
            if len(memory) == size:
                return memory
            self._free.append(memory)
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if size >= _HUGE_PAGE and hasattr(mmap, "MADV_HUGEPAGE"):
            memory.madvise(mmap.MADV_HUGEPAGE)
        return memory

    def _give_back(self, memory: mmap.mmap) -> None:
        self._free.append(memory)
        # The oldest go: their size is asked for no longer.
        while self.free_bytes > self.kept_bytes:
            try:
                self._free.popleft()
            except IndexError:
                break


empty_buffer = BufferPool(kept_bytes=256 << 20).empty
"""Returns a tensor of the process's pool; see `BufferPool.empty`."""
