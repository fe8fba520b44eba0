"""Reservations of several routers: each sees the others', the index sees all, and none stays behind."""

import asyncio
from collections.abc import AsyncIterator

import pytest
from tests.index.conftest import either_own, eventually
from tests.servers.redis_server import RedisServer

from fairlead_index.mirror.reservations import ReservedTokens
from fairlead_index.mirror.workers import FleetReader
from fairlead_index.reader import IndexReader
from fairlead_index.worker_load import WorkerCard, WorkerLoad
from fairlead_index.writer import IndexWriter


def test_a_change_counts_until_the_index_certainly_includes_it() -> None:
    ledger = ReservedTokens()
    ledger.reconcile({b"aa": 100.0}, (5, 0))
    mine, theirs = ledger.record(b"aa", 30.0), ledger.record(b"aa", 7.0, (7, 0))
    assert ledger.get(b"aa") == 137
    ledger.reconcile({b"aa": 107.0}, (7, 0))  # with the others'; our own is under way
    assert ledger.get(b"aa") == 137
    mine.position = (8, 1)
    ledger.reconcile({b"aa": 107.0}, (8, 0))
    assert ledger.get(b"aa") == 137
    ledger.reconcile({b"aa": 137.0}, (8, 1))
    assert ledger.get(b"aa") == 137 and theirs.position == (7, 0)
    ledger.record(b"bb", -50.0)
    assert ledger.get(b"bb") == 0


@pytest.fixture
async def writer(own_server: RedisServer, namespace: str) -> AsyncIterator[IndexWriter]:
    writer = IndexWriter(own_server.url, namespace, WorkerCard("a", "a:1", 16), lease_seconds=2.0, call_seconds=0.5)
    writer.report(WorkerLoad(pages_total=100, page_size=16))
    writer.start()
    yield writer
    await writer.leave(0.5)


@either_own
async def test_routers_see_each_others_reservations_and_redis_sees_all(
    own_server: RedisServer, namespace: str, writer: IndexWriter
) -> None:
    routers = [FleetReader(own_server.url, namespace, call_seconds=0.5) for _ in range(3)]
    index = IndexReader(own_server.url, namespace, deadline=1.0)
    for router in routers:
        router.start()

    def reserved_on(router: FleetReader) -> float:
        scored = router.workers["a:1"]
        router.refresh(scored)
        return scored.reserved_tokens

    async def all_reserved(tokens: float) -> bool:
        reserved = {state.reserved_tokens for state in await index.workers()}
        return reserved == {tokens} and all(reserved_on(router) == tokens for router in routers)

    async def all_see_it() -> bool:
        return all(router.is_fresh and router.capacity == 100 for router in routers)

    try:
        await eventually(all_see_it)
        writer._load, writer._load_is_new = None, False  # no later load report releases what follows
        reservations = [[router.reserve("a:1", 100.0 + number) for number in range(20)] for router in routers]
        assert all(reserved_on(router) == 20 * 100 + 190 for router in routers)  # its own immediately
        await eventually(lambda: all_reserved(3 * (20 * 100 + 190)))
        assert all(router.tokens_ahead("a:1") == 3 * (20 * 100 + 190) for router in routers)
        assert routers[0].tokens_ahead("b:1") == 0, "an unknown worker"
        assert not routers[0].release(reservations[1][0])  # not its own
        for router, mine in zip(routers, reservations, strict=True):
            assert all(router.release(reservation) for reservation in mine[5:])
            assert not router.release(mine[5])
        await eventually(lambda: all_reserved(3 * (5 * 100 + 10)))
        own_server.kill()

        async def no_router_is_fresh() -> bool:
            return not any(router.is_fresh for router in routers)

        await eventually(no_router_is_fresh)
        assert routers[0].tokens_ahead("a:1") == 0, "without Redis the router counts what it sent itself"
        assert routers[0].reserve("a:1", 100.0) == b"" and not routers[0].release(reservations[0][0])
        own_server.start()

        async def all_are_back() -> bool:
            return all(router.is_fresh and "a:1" in router.workers for router in routers)

        await eventually(all_are_back)
        await eventually(lambda: all_reserved(0))
    finally:
        await asyncio.gather(*(router.close() for router in routers), index.close())


@either_own
async def test_pending_changes_are_sent_on_close(own_server: RedisServer, namespace: str, writer: IndexWriter) -> None:
    router, index = FleetReader(own_server.url, namespace), IndexReader(own_server.url, namespace, deadline=1.0)
    router.start()

    async def known() -> bool:
        return "a:1" in router.workers

    try:
        await eventually(known)
        writer._load = None
        router.reserve("a:1", 70.0)
        await router.close()
        assert [state.reserved_tokens for state in await index.workers()] == [70]
    finally:
        await index.close()
