"""Best-effort requests: they use what other classes leave, delay them by one prompt at most, and do not starve."""

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.router.harness import Fleet, RunningRouter, eventually
from tests.router.serving.test_admission import gate

from fairlead_index.worker_load import WorkerLoad
from fairlead_router.fleet.workers import Worker
from fairlead_router.serving.best_effort import BestEffortShare, has_spare_capacity

CLASSES = json.dumps([{"name": "smooth", "priority": 1, "itlMilliseconds": 50}])
BUSY = {"running": 1, "backlog_tokens": 1_000_000, "prefill_rate": 100.0}
"""A worker with prompts to compute for hours. Requests without a class still get there, since this router has sent none."""


def batch(router: RunningRouter, prompt: str = "x", name: str = "batch", **fields: Any) -> "asyncio.Task[Any]":
    body = {"prompt": prompt, **fields}
    return asyncio.create_task(router.client.post("/v1/completions", json=body, headers={"x-slo-class": name}))


@given(st.lists(st.integers(0, 5000), max_size=200), st.integers(0, 20_000))
def test_the_first_best_effort_request_goes_after_32_times_its_tokens(others: list[int], tokens: int) -> None:
    share, passed = BestEffortShare(), 0
    for each in others:
        if share.spend(tokens):
            break
        assert passed < 32 * max(1, tokens), "it is not delayed by more"
        share.earn(each)
        passed += each
    else:
        assert share.spend(tokens) == (passed >= 32 * max(1, tokens))


@pytest.mark.parametrize(
    ("load", "spare"),
    [
        ({}, True),
        ({"running": 11}, True),
        ({"running": 12}, False),  # a quarter of 16 seats stays free
        ({"backlog_tokens": 999, "prefill_rate": 1000.0}, True),  # computed since the report
        ({"backlog_tokens": 1001, "prefill_rate": 1000.0}, False),
        ({"pages_total": 100, "pages_free": 25}, True),
        ({"pages_total": 100, "pages_free": 24}, False),
        ({"step_seconds": 0.05}, True),
        ({"step_seconds": 0.051}, False),  # the steps are too long for the class `smooth`
    ],
)
def test_spare_capacity_is_what_no_other_class_needs(load: dict[str, Any], spare: bool) -> None:
    worker = Worker("a:1", lambda: 0.0)
    worker.max_running, worker.load, worker.load_at = 16, WorkerLoad(**load), 100.0
    assert has_spare_capacity(worker, least_itl=0.05, now=101.0) is spare


def test_a_prompt_counts_as_computed_when_its_answer_begins_or_its_time_has_passed() -> None:
    """An answer in one piece begins only when it ends."""
    worker = Worker("a:1", lambda: 0.0)
    worker.load = WorkerLoad(prefill_rate=1000.0)
    worker.begin_prompt(1000, now=50.0)
    worker.begin_prompt(500, now=50.0)
    assert worker.tokens_ahead(50.1) == pytest.approx(1400) and worker.tokens_ahead(51.6) == 0
    worker.end_prompt(1000)
    assert worker.tokens_ahead(50.1) == pytest.approx(500)
    worker.end_prompt(500)
    assert worker.tokens_ahead(50.1) == 0


async def test_a_worker_gets_one_best_effort_prompt_at_a_time(fleet: Fleet) -> None:
    turns, behaviour = gate()
    worker = await fleet.worker(behaviour=behaviour, load={"prefill_rate": 1e-3})
    router = await fleet.router(worker)
    asked = [batch(router, f"{number}", stream=True) for number in range(5)]
    for count in range(1, 6):
        await eventually(lambda: len(worker.received) == count, "the next one follows an answer")  # noqa: B023
        assert router.server.router.admission.queued()[0] == 5 - count
        turns.release()
    assert {(await one).status_code for one in asked} == {200}


async def test_best_effort_waits_while_others_wait_and_until_a_worker_is_free(fleet: Fleet) -> None:
    busy = await fleet.worker(load=BUSY)
    router = await fleet.router(busy)
    waiting = batch(router)
    await eventually(lambda: router.server.router.admission.queued()[0] == 1, "it waits")
    assert (await router.complete("one without a class")).status_code == 200
    assert len(busy.received) == 1 and not waiting.done()
    busy.load = {}
    assert (await waiting).status_code == 200


