"""Turns of connections with pipelined requests."""

import asyncio
from types import SimpleNamespace

from fairlead_common.http.connection_limiter import STARTS_PER_PASS, ConnectionLimiter


async def test_a_failed_start_takes_no_turn_from_the_others() -> None:
    limits = SimpleNamespace(max_connections=1, header_timeout=1.0, body_timeout=1.0)
    guard = ConnectionLimiter(limits, str)
    failed, started, whole = list[object](), list[int](), asyncio.Event()
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: failed.append(context["exception"]))

    def fails() -> None:
        raise RuntimeError("a fault of ours")

    guard.schedule(fails)
    for number in range(2 * STARTS_PER_PASS):
        guard.schedule(lambda number=number: started.append(number))  # type: ignore[misc]
    guard.schedule(whole.set)
    async with asyncio.timeout(5):
        await whole.wait()
    assert started == list(range(2 * STARTS_PER_PASS)) and len(failed) == 1
