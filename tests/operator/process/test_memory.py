"""Garbage collection of a long-lived process: permanent objects are not scanned again, and cycles are still freed."""

import asyncio
import gc
import weakref
from collections.abc import Callable

from fairlead_operator.process.memory import trim_forever


class Node:
    """Refers to itself: only the garbage collector can free it."""

    def __init__(self) -> None:
        self.itself = self


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110  # the garbage collector has no event to wait for
            await asyncio.sleep(0.001)


async def test_survivors_are_left_out_of_collections_until_the_next_full_one() -> None:
    before, node = gc.get_threshold(), Node()
    there = weakref.ref(node)
    task = asyncio.create_task(trim_forever(period=0.3))
    await until(gc.get_freeze_count)
    assert not any(one is node for one in gc.get_objects())
    del node
    gc.collect()
    assert there() is not None
    await until(lambda: there() is None)

    task.cancel()
    await asyncio.wait([task])
    assert (gc.get_freeze_count(), gc.get_threshold()) == (0, before)


async def test_dead_objects_are_not_frozen() -> None:
    gc.disable()  # by itself it collects whenever it likes
    try:
        there = weakref.ref(Node())
        task = asyncio.create_task(trim_forever(period=60))
        await until(gc.get_freeze_count)
        assert there() is None
        task.cancel()
        await asyncio.wait([task])
    finally:
        gc.enable()
