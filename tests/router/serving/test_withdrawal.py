"""A request that waits at its worker moves to one that would answer it earlier: once, atomically, and only before it starts."""

import asyncio
from collections.abc import Awaitable
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.router.harness import Fleet, RunningRouter, eventually
from tests.router.stand_in_worker import Exchange, StandIn, dies_at_once, queues

from fairlead_index.score import ScoredWorker, StartEstimate, rank_candidates
from fairlead_index.worker_load import WorkerLoad
from fairlead_router.fleet.workers import Worker
from fairlead_router.routing.policies import RoutingRequest
from fairlead_router.serving import waiting_attempts
from fairlead_router.serving.waiting_attempts import (
    LEAST_RATIO,
    WaitingAttempt,
    WaitingAttempts,
    find_gain,
    remaining_tokens,
    tokens_until_turn,
)

LONG = {"backlog_tokens": 40_000, "prefill_rate": 2000.0}
"""Twenty seconds of work."""
LONGER = {"backlog_tokens": 400_000, "prefill_rate": 2000.0}
IDLE = {"backlog_tokens": 0, "prefill_rate": 2000.0}


async def stuck(fleet: Fleet, **fields: Any) -> tuple[RunningRouter, StandIn, StandIn, "asyncio.Task[httpx.Response]", asyncio.Event]:
    """Return a router, the worker where a request waits, another one, the request, and the event that starts it there."""
    started = asyncio.Event()
    slow = await fleet.worker(load=dict(LONG), behaviour=queues(started))
    other = await fleet.worker(load=dict(LONGER))
    router = await fleet.router(slow, other)
    request = asyncio.create_task(router.complete("hello there " * 20, **fields))
    await eventually(lambda: bool(slow.received), "the request waits")
    return router, slow, other, request, started


async def answered(request: Awaitable[httpx.Response]) -> httpx.Response:
    answer = await asyncio.wait_for(request, 30)
    assert answer.status_code == 200, answer.text
    assert answer.text.count(" 4") == 1, "exactly one answer"
    return answer


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_behind_a_long_queue_moves_to_a_worker_that_becomes_idle(fleet: Fleet, stream: bool) -> None:
    router, slow, other, request, _ = await stuck(fleet, stream=stream)
    other.load = dict(IDLE)
    answer = await answered(request)
    assert answer.headers["x-fairlead-pod"] == other.pod
    assert len(slow.received) == len(other.received) == len(slow.withdrawals) == 1 and not other.withdrawals
    assert "x-fairlead-attempt" not in other.received[0].headers, "it moves once"
    assert 'fairlead_router_retries_total{reason="withdrawn"} 1.0' in (await router.client.get("/metrics")).text
    worker = router.table.get(slow.address)
    assert worker is not None and worker.usable and not worker.in_flight and not worker.pending_tokens, "the worker did nothing wrong"


async def test_a_request_that_has_started_stays_and_is_asked_for_once(fleet: Fleet) -> None:
    router, slow, other, request, started = await stuck(fleet)
    asked = asyncio.Event()

    async def refuses(call: Exchange) -> None:
        asked.set()
        await call.whole(202, {})

    slow.on_withdraw = refuses
    other.load = dict(IDLE)
    await asked.wait()
    second = asyncio.create_task(router.complete("another one " * 20))
    assert (await answered(second)).headers["x-fairlead-pod"] == other.pod
    started.set()
    assert (await answered(request)).headers["x-fairlead-pod"] == slow.pod
    assert len(slow.withdrawals) == 1 and await router.metric("fairlead_router_retries_total") == 0


@pytest.mark.parametrize("status", [404, 500])
async def test_a_worker_that_cannot_withdraw_answers_itself(fleet: Fleet, status: int) -> None:
    router, slow, other, request, started = await stuck(fleet)

    async def fails(call: Exchange) -> None:
        await call.whole(status, {})
        started.set()

    slow.on_withdraw = fails
    other.load = dict(IDLE)
    assert (await answered(request)).headers["x-fairlead-pod"] == slow.pod
    assert await router.metric("fairlead_router_retries_total") == 0


@pytest.mark.parametrize("agrees_first", [False, True])
async def test_nothing_is_lost_when_the_worker_dies_in_the_middle_of_a_withdrawal(fleet: Fleet, agrees_first: bool) -> None:
    _, slow, other, request, _ = await stuck(fleet)

    async def dies(call: Exchange) -> None:
        if agrees_first:
            await call.whole(202, {})
        for writer in list(slow._connections):
            writer.transport.abort()
        slow._server.close()

    slow.on_withdraw = dies
    other.load = dict(IDLE)
    answer = await answered(request)
    assert answer.headers["x-fairlead-pod"] == other.pod and len(other.received) == 1


async def test_the_first_worker_gets_it_back_if_no_other_is_left(fleet: Fleet) -> None:
    _, slow, other, request, started = await stuck(fleet)

    async def dies_too(exchange: Exchange) -> None:
        started.set()
        other.ready = False
        await dies_at_once(exchange)

    other.behaviour = dies_too
    other.load = dict(IDLE)
    answer = await answered(request)
    assert answer.headers["x-fairlead-pod"] == slow.pod and len(slow.received) == 2


