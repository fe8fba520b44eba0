"""Prompts that need much memory to tokenize run one at a time, even if a client disconnects meanwhile."""

import asyncio
import contextlib
import threading
import time
from unittest.mock import MagicMock

import pytest

from fairlead_common.memory import LARGE
from fairlead_worker.api.request_cpu import RequestCpu
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

    left = asyncio.create_task(worker.encode(lambda: encoding("left"), LARGE + 1, of("a")))
    await begun.wait()
    gave_up = asyncio.create_task(worker.encode(lambda: encoding("gave up"), LARGE + 1, of("a")))
    stays = asyncio.create_task(worker.encode(lambda: encoding("stays"), LARGE + 1, of("a")))
    for task in (left, gave_up):
        await asyncio.sleep(0)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
    assert await worker.encode(lambda: "short", LARGE, of("a")) == "short"  # in its own thread, beside them
    assert order == ["left"]
    go_on.set()
    assert await stays == "stays"
    assert order == ["left", "left done", "stays", "stays done"]


def of(tenant: str) -> RequestCpu:
    return RequestCpu(tenant, None)


async def test_tenants_take_turns() -> None:
    worker = Worker(WorkerConfig(model="file:///none"), MagicMock(), MagicMock(), "here:1")
    order: list[str] = []
    sent = [("a", "first"), ("a", "second"), ("a", "third"), ("b", "other")]
    await asyncio.gather(*(worker.encode(lambda name=name: order.append(name), LARGE + 1, of(tenant)) for tenant, name in sent))
    assert order.index("other") < order.index("third")


async def test_a_list_takes_a_turn_for_each_part_of_its_text() -> None:
    """Another tenant's prompt waits for one part, and short items share a part."""
    worker = Worker(WorkerConfig(model="file:///none"), MagicMock(), MagicMock(), "here:1")
    order: list[object] = []
    sizes = [LARGE, LARGE // 2, LARGE // 2, 1, 2 * LARGE]

    def encode(item: int) -> int:
        order.append(item)
        return -item

    listed = worker.encode_list(encode, range(5), sizes, of("a"))
    encoded, _ = await asyncio.gather(listed, worker.encode(lambda: order.append("other"), LARGE + 1, of("b")))
    assert encoded == [0, -1, -2, -3, -4] and order == [0, "other", 1, 2, 3, 4]
    assert await worker.encode_list(encode, [], [], of("a")) == []


@pytest.mark.parametrize("size", [LARGE, LARGE + 1])
async def test_the_cpu_time_of_an_encoding_is_its_requests(size: int) -> None:
    """Also if the client has left meanwhile."""
    worker = Worker(WorkerConfig(model="file:///none"), MagicMock(), MagicMock(), "here:1")
    cpu, begun, go_on = RequestCpu("a", worker.unreported_cpu), asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def encode() -> None:
        loop.call_soon_threadsafe(begun.set)
        assert go_on.wait(60)
        began = time.thread_time()
        while time.thread_time() - began < 0.02:
            pass

    task = asyncio.create_task(worker.encode(encode, size, cpu))
    await begun.wait()
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    cpu.close()
    go_on.set()
    while not (seconds := worker.unreported_cpu.take("a")):  # noqa: ASYNC110  # the thread has no event
        await asyncio.sleep(0.001)
    assert seconds >= 0.02
