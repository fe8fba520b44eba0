"""Imports at startup without garbage collection."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def gc_frozen() -> Iterator[None]:
    """What is imported within stays for the process's life, and no collection goes through it, now or later.

    torch and transformers make 400,000 objects. Python's collector went through them again and again while they grew, a fifth to a quarter
    of their import (5.0 s, 3.8 without), and once more before the engine was ready (0.3 s)."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if collects:
            gc.enable()
