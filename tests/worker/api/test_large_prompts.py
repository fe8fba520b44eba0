"""Prompts that need much memory to tokenize run one at a time, even if a client disconnects meanwhile."""

import asyncio
import contextlib
import threading
from unittest.mock import MagicMock

from fairlead_common.memory import LARGE
from fairlead_worker.api.worker import Worker
from fairlead_worker.config import WorkerConfig


async def test_a_client_that_leaves_does_not_free_the_turn_of_its_thread() -> None:
    worker = Worker(WorkerConfig(model="file:///none"), MagicMock(), MagicMock(), "here:1")
    go_on, begun, order = threading.Event(), asyncio.Event(), []
    loop = asyncio.get_running_loop()

    def encoding(name: str) -> str:
        order.append(name)
        loop.call_soon_threadsafe(begun.set)
        assert go_on.wait(60)
        order.append(f"{name} done")
        return name

    left = asyncio.create_task(worker.encode(lambda: encoding("left"), LARGE + 1, "a"))
    await begun.wait()
    gave_up = asyncio.create_task(worker.encode(lambda: encoding("gave up"), LARGE + 1, "a"))
    stays = asyncio.create_task(worker.encode(lambda: encoding("stays"), LARGE + 1, "a"))
    for task in (left, gave_up):
        await asyncio.sleep(0)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
    assert await worker.encode(lambda: "short", LARGE, "a") == "short"  # in its own thread, beside them
    assert order == ["left"]
    go_on.set()
    assert await stays == "stays"
    assert order == ["left", "left done", "stays", "stays done"]


async def test_tenants_take_turns() -> None:
    worker = Worker(WorkerConfig(model="file:///none"), MagicMock(), MagicMock(), "here:1")
    order: list[str] = []
    sent = [("a", "first"), ("a", "second"), ("a", "third"), ("b", "other")]
    await asyncio.gather(*(worker.encode(lambda name=name: order.append(name), LARGE + 1, tenant) for tenant, name in sent))
    assert order.index("other") < order.index("third")
