"""Memory: what was needed for a moment is given back to the system, and looking for garbage stops nobody.

A pass reads and writes some hundred KB, and what the store keeps is allocated in between: the C library's heap is then mostly holes, which
it holds on to (120 services: trimming gave back 4 of 17 MiB).

Python's full collections go through every object that there is, with all else at a standstill: with 1,000 services 0.15 to 0.35 s, several
times in a minute of edits, and a third of a cold start. Nearly all of it lives on: libraries, loops, the store. `gc.freeze` takes what has
survived out of the collections (as Instagram's servers do before they fork), so that the automatic ones see only what is new.
"""

import asyncio
import ctypes
import gc

PERIOD = 60.0  # seconds
YOUNG = 20_000  # objects made until the youngest are looked through: the passes under way have fewer, so that few of theirs grow old


async def give_back(period: float = PERIOD) -> None:
    """At once, and then for ever: look through all objects, freeze them, trim the heap. Stops the process for a full collection.

    A C library without malloc_trim (musl) has no such holes to trim. Cancelled, it leaves the collector as it found it.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    before = gc.get_threshold()
    gc.set_threshold(YOUNG, *before[1:])
    try:
        while True:
            gc.unfreeze()
            gc.collect()
            gc.freeze()
            if trim is not None:
                trim(0)
            await asyncio.sleep(period)
    finally:
        gc.unfreeze()
        gc.set_threshold(*before)
