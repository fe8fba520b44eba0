"""Admission control: the order under load, load shedding, and holding requests while there is no worker."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from tests.router.harness import Fleet, RunningRouter, eventually
from tests.router.stand_in_worker import Exchange, answers
from tests.router.tenancy.test_access import ANNA, BORIS, ask, guarded

from fairlead_router.serving.admission import AHEAD_REQUESTS, Ticket
from fairlead_router.tenancy.quota import Account
from fairlead_router.tenancy.tenants import Tenant

FULL = {"running": 4, "max_running": 4, "waiting": AHEAD_REQUESTS, "prefill_rate": 100.0, "backlog_tokens": 0}
"""All sequence slots of a worker are in use: further requests wait in its queue."""


def gate() -> tuple[asyncio.Semaphore, Any]:
    """A worker that answers one request for each release."""
    turns = asyncio.Semaphore(0)

    async def behaviour(exchange: Exchange) -> None:
        await turns.acquire()
        await answers(exchange)

    return turns, behaviour


async def test_a_light_tenant_does_not_wait_for_a_heavy_ones_queue(fleet: Fleet, tmp_path: Path) -> None:
    router, worker = await guarded(fleet, tmp_path, {"anna": {}, "boris": {"priority": 0}})
    turns, worker.behaviour = gate()
    worker.load = FULL
    await eventually(lambda: all(one.load.waiting for one in router.table), "the router knows that it is full")
    flood = [asyncio.create_task(ask(router, ANNA, "one two three " * 20)) for _ in range(30)]
    await eventually(lambda: len(worker.received) == AHEAD_REQUESTS, "as many as it should be given")
    await eventually(lambda: len(router.server.router.admission._queue) == 30 - AHEAD_REQUESTS, "the others wait in the router")
    light = asyncio.create_task(ask(router, BORIS))
    await eventually(lambda: len(router.server.router.admission._queue) == 31 - AHEAD_REQUESTS, "so does it")
    assert await router.metric("fairlead_router_queued_requests") == 31 - AHEAD_REQUESTS
    turns.release()
    turns.release()
    await eventually(lambda: len(worker.received) == AHEAD_REQUESTS + 2, "an answer lets one in")
    tenants = [seen.headers["x-fairlead-tenant"] for seen in worker.received[AHEAD_REQUESTS:]]
    assert sorted(tenants) == ["anna", "boris"], "tenants alternate, however many requests one has"
    for _ in range(31):
        turns.release()
    assert {(await one).status_code for one in [*flood, light]} == {200}


async def test_without_pressure_every_request_goes_immediately(fleet: Fleet) -> None:
    turns, behaviour = gate()
    worker = await fleet.worker(behaviour=behaviour, load={"prefill_rate": 5000.0})
    router = await fleet.router(worker)
    asked = [asyncio.create_task(router.complete("short")) for _ in range(200)]
    await eventually(lambda: len(worker.received) == 200, "two seconds of prefill are all there at once")
    for _ in range(200):
        turns.release()
    assert {(await one).status_code for one in asked} == {200}


async def test_prompts_of_whole_answers_that_are_computed_keep_no_others_away(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such an answer begins only at its end, after seconds of decoding."""
    monkeypatch.setattr("fairlead_router.serving.admission.AHEAD_SECONDS", 0.5)
    turns, behaviour = gate()
    load = {"prefill_rate": 6000.0, "running": 20, "max_running": 256, "waiting": 0, "backlog_tokens": 0}
    worker = await fleet.worker(behaviour=behaviour, load=load)
    router = await fleet.router(worker)
    asked = [asyncio.create_task(router.complete(f"{number} " + "one two three " * 30)) for number in range(40)]
    queue = router.server.router.admission._queue
    await eventually(lambda: len(queue) > 10, "the worker has enough to compute")
    (known,) = router.table
    await eventually(lambda: len(worker.received) == 40, "it gets the others once it should have computed those", 30)
    await eventually(lambda: not known.pending_tokens and not known.pending_prompts, "all are computed", 30)
    assert known.in_flight == 40
    for _ in range(40):
        turns.release()
    assert {(await one).status_code for one in asked} == {200}


