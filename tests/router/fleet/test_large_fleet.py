"""A change of one worker costs the same in any fleet, and what is kept current equals what a scan would find."""

import asyncio
import random
import time
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.router.harness import Fleet, eventually

from fairlead_index.hash_ring import Ring
from fairlead_router.fleet import check_pace, poller
from fairlead_router.fleet.adapters import Adapter, MergedAdapters
from fairlead_router.fleet.check_pace import BURST, CHECKS_PER_SECOND, CheckPace
from fairlead_router.fleet.workers import Worker, WorkerTable

MODELS = ("", "tuned", "other")


def table_of(count: int) -> WorkerTable:
    table = WorkerTable()
    table.set_addresses([f"10.{n // 62500}.{n // 250 % 250}.{n % 250}:8000" for n in range(count)])
    for worker in table:
        worker.ready, worker.reason = True, ""
    return table


@pytest.mark.parametrize("count", [100, 2000])
def test_a_change_of_one_worker_examines_that_worker_alone(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    table = table_of(count)
    for model in MODELS:
        table.usable((), model)
    examined: Counter[str] = Counter()
    serves = Worker.serves

    def counting(worker: Worker, model: str) -> bool:
        examined[worker.address] += 1
        return serves(worker, model)

    monkeypatch.setattr(Worker, "serves", counting)
    changed = next(iter(table))
    for ready in (False, True) * 10:
        changed.ready = ready
        table.update_adapters(changed)
        assert (changed in table.usable()) is ready and (changed.address in table.eligible_addresses()) is ready
    assert set(examined) == {changed.address} and examined.total() == 20 * len(MODELS)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 11), st.sampled_from(["ready", "draining", "silent", "role", "models", "fail", "good", "list"])),
        max_size=60,
    )
)
def test_the_kept_sets_equal_a_scan(changes: list[tuple[int, str]]) -> None:
    table, names = WorkerTable(), [f"10.0.0.{number}:1" for number in range(12)]
    table.set_addresses(names[:6])
    for number, change in changes:
        worker = table.get(names[number])
        if change == "list":
            listed = {each.address for each in table} ^ {names[number]}
            table.set_addresses(listed)
        elif worker is None:
            continue
        elif change in ("ready", "draining", "silent"):
            setattr(worker, change, not getattr(worker, change))
        elif change == "role":
            worker.role = "" if worker.role else "prefill"
        elif change == "models":
            worker.models = frozenset() if worker.models else frozenset(("tuned",))
        else:
            (worker.breaker.record_failure if change == "fail" else worker.breaker.record_success)()
        for model in MODELS:
            serving = [each for each in table if each.serves(model)]
            usable = {each.address for each in serving if each.usable}
            last = {each.address for each in serving if each.is_last_resort}
            assert {each.address for each in table.usable((), model)} == (usable or last)
            assert table.unusable_addresses(model) == {each.address for each in table} - usable
            assert all((name in table.eligible_addresses((), model)) == (name in usable) for name in names)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 4), st.none() | st.dictionaries(st.sampled_from("ab"), st.sampled_from("xyz"))), max_size=30))
def test_merged_adapters_equal_a_count_of_all_reports(changes: list[tuple[int, dict[str, str] | None]]) -> None:
    merged, reports = MergedAdapters(), dict[str, dict[str, Adapter]]()
    expected: dict[str, Adapter] = {}
    for number, digests in changes:
        adapters = None if digests is None else {name: Adapter(digest) for name, digest in digests.items()}
        merged.set(str(number), adapters)
        reports.pop(str(number), None)
        if adapters is not None:
            reports[str(number)] = adapters
        if reports:
            names = {name for each in reports.values() for name in each}
            counts = {name: Counter(each[name] for each in reports.values() if name in each) for name in names}
            expected = {name: max(count, key=lambda one: (count[one], one.digest)) for name, count in counts.items()}
        assert merged.by_name == expected