async def test_best_effort_goes_to_the_worker_that_has_no_prompts(fleet: Fleet) -> None:
    busy, free = await fleet.worker(load=BUSY), await fleet.worker()
    router = await fleet.router(busy, free, policy="RoundRobin")
    for number in range(6):
        assert (await batch(router, f"{number}")).status_code == 200
    assert len(free.received) == 6 and not busy.received


async def test_best_effort_does_not_starve_beside_an_endless_load(fleet: Fleet) -> None:
    busy = await fleet.worker(load=BUSY)
    router = await fleet.router(busy)
    waiting, prompt, sent = batch(router, "x" * 100), "y" * 400, 0
    await eventually(lambda: router.server.router.admission.queued()[0] == 1, "it waits")
    while not waiting.done() and sent < 40:
        assert (await router.complete(prompt)).status_code == 200
        sent += 1
    assert (await waiting).status_code == 200
    names = [one.headers.get("x-fairlead-priority") for one in busy.received]
    assert 8 <= names.index("1000") <= 9, "after 32 times its 100 tokens"


async def test_a_full_queue_drops_best_effort_first(fleet: Fleet) -> None:
    router = await fleet.router(ready=0, workers=fleet.list_in_file(), max_queue_requests=2)
    held = [batch(router, "first"), batch(router, "second")]
    await eventually(lambda: router.server.router.admission.queued()[0] == 2, "the queue is full")
    assert (await batch(router, "third")).status_code == 503
    urgent = asyncio.create_task(router.complete("urgent"))
    done, _ = await asyncio.wait(held, return_when=asyncio.FIRST_COMPLETED, timeout=10)
    assert [one.result().status_code for one in done] == [503], "it made room"
    fleet.list_in_file(await fleet.worker())
    answers = [await urgent, *[await one for one in held]]
    assert sorted(one.status_code for one in answers) == [200, 200, 503]


async def test_best_effort_is_not_dropped_for_a_request_that_does_not_fit_anyway(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fairlead_router.serving.admission.MAX_QUEUE_BYTES", 2000)
    router = await fleet.router(ready=0, workers=fleet.list_in_file())
    held = [asyncio.create_task(router.complete("x" * 1500)), batch(router)]
    await eventually(lambda: router.server.router.admission.queued()[0] == 2, "both wait")
    assert (await router.complete("x" * 1000)).status_code == 503
    fleet.list_in_file(await fleet.worker())
    assert [(await one).status_code for one in held] == [200, 200]


async def test_a_class_with_an_itl_bound_avoids_workers_with_long_steps(fleet: Fleet) -> None:
    slow, fast = await fleet.worker(load={"step_seconds": 0.2}), await fleet.worker(load={"step_seconds": 0.01})
    router = await fleet.router(slow, fast, policy="RoundRobin", slo_classes=CLASSES)
    for number in range(6):
        assert (await batch(router, f"{number}", "smooth")).status_code == 200
    assert len(fast.received) == 6 and not slow.received
    fast.load = {"step_seconds": 0.06}
    await eventually(lambda: all(one.load.step_seconds > 0.05 for one in router.table), "both are slow")
    answer = await batch(router, "x", "smooth")
    assert answer.status_code == 429 and answer.headers["retry-after"] == "1" and "itlMilliseconds, 50" in answer.text
    assert await router.metric("fairlead_router_slo_rejected_total") == 1
    assert (await router.complete("x")).status_code == 200, "other requests do not mind"


async def test_an_answer_in_one_piece_does_not_hold_up_the_next_prompt(fleet: Fleet) -> None:
    """It begins when it ends. The router takes its prompt as computed after the time that the worker's rate lets expect."""
    turns, behaviour = gate()
    worker = await fleet.worker(behaviour=behaviour, load={"prefill_rate": 1e6})
    router = await fleet.router(worker)
    await eventually(lambda: all(one.load.prefill_rate for one in router.table), "the router knows the worker's rate")
    asked = [batch(router, f"{number}") for number in range(20)]
    await eventually(lambda: len(worker.received) == 20, "all are there before the first answer")
    for _ in range(20):
        turns.release()
    assert {(await one).status_code for one in asked} == {200}