@pytest.mark.parametrize(("stream", "waiting"), [(True, 0), (False, 1)])
async def test_a_prompt_that_cannot_be_computed_yet_stays_pending(fleet: Fleet, stream: bool, waiting: int) -> None:
    """A stream would have begun. A worker that has as many waiting requests has not started the prompt."""
    turns, behaviour = gate()
    worker = await fleet.worker(behaviour=behaviour, load={"prefill_rate": 10_000.0, "waiting": waiting})
    router = await fleet.router(worker)
    await eventually(lambda: all(one.load.waiting == waiting for one in router.table), "the router knows its load")
    asked = asyncio.create_task(router.complete("one two three", stream=stream))
    await eventually(lambda: len(worker.received) == 1, "it is sent")
    (known,) = router.table
    await asyncio.sleep(0.5)
    assert known.pending_prompts == 1
    turns.release()
    assert (await asked).status_code == 200
    assert known.pending_prompts == 0


async def test_a_worker_is_never_idle_while_requests_are_queued(fleet: Fleet) -> None:
    turns, behaviour = gate()
    full, idle = await fleet.worker(behaviour=behaviour, load=FULL), await fleet.worker(behaviour=behaviour)
    router = await fleet.router(full, idle, policy="LeastLoad")
    asked = [asyncio.create_task(router.complete("short")) for _ in range(60)]
    await eventually(lambda: len(idle.received) + len(full.received) == 60, "the idle one takes all")
    for _ in range(60):
        turns.release()
    assert {(await one).status_code for one in asked} == {200}


async def test_a_client_that_disconnects_leaves_the_queue(fleet: Fleet) -> None:
    _, behaviour = gate()
    worker = await fleet.worker(behaviour=behaviour, load=FULL)
    router = await fleet.router(worker)
    asked = [asyncio.create_task(router.complete("x")) for _ in range(AHEAD_REQUESTS + 2)]
    queue = router.server.router.admission._queue
    await eventually(lambda: len(queue) == 2, "two wait")
    waiting = [task for task in asked if not task.done()]
    for task in waiting:
        task.cancel()
    await eventually(lambda: len(queue) == 0 and router.server.router.admission._num_unanswered == 0, "all places are free again")
    assert router.server.router.handler.body_budget.total == 0
    worker.behaviour = answers
    assert (await router.complete("x")).status_code == 200


async def test_a_request_is_refused_with_retry_after_if_its_first_token_would_come_too_late(fleet: Fleet) -> None:
    worker = await fleet.worker(load={"backlog_tokens": 10_000, "prefill_rate": 100.0})
    classes = '[{"name": "chat", "ttftMilliseconds": 40000}]'
    router = await fleet.router(worker, slo_classes=classes, default_slo_class="chat")
    answer = await router.complete("x")
    assert answer.status_code == 429 and answer.json()["error"]["code"] == "overloaded"
    assert 60 <= int(answer.headers["retry-after"]) <= 70 and not worker.received, "planned for nine tenths of the bound"
    worker.load = {"backlog_tokens": 1000, "prefill_rate": 100.0}
    await eventually(lambda: all(one.load.backlog_tokens == 1000 for one in router.table), "it has caught up")
    assert (await router.complete("x")).status_code == 200


async def test_a_full_queue_refuses_all_but_tenants_with_less_in_it(fleet: Fleet, tmp_path: Path) -> None:
    router, worker = await guarded(fleet, tmp_path, max_queue_requests=3)
    turns, worker.behaviour = gate()
    worker.load = FULL
    await eventually(lambda: all(one.load.waiting for one in router.table), "the router knows that it is full")
    flood = [asyncio.create_task(ask(router, ANNA)) for _ in range(AHEAD_REQUESTS + 3)]
    await eventually(lambda: len(router.server.router.admission._queue) == 3, "the queue is full")
    refused = await ask(router, ANNA)
    assert refused.status_code == 429 and int(refused.headers["retry-after"]) >= 1
    light = asyncio.create_task(ask(router, BORIS))
    done, _ = await asyncio.wait(flood, return_when=asyncio.FIRST_COMPLETED, timeout=10)
    assert [one.result().status_code for one in done] == [429], "the heavy tenant makes room"
    for _ in range(40):
        turns.release()
    assert (await light).status_code == 200
    assert sorted([(await one).status_code for one in flood]) == [200] * (AHEAD_REQUESTS + 2) + [429]