def test_many_members_of_the_ring_equal_single_ones() -> None:
    names = [f"10.0.0.{number}:1" for number in range(200)]
    one, all_at_once = Ring(), Ring()
    for name in names:
        one.add_all([name])
    all_at_once.add_all(names)
    for ring in (one, all_at_once):
        ring.discard_all(names[50:120])
    draw = random.Random(5)
    for place in (draw.randrange(2**64) for _ in range(200)):
        allowed = draw.sample(names[:50], 10)
        assert one.home(place, allowed) == all_at_once.home(place, allowed)
    assert one.home(0, names) not in names[50:120] and one.home(0, names[50:120]) is None


async def test_turns_are_spread_after_a_burst(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []

    async def record(seconds: float) -> None:
        waits.append(seconds)

    monkeypatch.setattr(check_pace.asyncio, "sleep", record)
    monkeypatch.setattr(check_pace, "monotonic", lambda: 100.0)
    pace = CheckPace(1.0)
    for _ in range(5000):
        await pace.turn()
    assert abs(len(waits) - (5000 - BURST)) <= 1 and waits == sorted(waits)
    assert waits[-1] == pytest.approx((5000 - BURST) / CHECKS_PER_SECOND)
    assert [pace.interval(count) for count in (1, 500, 5000)] == [1.0, 1.0, 10.0], "a small fleet is checked as often as before"
    assert len({pace.pause(10) for _ in range(20)}) > 1, "jitter"


async def test_a_fleet_that_is_too_large_to_be_checked_at_once_becomes_usable(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """The deadline of a check counts from its turn. Each check costs the router 20 ms here: all together would outlast their deadline."""
    monkeypatch.setattr(check_pace, "CHECKS_PER_SECOND", 15)
    monkeypatch.setattr(check_pace, "BURST", 1)
    monkeypatch.setattr(poller, "CHECK_SECONDS", 0.5)
    check = poller.Poller._check

    async def costly(self: poller.Poller, worker: Worker) -> str:
        time.sleep(0.02)  # noqa: ASYNC251 - it holds the event loop, as a check's own work does
        return await check(self, worker)

    monkeypatch.setattr(poller.Poller, "_check", costly)
    workers = [await fleet.worker() for _ in range(100)]
    router = await fleet.router(*workers)
    assert all(worker.silent is False for worker in router.table)


async def test_a_ready_worker_is_asked_once_a_check_and_an_unready_one_gives_its_reason(fleet: Fleet) -> None:
    worker = await fleet.worker()
    asked: Counter[str] = Counter()
    handle = worker._handle

    async def counting(method: str, path: str, *rest: Any) -> None:
        asked[path] += 1
        await handle(method, path, *rest)

    worker._handle = counting  # type: ignore[method-assign]
    router = await fleet.router(worker)
    [known] = router.table
    before = asked["/ready"]
    await eventually(lambda: asked["/load"] >= 10, "ten checks")
    assert asked["/ready"] == before
    worker.ready = False
    await eventually(lambda: not known.ready, "the check noticed it")
    assert asked["/ready"] > before and known.reason == "not ready"
    worker.ready = True
    await router.usable(1)


async def test_pages_of_a_large_fleet_let_other_work_run(fleet: Fleet) -> None:
    router = await fleet.router(await fleet.worker())
    table = router.table
    real = next(iter(table)).address
    table.on_added = lambda worker: None
    discovery = router.server.router._discovery_task
    assert discovery is not None
    discovery.cancel()
    table.set_addresses([real, *(f"10.0.{n // 250}.{n % 250}:1" for n in range(3000))])
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            ticks += 1
            await asyncio.sleep(0)

    ticking = asyncio.create_task(tick())
    await asyncio.sleep(0)
    for build in (router.server.router.describe_workers, router.server.router.metrics.render):
        before = ticks
        page = await build()
        assert ticks - before >= 3000 // 200 and page.count(b"10.0.11.") >= 250
    ticking.cancel()
