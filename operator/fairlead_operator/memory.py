"""Memory that was needed for a moment is given back to the system.

A pass reads and writes some hundred KB, a page of a list one or two MB, and what the store keeps is allocated in between: the C library's
heap is then mostly holes, which it holds on to (120 services: trimming gave back 4 of 17 MiB).
"""

import asyncio
import ctypes

PERIOD = 60.0  # seconds
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # of mallopt(3)
LARGE = 512 << 10  # bytes: such blocks are kept out of the heap. More than asyncio's 256 KiB for each read: a map for each took 50 us
SPARE = 1 << 20  # bytes that may stay free at the heap's end
ARENAS = 2  # heaps: the event loop's, and one for the lease and what resolves names


def steady() -> None:
    """Bounds that stay: by itself glibc raises the first two with each large block that is freed, and after one page of a list all others
    come from the heap. A C library without mallopt (musl) is left as it is."""
    bound = getattr(ctypes.CDLL(None), "mallopt", None)
    if bound is not None:
        for what, value in ((_M_MMAP_THRESHOLD, LARGE), (_M_TRIM_THRESHOLD, SPARE), (_M_ARENA_MAX, ARENAS)):
            bound(what, value)


async def give_back(period: float = PERIOD) -> None:
    """Trim the heap now and then, for ever. Takes some ms; a C library without malloc_trim (musl) has no such holes to trim."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    while True:
        await asyncio.sleep(period)
        if trim is not None:
            trim(0)