async def test_waiting_in_the_queue_is_bounded_in_time(fleet: Fleet) -> None:
    _, behaviour = gate()
    router = await fleet.router(await fleet.worker(behaviour=behaviour, load=FULL), queue_timeout=0.3)
    asked = [asyncio.create_task(router.complete("x")) for _ in range(AHEAD_REQUESTS + 1)]
    done, rest = await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED, timeout=10)
    assert [one.result().status_code for one in done] == [429]
    for one in rest:
        one.cancel()


async def full_up(exchange: Exchange) -> None:
    await exchange.whole(429, {"error": {"message": "full"}}, x_fairlead_retry="other", retry_after=str(5 + int(exchange.worker.pod[-1])))


async def test_a_full_worker_passes_the_request_on_and_the_client_gets_429_only_when_all_are_full(fleet: Fleet) -> None:
    full = [await fleet.worker(behaviour=full_up) for _ in range(2)]
    free = await fleet.worker()
    router = await fleet.router(*full, free, policy="RoundRobin")
    assert {(await router.complete(f"{number}")).status_code for number in range(6)} == {200}
    assert len(free.received) == 6 and full[0].received and full[1].received
    assert all(one.usable for one in router.table), "a full worker is not a broken one"
    free.behaviour = full_up
    answer = await router.complete("x")
    assert answer.status_code == 429 and answer.headers["retry-after"] == "5", "the shortest retry-after of the workers"


# Held


def events(text: str) -> list[Any]:
    return [line if line.startswith(":") else json.loads(line[6:]) for line in text.split("\n\n") if line and "[DONE]" not in line]


async def empty(fleet: Fleet, **settings: Any) -> RunningRouter:
    return await fleet.router(ready=0, workers=fleet.list_in_file(), **settings)


