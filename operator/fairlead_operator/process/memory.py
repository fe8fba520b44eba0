"""Memory: what was needed for a moment is given back to the system, and looking for garbage stops nobody.

A pass reads and writes some hundred KB, a page of a list one or two MB, and what the store keeps is allocated in between: the C library's
heap is then mostly holes, which it holds on to (120 services: trimming gave back 4 of 17 MiB).

Python's full collections go through every object that there is, with all else at a standstill: with 1,000 services 0.15 to 0.35 s, several
times in a minute of edits, and a third of a cold start. Nearly all of it lives on: libraries, loops, the store. `gc.freeze` takes what has
survived out of the collections (as Instagram's servers do before they fork), so that the automatic ones see only what is new.
"""

import asyncio
import ctypes
import gc

from fairlead_common import memory

PERIOD = 60.0  # seconds
YOUNG_OBJECTS = (
    20_000  # objects made until the youngest are looked through: the passes under way have fewer, so that few of theirs grow old
)
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # of mallopt(3)
LARGE = 512 << 10  # bytes: such blocks are kept out of the heap. More than asyncio's 256 KiB for each read: a map for each took 50 us
SPARE = 1 << 20  # bytes that may stay free at the heap's end
ARENAS = 2  # heaps: the event loop's, and one for the lease and what resolves names


def limit_heap() -> None:
    """Bounds that stay: by itself glibc raises the first two with each large block that is freed, and after one page of a list all others
    come from the heap. A C library without mallopt (musl) is left as it is."""
    bound = getattr(ctypes.CDLL(None), "mallopt", None)
    if bound is not None:
        for what, value in ((_M_MMAP_THRESHOLD, LARGE), (_M_TRIM_THRESHOLD, SPARE), (_M_ARENA_MAX, ARENAS)):
            bound(what, value)


async def trim_forever(period: float = PERIOD) -> None:
    """At once, and then for ever: look through all objects, freeze them, trim the heap. Stops the process for a full collection.

    Cancelled, it leaves the collector as it found it.
    """
    before = gc.get_threshold()
    gc.set_threshold(YOUNG_OBJECTS, *before[1:])
    try:
        while True:
            gc.unfreeze()
            gc.collect()
            gc.freeze()
            memory.give_back()
            await asyncio.sleep(period)
    finally:
        gc.unfreeze()
        gc.set_threshold(*before)
