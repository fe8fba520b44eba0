"""Whatever Redis replies, a reader returns a sound answer or says that the index is unavailable, and a writer goes on."""

import asyncio
import logging
import math
from array import array
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.index.conftest import eventually
from tests.servers.hostile_redis import RAW, HostileRedis, encode, replies

from fairlead_index.mirror.prefixes import MirrorReader
from fairlead_index.mirror.workers import FleetReader
from fairlead_index.reader import IndexReader, IndexUnavailable, parse_workers
from fairlead_index.redis.access import RedisAccess
from fairlead_index.redis.backoff import Backoff
from fairlead_index.redis.client import RedisClient
from fairlead_index.redis.scripts import REDIS_ERRORS
from fairlead_index.score import rank_candidates
from fairlead_index.worker_load import WorkerCard
from fairlead_index.writer import IndexWriter

ADDRESS, INCARNATION = "127.0.0.1:7000", "0102030405060708"
HASHES = array("Q", [1, 2, 3])
REPLIES = st.lists(replies([ADDRESS], INCARNATION), min_size=1, max_size=8)


def against(check: Callable[[HostileRedis, list[bytes]], Coroutine[Any, Any, None]], answers: list[bytes]) -> None:
    """Run a check against a server that gives these replies in turn, then the last one for ever."""

    async def run() -> None:
        left = list(answers)
        async with HostileRedis(lambda: left.pop(0) if len(left) > 1 else left[0]) as server:
            await check(server, answers)

    asyncio.run(run())


async def check_reader(server: HostileRedis, answers: list[bytes]) -> None:
    reader = IndexReader(server.url, "tests/hostile", deadline=0.2)
    for call in (reader.match(HASHES), reader.deepest(HASHES, 12, b"", b""), reader.workers(), reader.recall(ADDRESS)):
        reader._backoff = Backoff()
        try:
            found = await call
        except IndexUnavailable:
            continue
        if call.__name__ in ("match", "deepest"):
            assert all(isinstance(address, str) and 0 <= tokens < 2**32 for address, tokens in found.items())
        elif call.__name__ == "workers":
            assert all(0 <= each.slot < 65536 and each.load.backlog_tokens >= 0 and each.block_tokens >= 1 for each in found)
    await reader.close()


async def check_mirrors(server: HostileRedis, answers: list[bytes]) -> None:
    """Let both mirrors run until they have read or refused some replies, and choose by what they have then."""
    fleet, mirror = FleetReader(server.url, "tests/hostile", call_seconds=0.1), MirrorReader(server.url, "tests/hostile", call_seconds=0.1)
    fleet.start()
    mirror.start()
    try:
        await eventually(lambda: as_coroutine(server.commands > len(answers) or (mirror.stats.errors > 3 and not fleet.is_fresh)))
        assert fleet._task is not None and not fleet._task.done() and mirror._task is not None and not mirror._task.done()
        for scored in fleet.workers.values():
            fleet.refresh(scored)
        list(fleet.soonest)
        starts = rank_candidates(fleet.workers.values(), b"", 100, bytes(8), 8)
        assert all(math.isfinite(each.score) for each in starts)
        if mirror._state is not None:
            assert all(tokens >= 0 for tokens in mirror.match(HASHES).values())
    finally:
        await fleet.close()
        await mirror.close()


async def as_coroutine(value: bool) -> bool:
    return value


@settings(max_examples=300, deadline=None)
@given(REPLIES)
def test_a_reader_answers_soundly_or_is_unavailable(answers: list[bytes]) -> None:
    against(check_reader, answers)


@pytest.mark.parametrize("raw", RAW, ids=lambda raw: repr(raw[:20]))
def test_replies_that_no_list_gives_make_the_index_unavailable(raw: bytes) -> None:
    against(check_reader, [raw])


@settings(max_examples=40, deadline=None)
@given(REPLIES)
def test_the_mirrors_go_on_without_a_traceback(answers: list[bytes]) -> None:
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    logger = logging.getLogger("fairlead_index")
    logger.addHandler(handler)
    try:
        against(check_mirrors, answers)
    finally:
        logger.removeHandler(handler)
    assert not [record for record in records if record.exc_info], "a reply is no bug of ours"
    assert len(records) <= 2, "one line a minute"


@pytest.mark.parametrize("number", [b"-inf", b"inf", b"nan", b"-1e300", b"1e300", b"x" * 3])
def test_a_forged_reservation_or_load_costs_only_its_own_record(number: bytes) -> None:
    """`r:owed` of one slot holds -inf: the other workers are read as before."""

    def row(address: bytes, reserved: bytes = b"5", backlog: bytes = b"7") -> list[bytes]:
        load = [b"1", b"0", backlog, b"1000", b"0.1", b"5", b"9", b"16", b"0", b"0.5", b"3"]
        return [b"pod", address, b"16", b"r1", b"5", reserved, *load, bytes(8)]

    if number != b"xxx":
        found = parse_workers([*row(b"a:1", reserved=number), *row(b"b:1", backlog=number), *row(b"c:1")])
        assert [each.address for each in found] == ["a:1", "c:1"]
        assert [each.reserved_tokens for each in found] == [0, 5]
        return

    async def check(server: HostileRedis, answers: list[bytes]) -> None:
        reader = IndexReader(server.url, "tests/hostile", deadline=1.0)
        with pytest.raises(IndexUnavailable, match="cannot be read"):
            await reader.workers()
        await reader.close()

    against(check, [encode(row(b"a:1", reserved=number))])


@settings(max_examples=50, deadline=None)
@given(REPLIES)
def test_a_client_raises_only_redis_errors(answers: list[bytes]) -> None:
    async def check(server: HostileRedis, answers: list[bytes]) -> None:
        for shared in (True, False):
            client = RedisClient(RedisAccess(server.url), 0.05, shared=shared)
            for call in (client.execute("GET", "x"), client.transaction([("GET", "x")]), client.on_every_node("PING")):
                try:
                    await call
                except REDIS_ERRORS:
                    pass
            await client.close()

    against(check, answers)


@settings(max_examples=15, deadline=None)
@given(REPLIES)
def test_a_writer_goes_on(answers: list[bytes]) -> None:
    async def check(server: HostileRedis, answers: list[bytes]) -> None:
        writer = IndexWriter(server.url, "tests/hostile", WorkerCard("a", ADDRESS, 16), 0.5, call_seconds=0.1)
        writer.start()
        writer.store(HASHES)
        await eventually(lambda: as_coroutine(server.commands > len(answers)))
        assert writer._task is not None and not writer._task.done()
        await writer.leave(0.2)

    against(check, answers)