async def test_a_held_stream_gets_keepalives_and_then_its_answer(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fairlead_router.serving.admission.KEEP_ALIVE_SECONDS", 0.05)
    router = await empty(fleet)
    whole = asyncio.create_task(router.complete("whole"))
    text = b""
    async with router.client.stream("POST", "/v1/completions", json={"prompt": "x", "stream": True}) as answer:
        assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/event-stream")
        assert answer.headers["x-request-id"]
        worker = None
        async for piece in answer.aiter_bytes():
            text += piece
            if worker is None and text.count(b": held\n\n") > 2:
                worker = await fleet.worker()
                fleet.list_in_file(worker)
    found = events(text.decode())
    assert found[:3] == [": held"] * 3 and [one["choices"][0]["text"] for one in found if one != ": held"] == [f" {n}" for n in range(5)]
    assert text.endswith(b"data: [DONE]\n\n")
    assert (await whole).json()["choices"] and (await whole).status_code == 200


async def test_requests_that_no_current_worker_can_serve_do_not_block_others(fleet: Fleet) -> None:
    """For example, requests for an adapter of a worker that restarts."""
    router = await fleet.router(await fleet.worker())
    admission, account = router.server.router.admission, Account(Tenant(), lambda: 1.0)
    held = [Ticket(account, 0, 10, 10) for _ in range(AHEAD_REQUESTS)]
    waiting = [asyncio.create_task(admission.requeue(ticket)) for ticket in held]
    await asyncio.sleep(0)
    assert admission.queued()[0] == len(held)
    newcomer = Ticket(account, 0, 10, 10)
    turn = asyncio.create_task(admission.enter(newcomer))
    await asyncio.sleep(0)
    assert turn.done(), "there is room for it"
    admission.record_answer(newcomer)
    assert not any(task.done() or ticket.is_granted for task, ticket in zip(waiting, held, strict=True)), "nothing has changed for them"
    router.table.notify()
    await eventually(lambda: all(task.done() for task in waiting), "something may have")
    for ticket in held:
        admission.leave(ticket)


async def test_waiting_for_a_worker_does_not_delay_keepalives(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fairlead_router.serving.admission.RECHECK_SECONDS", 0.05)
    monkeypatch.setattr("fairlead_router.serving.admission.KEEP_ALIVE_SECONDS", 0.4)
    router = await empty(fleet, hold_timeout=2)
    answer = await router.complete("x", stream=True)
    assert answer.status_code == 200 and events(answer.text)[:2] == [": held"] * 2


@pytest.mark.parametrize("ending", ["error", "timeout", "drain", "death"])
async def test_a_failure_after_keepalives_ends_the_stream_with_an_error_event(
    fleet: Fleet, ending: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fairlead_router.serving.admission.KEEP_ALIVE_SECONDS", 0.05)
    router = await empty(fleet, hold_timeout=1 if ending == "timeout" else 20)

    async def fails(exchange: Exchange) -> None:
        if ending == "death":
            exchange.die()
        await exchange.whole(400, {"error": {"message": "no such thing", "code": "bad"}})

    text, told = b"", False
    async with router.client.stream("POST", "/v1/completions", json={"prompt": "x", "stream": True}) as answer:
        async for piece in answer.aiter_bytes():
            text += piece
            if not told and ending in ("error", "death"):
                fleet.list_in_file(*[await fleet.worker(behaviour=fails) for _ in range(6)])
            if not told and ending == "drain":
                router.server.router.admission.drain(0)
            told = True
    error = events(text.decode())[-1]["error"]
    expected = {"error": "bad", "timeout": "service_unavailable", "drain": "service_unavailable", "death": "bad_gateway"}
    assert error["code"] == expected[ending] and text.startswith(b": held\n\n") and text.endswith(b"}\n\n")
    assert router.server.router.handler.body_budget.total == 0


async def test_held_requests_are_bounded_in_number_and_bytes(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fairlead_router.serving.admission.MAX_QUEUE_BYTES", 4000)
    router = await empty(fleet, max_queue_requests=2)
    held = [asyncio.create_task(router.complete("x")) for _ in range(2)]
    await eventually(lambda: len(router.server.router.admission._queue) == 2, "two are held")
    refused = await router.complete("x")
    assert refused.status_code == 503 and refused.headers["retry-after"]
    held[0].cancel()
    await eventually(lambda: len(router.server.router.admission._queue) == 1, "one is held")
    assert (await router.complete("x" * 4000)).status_code == 503
    held[1].cancel()


async def test_held_requests_are_served_or_refused_within_the_drain_timeout(fleet: Fleet) -> None:
    """A worker that comes within the drain timeout still answers them; otherwise the client is told to retry elsewhere."""
    router = await empty(fleet, drain_grace=0, drain_timeout=3)
    held = asyncio.create_task(router.complete("x"))
    await eventually(lambda: len(router.server.router.admission._queue) == 1, "it is held")
    router.server.router.drain()
    router.server.leave()
    fleet.list_in_file(await fleet.worker())
    assert (await held).status_code == 200


async def test_without_keys_the_requests_own_priority_counts(fleet: Fleet) -> None:
    turns, behaviour = gate()
    worker = await fleet.worker(behaviour=behaviour, load=FULL)
    router = await fleet.router(worker)
    asked = [asyncio.create_task(router.complete("x")) for _ in range(AHEAD_REQUESTS)]
    await eventually(lambda: len(worker.received) == AHEAD_REQUESTS, "the worker is full")
    queue = router.server.router.admission._queue
    for count, priority in enumerate((5, 0, -5), 1):
        asked.append(asyncio.create_task(router.complete("x", priority=priority)))
        await eventually(lambda: len(queue) == count, "it waits")  # noqa: B023  # over immediately
    for _ in range(AHEAD_REQUESTS + 3):
        turns.release()
    await asyncio.gather(*asked)
    assert [seen.json["priority"] for seen in worker.received[AHEAD_REQUESTS:]] == [-5, 0, 5]
