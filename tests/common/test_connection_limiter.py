"""Turns of clients whose requests arrive together."""

import asyncio
from types import SimpleNamespace

from fairlead_common.http.connection_limiter import STARTS_PER_PASS, ConnectionLimiter
from fairlead_common.http.response import Headers


def make() -> ConnectionLimiter:
    limits = SimpleNamespace(max_connections=1, header_timeout=1.0, body_timeout=1.0)
    return ConnectionLimiter(limits, str, lambda headers: headers[0][1].decode())


async def test_another_client_starts_beside_hundreds_of_requests_of_one() -> None:
    guard, started = make(), list[str]()

    async def request(client: str) -> None:
        headers: Headers = [(b"tenant", client.encode())]
        await guard.take_turn(headers)
        started.append(client)

    async with asyncio.timeout(5), asyncio.TaskGroup() as tasks:
        for client in ["busy"] * 500 + ["other"] * 2:
            tasks.create_task(request(client))
    assert [place for place, client in enumerate(started) if client == "other"] == [STARTS_PER_PASS + 1, STARTS_PER_PASS + 3]
    assert len(started) == 502


async def test_a_request_that_ends_while_it_waits_takes_no_turn() -> None:
    guard, headers = make(), [(b"tenant", b"one")]
    tasks = [asyncio.ensure_future(guard.take_turn(headers)) for _ in range(3 * STARTS_PER_PASS)]
    await asyncio.sleep(0)
    waiting = [task for task in tasks if not task.done()]
    gone, rest = waiting[:STARTS_PER_PASS], waiting[STARTS_PER_PASS:]
    for task in gone:
        task.cancel()
    done, _ = await asyncio.wait(rest, timeout=5)
    assert len(waiting) == 2 * STARTS_PER_PASS and len(done) == STARTS_PER_PASS
