"""Turns of connections whose requests were read ahead."""

import asyncio
from types import SimpleNamespace
from typing import Any

from fairlead_common.http.connection_limiter import TURNS, Guard


async def test_a_start_that_fails_takes_no_turn_from_the_others() -> None:
    limits = SimpleNamespace(max_header_bytes=1, max_headers=1, max_connections=1, header_timeout=1.0, body_timeout=1.0)
    guard: Guard[Any] = Guard(limits)
    failed, started, whole = list[object](), list[int](), asyncio.Event()
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: failed.append(context["exception"]))

    def fails() -> None:
        raise RuntimeError("a fault of ours")

    guard.take_turn(fails)
    for number in range(2 * TURNS):
        guard.take_turn(lambda number=number: started.append(number))  # type: ignore[misc]
    guard.take_turn(whole.set)
    async with asyncio.timeout(5):
        await whole.wait()
    assert started == list(range(2 * TURNS)) and len(failed) == 1
