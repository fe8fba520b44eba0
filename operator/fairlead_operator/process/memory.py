"""Returns unused memory to the system, and keeps the garbage collector from stopping the process.

A reconcile reads and writes some hundred KB, a page of a list one or two MB, and the cache's objects are allocated in between. The C
library's heap then consists mostly of holes, which it keeps (with 120 services trimming returned 4 of 17 MiB).

Python's full collections visit every object and stop the process: with 1,000 services for 0.15 to 0.35 s, several times in a minute of
edits, and a third of a cold start. Nearly all objects live on: libraries, reconcilers, the cache. `gc.freeze` removes the survivors from
the collections (as Instagram's servers do before they fork), so that the automatic ones visit only new objects.
"""

import asyncio
import ctypes
import gc

from fairlead_common import memory

PERIOD = 60.0  # seconds
YOUNG_OBJECTS = 20_000  # new objects until a young collection: running reconciles have fewer, so that few of theirs grow old
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # of mallopt(3)
LARGE = 512 << 10  # bytes: larger blocks stay outside the heap. More than asyncio's 256 KiB per read: a mapping for each took 50 us
SPARE = 1 << 20  # bytes that may stay free at the end of the heap
ARENAS = 2  # heaps: of the event loop, and of the lease's thread and the name resolver


def limit_heap() -> None:
    """Fix glibc's limits, the first two of which glibc raises by itself.

    It does so whenever a large block is freed: after one page of a list all further pages come from the heap. A C library without mallopt
    (musl) is left unchanged.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for what, value in ((_M_MMAP_THRESHOLD, LARGE), (_M_TRIM_THRESHOLD, SPARE), (_M_ARENA_MAX, ARENAS)):
            mallopt(what, value)


async def trim_forever(period: float = PERIOD) -> None:
    """Collect, freeze and trim the heap, now and then periodically. Each full collection stops the process.

    When cancelled, it restores the collector's settings.
    """
    before = gc.get_threshold()
    gc.set_threshold(YOUNG_OBJECTS, *before[1:])
    try:
        while True:
            gc.unfreeze()
            gc.collect()
            gc.freeze()
            memory.trim_heap()
            await asyncio.sleep(period)
    finally:
        gc.unfreeze()
        gc.set_threshold(*before)
