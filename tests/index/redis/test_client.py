"""The client of Redis, pooled and shared: cancelled calls, broken connections, errors and limits."""

import asyncio
import contextlib
import os
import signal

import pytest
from tests.index.conftest import as_coroutine, either, eventually
from tests.servers.redis_server import RedisServer

from fairlead_index.hashing import block_hashes, hash_bytes
from fairlead_index.redis.access import RedisAccess
from fairlead_index.redis.client import RedisClient
from fairlead_index.redis.connection import MAX_REPLY_BYTES, RedisError
from fairlead_index.redis.scripts import Scripts

BLOCK = 4
CHAIN = block_hashes(7, range(64 * BLOCK), BLOCK)


@either
async def test_a_thousand_cancelled_calls_leak_no_connection_and_disturb_no_other_call(server: RedisServer, namespace: str) -> None:
    scripts = Scripts(server.url, namespace, timeout=20.0, shared=True)
    await scripts.call("join", "a", "a:1", "r", BLOCK, b"12345678", 60000, 64)
    assert await scripts.call("apply", 1, "x" * 8, 1, "S", hash_bytes(CHAIN)) == [b"STALE"]
    mine = await scripts.redis.execute("CLIENT", "ID")
    os.kill(server.pid, signal.SIGSTOP)  # no call is answered before it is cancelled
    try:
        calls = [asyncio.create_task(scripts.call("match", hash_bytes(CHAIN))) for _ in range(1000)]
        kept = [asyncio.create_task(scripts.redis.execute("ECHO", f"{n}")) for n in range(1000)]
        await asyncio.sleep(0)
        for at, call in enumerate(calls):
            call.cancel()
            if at % 10 == 0:
                await asyncio.sleep(0)
        ended = await asyncio.gather(*calls, return_exceptions=True)
    finally:
        os.kill(server.pid, signal.SIGCONT)
    assert all(isinstance(each, asyncio.CancelledError) for each in ended)  # no cancellation was swallowed
    assert await asyncio.gather(*kept) == [f"{n}".encode() for n in range(1000)]  # every caller got its own answer
    assert await scripts.redis.execute("CLIENT", "ID") == mine
    await scripts.close()


@either
async def test_a_caller_cancelled_while_connecting_is_cancelled_and_others_are_served(server: RedisServer) -> None:
    scripts = Scripts(server.url, "tests/none", timeout=20.0, shared=True)
    before = len(server.client().client_list())
    calls = [asyncio.create_task(scripts.redis.execute("PING")) for _ in range(1000)]
    await asyncio.sleep(0)
    for call in calls[::2]:
        call.cancel()
    ended = await asyncio.gather(*calls, return_exceptions=True)
    assert [type(each) for each in ended[::2]] == [asyncio.CancelledError] * 500
    assert ended[1::2] == [b"PONG"] * 500
    assert len(server.client().client_list()) <= before + 2  # our connection and the one that queries
    await scripts.close()


@either
async def test_a_slow_redis_does_not_break_the_pipeline(server: RedisServer, namespace: str) -> None:
    """A caller with a shorter timeout than the connection's leaves; the others wait on and get their own answers."""
    scripts = Scripts(server.url, namespace, timeout=20.0, shared=True)
    await scripts.redis.execute("PING")
    os.kill(server.pid, signal.SIGSTOP)  # no call is answered before the first caller has left
    try:
        impatient = asyncio.create_task(scripts.redis.execute("ECHO", "a"))
        patient = asyncio.create_task(scripts.redis.execute("ECHO", "b"))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(impatient, 0.05)
    finally:
        os.kill(server.pid, signal.SIGCONT)
    assert await patient == b"b"
    await scripts.close()


async def test_a_cancelled_call_closes_its_connection_and_the_next_one_succeeds(server: RedisServer) -> None:
    """A pooled connection that owed a reply would give it to the next caller."""
    client = RedisClient(RedisAccess(server.url), 5.0)
    await client.execute("PING")
    before = len(server.client().client_list())
    waiting = asyncio.create_task(client.execute("XREAD", "BLOCK", 0, "STREAMS", "tests:none", "0-0"))

    async def is_blocked() -> bool:
        return any(each["cmd"] == "xread" for each in server.client().client_list())

    await eventually(is_blocked)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert await client.execute("ECHO", "next") == b"next"
    await eventually(lambda: as_coroutine(len(server.client().client_list()) <= before))
    await client.close()


async def test_a_command_whose_connection_breaks_is_sent_once() -> None:
    """A repeated `quota` or `reserve` would charge or reserve twice. The next call connects again."""
    received = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal received
        while data := await reader.read(65536):
            received += data.count(b"ECHO")
            if received != 2:
                writer.write(b"$1\r\na\r\n")
                continue
            break
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    access = RedisAccess(f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    for shared in (False, True):
        received = 0
        client = RedisClient(access, 5.0, shared=shared)
        assert await client.execute("ECHO", "a") == b"a"
        with pytest.raises(OSError, match="closed the connection"):
            await client.execute("ECHO", "b")
        assert received == 2 and await client.execute("ECHO", "c") == b"a"
        await client.close()
    server.close()


@pytest.mark.parametrize("shared", [False, True])
async def test_client_errors_have_the_documented_types(server: RedisServer, shared: bool) -> None:
    scripts = Scripts(server.url, "tests/none", timeout=1.0, shared=shared)
    client: RedisClient = scripts.redis
    with pytest.raises(RedisError, match="WRONGTYPE"):
        await client.transaction([("SET", "tests:none", 1), ("HGET", "tests:none", "x"), ("DEL", "tests:none")])
    with pytest.raises(RedisError, match="unknown command"):
        await client.transaction([("SET", "tests:none", 1), ("NONSENSE",)])
    assert await client.pipeline([]) == [] and await client.execute("GET", "tests:none") is None
    await scripts.close()


@pytest.mark.parametrize("shared", [False, True])
async def test_a_timeout_covers_a_call_with_all_its_redirections(shared: bool) -> None:
    """A node that redirects callers slowly and forever: each step is in time, all of them together are not."""

    asked = 0

    async def elsewhere(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal asked
        with contextlib.suppress(ConnectionError):
            while await reader.read(1 << 16):
                asked += 1
                await asyncio.sleep(0.15)
                writer.write(b"-MOVED 1 127.0.0.1:%d\r\n" % server.sockets[0].getsockname()[1])

    server = await asyncio.start_server(elsewhere, "127.0.0.1", 0)
    client = RedisClient(RedisAccess(f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}"), 0.2, shared=shared)
    with pytest.raises(TimeoutError):
        await client.execute("GET", "x")
    assert asked <= 2
    await client.close()
    server.close()


@pytest.mark.parametrize("endless", [b"*99999999\r\n" + b":1\r\n" * 100_000, b"$999999999\r\n" + b"x" * 400_000], ids=["array", "bulk"])
@pytest.mark.parametrize("shared", [False, True])
async def test_an_endless_reply_closes_the_connection(endless: bytes, shared: bool) -> None:
    """A malicious server at Redis' address must not be able to fill the memory of routers and workers."""
    sent = 0

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        await reader.read(1)
        with contextlib.suppress(OSError):
            writer.write(endless[: endless.index(b"\n") + 1])
            while True:
                writer.write(endless[endless.index(b"\n") + 1 :])
                await writer.drain()
                sent += len(endless)
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    client = RedisClient(RedisAccess(f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}"), 60.0, shared=shared)
    try:
        with pytest.raises(RedisError, match="more than 16 MiB"):
            await client.execute("PING")
        assert sent < 2 * MAX_REPLY_BYTES
    finally:
        await client.close()
        server.close()
