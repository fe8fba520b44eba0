"""Memory in huge pages, made resident before it is needed.

The kernel provides a page of memory at the first write. 4 KiB take 1.4 µs, and 8 to 75 on a virtual machine whose host must provide
the memory first. A prompt of 2,000 tokens that is the first to use its KV pages faulted 6,000 of those.
"""

import ctypes
import logging
import mmap
import os
import threading
from collections.abc import Sequence

import torch

LINE = 64
"""Bytes of a cache line. Tensors start on one: a vector across two lines takes twice as long to load."""
PAGE = 4096
HUGE_PAGE = 2 << 20
MADV_POPULATE_WRITE = 23
"""Linux 5.14."""
NICENESS = 19

logger = logging.getLogger(__name__)


def room(size: int) -> int:
    """Return the bytes that an arena needs for a part of `size`: a whole number of lines."""
    return -(-size // LINE) * LINE


class Arena:
    """Memory for many tensors, in huge pages if the kernel provides them. It becomes resident when it is written, and is freed with its
    last tensor.
    """

    def __init__(self, size: int) -> None:
        self._map = mmap.mmap(-1, size + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        try:
            self._map.madvise(mmap.MADV_HUGEPAGE)
        except OSError:  # a kernel without them
            pass
        self._memory = torch.frombuffer(self._map, dtype=torch.uint8)
        self._at = -self._memory.data_ptr() % HUGE_PAGE

    def take(self, size: int) -> torch.Tensor:
        """Return the next `size` bytes, [size] uint8 zeros, aligned to 64 bytes. Raises ValueError when the arena is full."""
        start, self._at = self._at, self._at + room(size)
        if self._at > len(self._memory):
            raise ValueError(f"{size} bytes do not fit in what is left of an arena of {len(self._memory)}")
        return self._memory[start : start + size]


class Resident:
    """Keeps the next pages resident, `ahead` pages beyond the highest used one.

    Pages are used from the lowest on, so a worker takes memory in proportion to its work, and a step rarely waits for memory. A
    thread with the lowest priority populates each stretch and ends with it.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], ahead: int) -> None:
        """tensors: each [pages, ...], contiguous, on the CPU."""
        self._tensors, self._ahead = tensors, max(ahead, 1)
        self._pages = len(tensors[0])
        self._until = 0
        self._thread: threading.Thread | None = None

    def mark_used(self, page: int) -> None:
        """Mark `page` as used. It starts a thread only once in `ahead` / 2 pages, and otherwise costs next to nothing."""
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
        """Wait until the started work is done."""
        if self._thread is not None:
            self._thread.join()


def _populate(tensors: Sequence[torch.Tensor], start: int, end: int) -> None:
    """Populate pages `start` to `end` of all tensors, lowest first, one huge page at a time: other threads that map memory wait
    meanwhile.
    """
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
