"""Return short-lived memory to the system, and keep garbage collections out of the event loop.

A tokenizer takes some 150 bytes per token (tokenizers: `Encoding` has its text, offsets, word and masks), up to 170 MiB for a megabyte of
text. The C library then keeps the freed memory in the arena of each thread that tokenized.
"""

import ctypes
import gc
from functools import cache
from typing import Any, Final

LARGE: Final = 1 << 18
"""Characters of a text, or bytes of a body, from which `trim_heap` is worth a call."""


def trim_heap() -> None:
    """Trim the heap: 55 ms for 370 MiB, without the GIL. Does nothing without malloc_trim (musl leaves no such holes)."""
    trim = _malloc_trim()
    if trim is not None:
        trim(0)


def freeze_gc() -> None:
    """Keep full garbage collections out of a server's event loop: call it when all permanent objects are loaded.

    With 4,000 connections a full collection blocked the loop for 120 to 550 ms. Connections leave no cycles (tested): a full one is needed
    only for cycles of libraries. It comes after some 50 million new containers instead of 700,000.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(5_000, 10, 1_000)


@cache
def _malloc_trim() -> Any:
    return getattr(ctypes.CDLL(None), "malloc_trim", None)
