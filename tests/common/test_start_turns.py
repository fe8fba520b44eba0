"""Turns of clients whose requests arrive together."""

import asyncio
from collections import Counter
from time import monotonic
from types import SimpleNamespace

import pytest
from tests.wire.boundaries import Transport

from fairlead_common.http.client_connection import STREAMED_BYTES, ClientConnection, Request
from fairlead_common.http.connection_limiter import ConnectionLimiter
from fairlead_common.http.response import Headers, Reply
from fairlead_common.http.start_turns import CONTENDED_STARTS, STARTS_PER_PASS


def make() -> ConnectionLimiter:
    limits = SimpleNamespace(max_connections=1, header_timeout=1.0, body_timeout=1.0)
    return ConnectionLimiter(limits, str, lambda headers: headers[0][1].decode())


async def test_another_client_starts_beside_hundreds_of_requests_of_one() -> None:
    guard, started = make(), list[str]()

    async def request(client: str) -> None:
        headers: Headers = [(b"tenant", client.encode())]
        await guard.turns.take(headers)
        started.append(client)

    async with asyncio.timeout(5), asyncio.TaskGroup() as tasks:
        for client in ["busy"] * 500 + ["other"] * 2:
            tasks.create_task(request(client))
    assert [place for place, client in enumerate(started) if client == "other"] == [STARTS_PER_PASS + 1, STARTS_PER_PASS + 3]
    assert len(started) == 502


async def test_fewer_requests_start_at_once_while_clients_contend() -> None:
    guard, together = make(), list[int]()

    async def request(client: str) -> None:
        await guard.turns.take([(b"tenant", client.encode())])
        together[-1] += 1

    async with asyncio.timeout(5), asyncio.TaskGroup() as tasks:
        together.append(0)
        for client in ["busy"] * 200 + ["other"]:
            tasks.create_task(request(client))
        while sum(together) < 201:
            await asyncio.sleep(0)
            together.append(0)
    found = [count for count in together if count]
    assert found[0] == STARTS_PER_PASS and set(found[1:-1]) == {CONTENDED_STARTS} and sum(found) == 201


async def test_clients_contend_as_long_as_two_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fairlead_common.http.start_turns.CONTENDED_SECONDS", 0)
    guard, together = make(), [Counter[str]()]

    async def request(client: str) -> None:
        await guard.turns.take([(b"tenant", client.encode())])
        together[-1][client] += 1

    async with asyncio.timeout(5), asyncio.TaskGroup() as tasks:
        for client in ["one", "two"] * 200:
            tasks.create_task(request(client))
        while sum(map(Counter.total, together)) < 400:
            await asyncio.sleep(0)
            together.append(Counter())
    half = CONTENDED_STARTS // 2
    found = [dict(counts) for counts in together if counts]
    assert all(counts == {"one": half, "two": half} for counts in found[1:])


async def test_a_request_that_ends_while_it_waits_takes_no_turn() -> None:
    guard, headers = make(), [(b"tenant", b"one")]
    tasks = [asyncio.ensure_future(guard.turns.take(headers)) for _ in range(3 * STARTS_PER_PASS)]
    await asyncio.sleep(0)
    waiting = [task for task in tasks if not task.done()]
    gone, rest = waiting[:STARTS_PER_PASS], waiting[STARTS_PER_PASS:]
    for task in gone:
        task.cancel()
    done, _ = await asyncio.wait(rest, timeout=5)
    assert len(waiting) == 2 * STARTS_PER_PASS and len(done) == STARTS_PER_PASS


class Recorder(Transport):
    """A transport that keeps what is written."""

    written = b""

    def write(self, data: bytes) -> None:
        self.written += data


class Connected:
    """A connection whose requests find no turn left, and the paths that its application has got."""

    def __init__(self) -> None:
        self.started, self.started_at = list[str](), list[float]()
        self.transport, guard = Recorder(), make()
        guard.turns._client_of = lambda headers: ""
        self.connection = ClientConnection(self._answer, set(), asyncio.get_running_loop(), guard)
        self.connection.connection_made(self.transport)
        self.others = [asyncio.ensure_future(guard.turns.take([])) for _ in range(50 * STARTS_PER_PASS)]

    async def _answer(self, request: Request, reply: Reply) -> None:
        self.started.append(request.path)
        self.started_at.append(request.started_at)
        while not request.is_complete:
            await request.wait_for_body()
        reply.send(200, b"%d" % len(request.take()))

    def receive(self, data: bytes) -> int:
        """Feed bytes until reading is paused, and return how many."""
        sent = 0
        while sent < len(data) and not self.transport.paused:
            view = self.connection.get_buffer(-1)
            size = min(len(view), len(data) - sent)
            view[:size] = data[sent : sent + size]
            self.connection.buffer_updated(size)
            sent += size
        return sent


async def test_a_request_that_waits_for_its_turn_reads_little_of_its_body() -> None:
    there = Connected()
    await asyncio.sleep(0)
    data = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 8000000\r\n\r\n" + b"x" * 8_000_000
    sent = there.receive(data)
    assert sent < 4 * STREAMED_BYTES and not there.started
    async with asyncio.timeout(10):
        while sent < len(data) or not there.transport.written:
            await asyncio.sleep(0)
            sent += there.receive(data[sent:])
    assert there.transport.written.endswith(b"8000000")


async def test_a_probe_waits_for_no_turn() -> None:
    there = Connected()
    await asyncio.sleep(0)
    there.receive(b"GET /health HTTP/1.1\r\nhost: a\r\n\r\n")
    await asyncio.sleep(0)
    assert there.started == ["/health"]


async def test_the_time_of_a_request_includes_the_wait_for_its_turn() -> None:
    there = Connected()
    await asyncio.sleep(0)
    before = monotonic()
    there.receive(b"GET /v1/models HTTP/1.1\r\nhost: a\r\n\r\n")
    after = monotonic()
    assert there.connection.task is not None
    await asyncio.wait_for(there.connection.task, 10)
    assert before <= there.started_at[0] <= after


async def test_a_server_that_ends_answers_requests_that_wait_for_their_turn() -> None:
    there = Connected()
    await asyncio.sleep(0)
    there.receive(b"GET /v1/models HTTP/1.1\r\nhost: a\r\n\r\n")
    await asyncio.sleep(0)
    assert there.connection.task is not None
    there.connection.task.cancel()
    await asyncio.sleep(0)
    assert there.transport.written.startswith(b"HTTP/1.1 503 ") and not there.started
