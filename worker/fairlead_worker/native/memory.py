"""Memory in huge pages, and made resident before it is needed.

A page of memory is given by the kernel when it is first written: 4 KiB take 1.4 µs, and 8 to 75 on a virtual machine whose host must find
them first. A prompt of 2,000 tokens that is the first to use its KV pages took 6,000 of those.
"""

import ctypes
import logging
import mmap
import os
import threading
from collections.abc import Sequence

import torch

LINE = 64
"""Bytes of a cache line. Tensors begin at one: a vector across two takes twice as long to load."""
PAGE = 4096
HUGE_PAGE = 2 << 20
MADV_POPULATE_WRITE = 23
"""Linux 5.14."""
NICENESS = 19

logger = logging.getLogger(__name__)


def room(size: int) -> int:
    """Bytes that an arena needs for a part of `size`: a whole number of lines."""
    return -(-size // LINE) * LINE


class Arena:
    """Memory for many tensors, in huge pages where the kernel gives them. Nothing is resident until it is written; all of it is freed once
    no tensor is left."""

    def __init__(self, size: int) -> None:
        self._map = mmap.mmap(-1, size + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        try:
            self._map.madvise(mmap.MADV_HUGEPAGE)
        except OSError:  # a kernel without them
            pass
        self._memory = torch.frombuffer(self._map, dtype=torch.uint8)
        self._at = -self._memory.data_ptr() % HUGE_PAGE

    def take(self, size: int) -> torch.Tensor:
        """The next `size` bytes [size] uint8, zeros, at a multiple of 64. Raises ValueError when the arena is used up."""
        start, self._at = self._at, self._at + room(size)
        if self._at > len(self._memory):
            raise ValueError(f"{size} bytes do not fit in what is left of an arena of {len(self._memory)}")
        return self._memory[start : start + size]


class Resident:
    """Keeps the pages that are used next resident, `ahead` of them beyond the highest one used. Pages are used from the lowest on, so a
    worker takes as much memory as it has had work, and a step hardly ever waits for any.

    A thread of the least priority does it, one for each stretch; it ends with its stretch.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], ahead: int) -> None:
        """tensors: each [pages, ...], contiguous, on the CPU."""
        self._tensors, self._ahead = tensors, max(ahead, 1)
        self._pages = len(tensors[0])
        self._until = 0
        self._thread: threading.Thread | None = None

    def mark_used(self, page: int) -> None:
        """That page is used from now on. Costs next to nothing but for once in half of `ahead` pages."""
        if page + self._ahead // 2 < self._until or self._until == self._pages or (self._thread is not None and self._thread.is_alive()):
            return
        start, self._until = self._until, min(page + 1 + self._ahead, self._pages)
        thread = threading.Thread(target=_populate, args=(self._tensors, start, self._until), name="kv memory")
        try:
            thread.start()
        except RuntimeError as error:
            logger.warning("KV memory is made resident as it is used: %s", error)
            self._until = self._pages
            return
        self._thread = thread

    def wait(self) -> None:
        """Until what was begun is done."""
        if self._thread is not None:
            self._thread.join()


def _populate(tensors: Sequence[torch.Tensor], start: int, end: int) -> None:
    """Pages `start` to `end` of all tensors, the first ones first; a huge page at a time, as whoever maps memory waits meanwhile."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    sizes = [tensor[0].nbytes for tensor in tensors]
    few = max(HUGE_PAGE // max(sizes), 1)
    for first in range(start, end, few):
        for tensor, size in zip(tensors, sizes, strict=True):
            begin, stop = tensor.data_ptr() + first * size, tensor.data_ptr() + min(first + few, end) * size
            begin -= begin % PAGE
            if madvise(begin, stop - begin, MADV_POPULATE_WRITE):
                logger.info("KV memory is made resident as it is used: %s", os.strerror(ctypes.get_errno()))
                return
