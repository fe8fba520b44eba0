"""Prompts that take much memory and time to tokenize: one at a time, fairly between tenants, without delaying short prompts."""

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


class Slow:
    """In place of `Prompts._read`: large bodies wait in their thread until `go_on`."""

    def __init__(self) -> None:
        self.go_on = threading.Event()
        self.order: list[str] = []
        self.now = self.most = 0
        self._lock = threading.Lock()
        self._real = Prompts._read

    def __get__(self, prompts: Any, kind: Any = None) -> Any:
        def read(path: str, raw: bytes, *rest: Any) -> Prompt:
            if len(raw) <= LARGE:
                return self._real(prompts, path, raw, *rest)
            with self._lock:
                self.order.append(raw[raw.index(b"<") + 1 : raw.index(b">")].decode())
                self.now += 1
                self.most = max(self.most, self.now)
            try:
                assert self.go_on.wait(60)
                return self._real(prompts, path, raw, *rest)
            finally:
                with self._lock:
                    self.now -= 1

        return read


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Slow:
    made = Slow()
    monkeypatch.setattr(Prompts, "_read", made)
    return made


async def test_large_bodies_are_read_one_at_a_time_and_short_ones_beside_them(fleet: Fleet, tmp_path: Path, slow: Slow) -> None:
    router, worker = await guarded(fleet, tmp_path)
    turns = router.server.router.prompts._large_body_lock
    asking = [asyncio.create_task(ask(router, ANNA, f"<anna {number}>{LONG}")) for number in range(4)]
    try:
        await eventually(lambda: len(slow.order) == 1 and len(turns._waiting.get("anna", ())) == 3, "one is read, three wait")
        asking.append(asyncio.create_task(ask(router, BORIS, f"<boris 0>{LONG}")))
        await eventually(lambda: "boris" in turns._waiting, "and one of another tenant")
        for _ in range(8):
            answer = await asyncio.wait_for(ask(router, BORIS, SHORT), 20)
            assert answer.status_code == 200
        assert len(slow.order) == 1 and len(worker.received) == 8
        asking[0].cancel()  # its client goes, and the thread works on
        await eventually(lambda: not router.server._under_way() or len(router.server._under_way()) == 4, "its request has ended")
        assert len(slow.order) == 1, "the lock is still held"
    finally:
        slow.go_on.set()
    answers = await asyncio.gather(*asking[1:])
    assert {answer.status_code for answer in answers} == {200} and slow.most == 1
    assert [name.split()[0] for name in slow.order] == ["anna", "anna", "boris", "anna", "anna"], "tenants by turns"


async def test_a_large_body_that_is_refused_gives_its_turn_back(fleet: Fleet, tmp_path: Path) -> None:
    router, _ = await guarded(fleet, tmp_path)
    answers = await asyncio.gather(*(ask(router, ANNA, LONG, model="nobody") for _ in range(3)), ask(router, ANNA, LONG))
    assert [answer.status_code for answer in answers] == [404, 404, 404, 200]
    assert not router.server.router.prompts._large_body_lock._is_locked


@given(st.lists(st.tuples(st.sampled_from("abc"), st.booleans()), max_size=12))
def test_every_turn_comes_once_tenants_alternate_and_none_is_lost(asked: list[tuple[str, bool]]) -> None:
    """Each: its tenant, and whether it is cancelled while it waits."""

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
            assert mine == sorted(mine), "each tenant's in their order"
        for at in range(1, len(came)):
            left = {tenant for tenant, _ in came[at:]}
            assert came[at][0] != came[at - 1][0] or left == {came[at][0]}, "the same tenant twice only where it is alone"
        turns.release()
        await asyncio.wait_for(turns.acquire("last"), 1)

    asyncio.run(play())


async def test_a_turn_that_comes_as_its_holder_is_cancelled_goes_on() -> None:
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