async def test_many_waiting_requests_move_until_the_other_worker_is_as_loaded(fleet: Fleet) -> None:
    started = asyncio.Event()
    slow = await fleet.worker(load={"prefill_rate": 2000.0}, behaviour=queues(started))
    other = await fleet.worker(load=dict(LONGER), behaviour=queues(started))
    router = await fleet.router(slow, other)
    requests = [asyncio.create_task(router.complete(f"{number} of many " * 200)) for number in range(8)]
    await eventually(lambda: len(slow.received) == 8, "all wait at one worker")
    other.load = {"prefill_rate": 2000.0}
    await eventually(lambda: len(other.received) >= 2, "some move")
    started.set()
    await asyncio.gather(*map(answered, requests))
    assert len(other.received) < 8, "each move is seen by the next comparison"
    assert len(slow.received) == 8 and len(slow.withdrawals) == len(other.received) and not other.withdrawals


async def test_policies_without_a_score_withdraw_nothing(fleet: Fleet) -> None:
    worker = await fleet.worker()
    router = await fleet.router(worker, policy="LeastLoad")
    await answered(router.complete())
    assert "x-fairlead-attempt" not in worker.received[0].headers


def estimate(backlog: float, rate: float, step: float, tokens: int = 1000) -> StartEstimate:
    return rank_candidates([ScoredWorker("a", 64, backlog=backlog, rate=rate, step=step)], b"", tokens, bytes(8), 1)[0]


amounts, rates = st.floats(0, 1e6), st.floats(1, 1e5)


@given(amounts, amounts, rates, st.floats(0, 100), st.floats(0, 100), amounts, amounts)
def test_the_remaining_wait_never_grows_with_time_and_ends_with_the_requests_own_work(
    own: float, ahead: float, rate: float, first: float, later: float, backlog: float, longer: float
) -> None:
    attempt = WaitingAttempt(RoutingRequest(), Worker("127.0.0.1:1", lambda: 0.0), own, own + ahead, 0.0)
    known = ScoredWorker("127.0.0.1:1", 1, rate=rate, backlog=backlog)
    early, late = (remaining_tokens(attempt, known, longer, at) for at in (min(first, later), max(first, later)))
    assert late <= early <= backlog
    assert early <= max(own, backlog - longer), "longer prompts go later"
    assert remaining_tokens(attempt, known, longer, 1e9) == min(own, backlog)


def waiting_at(rate: float, *tokens: float) -> tuple[WaitingAttempts, list[WaitingAttempt]]:
    """Attempts that were sent to one worker in this order, at 0 s."""
    worker, waiting = Worker("127.0.0.1:1", lambda: 0.0), WaitingAttempts()
    worker.load, worker.load_at = WorkerLoad(prefill_rate=rate), 0.0
    attempts = []
    for each in tokens:
        worker.pending_tokens += int(each)
        attempts.append(waiting.add(RoutingRequest(), worker, each, 0.0))
    return waiting, attempts


def test_a_short_prompt_waits_for_the_long_one_that_has_started_and_not_for_those_that_wait() -> None:
    waiting, (started, long, short) = waiting_at(1000.0, 5000, 4000, 100)
    assert waiting.remaining_tokens(short, 0.0) == 5000 + 100
    assert waiting.remaining_tokens(long, 0.0) == 5000 + 4000
    assert waiting.longest(0.0) == [long, short], "the first is next"
    waiting.remove(long)
    assert waiting.remaining_tokens(short, 0.0) == 9100, "removed attempts no longer count, and the backlog shows other requests"
    waiting.remove(short)
    waiting.remove(short)
    waiting.remove(started)
    assert not len(waiting) and waiting.longest(0.0) == []


def test_a_check_looks_at_each_attempt_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise ten thousand requests at one worker keep the event loop busy for half of the time."""
    lengths = [10 + 37 * number % 4001 for number in range(1000)]
    waiting, attempts = waiting_at(1000.0, *lengths)
    looked = 0

    def counted(attempt: WaitingAttempt, known: ScoredWorker, now: float) -> float:
        nonlocal looked
        looked += 1
        return tokens_until_turn(attempt, known, now)

    monkeypatch.setattr(waiting_attempts, "tokens_until_turn", counted)
    assert len(waiting.longest(100.0)) == waiting_attempts.RANKED
    assert looked <= len(attempts) + waiting_attempts.EXAMINED


@given(amounts, rates, st.floats(0, 0.5), amounts, rates, st.floats(0, 0.5))
def test_a_move_more_than_halves_the_time_with_what_it_costs_others(
    tokens: float, rate: float, step: float, backlog: float, other_rate: float, other_step: float
) -> None:
    here, other = estimate(tokens, rate, step), estimate(backlog, other_rate, other_step)
    gain = find_gain(tokens, here, [other])
    staying = tokens / rate + step + 4 * step
    assert gain == pytest.approx(staying - LEAST_RATIO * (other.score + step))
    assert gain <= 0 or staying >= 2 * other.seconds
    assert find_gain(tokens, here, []) == 0


def test_an_answer_is_never_asked_from_a_worker_without_room() -> None:
    here = estimate(1e6, 1000, 0.01)
    full = rank_candidates([ScoredWorker("b", 64, rate=1000, pages_total=10, pages_free=1, page_size=16)], b"", 1000, bytes(8), 1)[0]
    assert find_gain(1e6, here, [full]) == 0
