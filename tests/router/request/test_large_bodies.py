"""Prompts that are expensive to tokenize: one at a time, fairly between tenants, without delaying short prompts."""

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.router.harness import Fleet, eventually
from tests.router.tenancy.test_access import ANNA, BORIS, ask, guarded

from fairlead_common.memory import LARGE
from fairlead_router.request.fair_lock import FairLock
from fairlead_router.request.prompts import INLINE_BYTES, Prompt, Prompts

LONG, SHORT = "界" * (LARGE // 3 + 100), "short " * (INLINE_BYTES // 3)


class BlockingReader:
    """Replaces `Prompts._read`: large bodies wait in their thread until `proceed` is set."""

    def __init__(self) -> None:
        self.proceed = threading.Event()
        self.order: list[str] = []
        self.active = self.max_active = 0
        self._lock = threading.Lock()
        self._real = Prompts._read

    def __get__(self, prompts: Any, kind: Any = None) -> Any:
        def read(path: str, raw: bytes, *rest: Any) -> Prompt:
            if len(raw) <= LARGE:
                return self._real(prompts, path, raw, *rest)
            with self._lock:
                self.order.append(raw[raw.index(b"<") + 1 : raw.index(b">")].decode())
                self.active += 1
                self.max_active = max(self.max_active, self.active)
            try:
                assert self.proceed.wait(60)
                return self._real(prompts, path, raw, *rest)
            finally:
                with self._lock:
                    self.active -= 1

        return read


@pytest.fixture
def reader(monkeypatch: pytest.MonkeyPatch) -> BlockingReader:
    reader = BlockingReader()
    monkeypatch.setattr(Prompts, "_read", reader)
    return reader


async def test_large_bodies_are_tokenized_one_at_a_time_beside_short_ones(fleet: Fleet, tmp_path: Path, reader: BlockingReader) -> None:
    router, worker = await guarded(fleet, tmp_path)
    turns = router.server.router.prompts._large_body_lock
    asking = [asyncio.create_task(ask(router, ANNA, f"<anna {number}>{LONG}")) for number in range(4)]
    try:
        await eventually(lambda: len(reader.order) == 1 and len(turns._waiting.get("anna", ())) == 3, "one is read, three wait")
        asking.append(asyncio.create_task(ask(router, BORIS, f"<boris 0>{LONG}")))
        await eventually(lambda: "boris" in turns._waiting, "and one of another tenant")
        for _ in range(8):
            answer = await asyncio.wait_for(ask(router, BORIS, SHORT), 20)
            assert answer.status_code == 200
        assert len(reader.order) == 1 and len(worker.received) == 8
        asking[0].cancel()  # its client disconnects, and the thread goes on
        await eventually(lambda: not router.server._running_tasks() or len(router.server._running_tasks()) == 4, "its request has ended")
        assert len(reader.order) == 1, "the lock is still held"
    finally:
        reader.proceed.set()
    answers = await asyncio.gather(*asking[1:])
    assert {answer.status_code for answer in answers} == {200} and reader.max_active == 1
    assert [name.split()[0] for name in reader.order] == ["anna", "anna", "boris", "anna", "anna"], "tenants alternate"


async def test_a_large_body_that_is_refused_releases_the_lock(fleet: Fleet, tmp_path: Path) -> None:
    router, _ = await guarded(fleet, tmp_path)
    answers = await asyncio.gather(*(ask(router, ANNA, LONG, model="nobody") for _ in range(3)), ask(router, ANNA, LONG))
    assert [answer.status_code for answer in answers] == [404, 404, 404, 200]
    assert not router.server.router.prompts._large_body_lock._is_locked


@given(st.lists(st.tuples(st.sampled_from("abc"), st.booleans()), max_size=12))
def test_the_fair_lock_alternates_tenants_and_loses_no_waiter(asked: list[tuple[str, bool]]) -> None:
    """`asked`: for each waiter, its tenant and whether it is cancelled while it waits."""

    async def play() -> None:
        turns, came = FairLock(), []
        await turns.acquire("first")

        async def take(number: int, tenant: str) -> None:
            await turns.acquire(tenant)
            came.append((tenant, number))

        waiting = []
        for number, (tenant, _) in enumerate(asked):
            waiting.append(asyncio.create_task(take(number, tenant)))
            await asyncio.sleep(0)
        for task, (_, cancelled) in zip(waiting, asked, strict=True):
            if cancelled:
                task.cancel()
        stay = [(tenant, number) for number, (tenant, cancelled) in enumerate(asked) if not cancelled]
        await asyncio.sleep(0)
        for count in range(len(stay)):
            assert len(came) == count
            turns.release()
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        assert sorted(came) == sorted(stay)
        for tenant in "abc":
            mine = [number for other, number in came if other == tenant]
            assert mine == sorted(mine), "first come, first served within a tenant"
        for at in range(1, len(came)):
            left = {tenant for tenant, _ in came[at:]}
            assert came[at][0] != came[at - 1][0] or left == {came[at][0]}, "the same tenant twice only while no other waits"
        turns.release()
        await asyncio.wait_for(turns.acquire("last"), 1)

    asyncio.run(play())


async def test_a_lock_granted_to_a_cancelled_waiter_goes_to_the_next() -> None:
    turns = FairLock()
    await turns.acquire("a")
    second = asyncio.create_task(turns.acquire("a"))
    third = asyncio.create_task(turns.acquire("b"))
    await asyncio.sleep(0)
    turns.release()
    second.cancel()
    with pytest.raises(asyncio.CancelledError):
        await second
    await asyncio.wait_for(third, 1)
