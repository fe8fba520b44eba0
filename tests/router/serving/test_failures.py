"""Worker failures are invisible to clients, unless a part of the answer was already sent."""

import asyncio
import json

import httpx
import pytest
from tests.router.harness import Fleet, eventually
from tests.router.stand_in_worker import Behaviour, Exchange, answers, dies_at_once, drains

from fairlead_router.fleet.poller import Poller
from fairlead_router.fleet.workers import Worker


async def silent(exchange: Exchange) -> None:
    await exchange.until_client_gone()


async def test_a_refused_connection_is_retried_on_another_worker(fleet: Fleet) -> None:
    workers = [await fleet.worker() for _ in range(2)]
    router = await fleet.router(*workers, policy="RoundRobin", poll_interval=30)  # health checks do not find it first
    await workers[0].kill()
    codes = [(await router.complete(f"p{number}")).status_code for number in range(6)]
    assert codes == [200] * 6 and len(workers[1].received) == 6


async def test_a_draining_worker_is_tried_once_and_then_avoided(fleet: Fleet) -> None:
    workers = [await fleet.worker() for _ in range(2)]
    router = await fleet.router(*workers, policy="RoundRobin", poll_interval=30)
    workers[0].behaviour = drains
    assert [(await router.complete(f"p{number}")).status_code for number in range(6)] == [200] * 6
    assert len(workers[0].received) == 1 and len(workers[1].received) == 6
    assert await router.metric("fairlead_router_retries_total") == 1


async def test_a_worker_that_dies_before_its_answer_is_replaced_without_the_client_seeing_it(fleet: Fleet) -> None:
    workers = [await fleet.worker() for _ in range(2)]
    router = await fleet.router(*workers, policy="RoundRobin")
    workers[0].behaviour = dies_at_once
    assert [(await router.complete(f"p{number}")).status_code for number in range(4)] == [200] * 4


async def test_a_connection_lost_before_its_answer_is_retried_on_the_only_worker(fleet: Fleet) -> None:
    """The request is sent once more on a new connection as soon as a health check succeeds, not refused after the whole hold timeout."""
    worker = await fleet.worker()
    router = await fleet.router(worker, hold_timeout=5)
    for new in (False, True):  # one connection that health checks keep, and one of its own
        worker.received.clear()

        async def dies_on_the_first(exchange: Exchange, kept: bool = not new) -> None:
            if len(exchange.worker.received) == 1:
                await asyncio.sleep(1.1 * kept)  # longer than a stale connection takes to end
                exchange.die()
            else:
                await answers(exchange)

        worker.behaviour = dies_on_the_first
        if new:
            (known,) = router.table
            known.pool.close()
        async with asyncio.timeout(4):
            assert (await router.complete("x")).status_code == 200
        assert len(worker.received) == 2


async def test_a_request_that_every_worker_resets_is_refused_immediately(fleet: Fleet) -> None:
    """All workers are alive and reset the request: each sees it twice, and the client does not wait for other workers."""
    workers = [await fleet.worker(behaviour=dies_at_once) for _ in range(2)]
    router = await fleet.router(*workers, hold_timeout=30)
    for worker in router.table:
        worker.pool.close()
    async with asyncio.timeout(10):
        answer = await router.complete("x")
    assert answer.status_code == 502 and answer.json()["error"]["code"] == "bad_gateway"
    assert all(1 <= len(worker.received) <= 3 for worker in workers)  # 3: one attempt used a connection that the health checks had kept


async def test_one_deadline_covers_all_attempts_of_a_request(fleet: Fleet) -> None:
    """Each of three workers loses the request after most of the time that an answer may take."""

    async def dies_late(exchange: Exchange) -> None:
        await asyncio.sleep(0.7)
        exchange.die()

    router = await fleet.router(*[await fleet.worker(behaviour=dies_late) for _ in range(3)], request_timeout=1)
    answer = await router.complete("x")
    assert answer.status_code == 504 and answer.json()["error"]["code"] == "timeout"


async def crashes(exchange: Exchange) -> None:
    """Die as a process that ends: nothing listens afterwards."""
    exchange.worker._server.close()
    for writer in list(exchange.worker._connections):
        writer.transport.abort()


async def dies_with_it(exchange: Exchange) -> None:
    await asyncio.sleep(0.1)
    exchange.die()


async def engine_dies_with_it(exchange: Exchange) -> None:
    await exchange.whole(503, {"error": {"message": "the engine has ended"}}, x_fairlead_retry="lost")


@pytest.mark.parametrize("behaviour", [dies_with_it, engine_dies_with_it])
async def test_a_request_that_kills_workers_does_not_kill_them_all(fleet: Fleet, behaviour: Behaviour) -> None:
    workers = [await fleet.worker(behaviour=behaviour) for _ in range(5)]
    router = await fleet.router(*workers)
    assert (await router.complete("poison")).status_code == 502
    assert sum(1 for worker in workers if worker.received) == 3


async def test_a_request_is_not_blamed_for_workers_that_all_die_together(fleet: Fleet) -> None:
    """When a whole fleet is killed, the request goes from one dying worker to the next and is held until one is back."""
    workers = [await fleet.worker(behaviour=crashes) for _ in range(3)]
    router = await fleet.router(*workers, workers=fleet.list_in_file(*workers))
    for worker in router.table:
        worker.pool.close()
    held = asyncio.create_task(router.complete("x"))
    await eventually(lambda: all(worker.received for worker in workers), "it was lost on each of them")
    fleet.list_in_file(*workers, await fleet.worker())
    assert (await held).status_code == 200


async def test_a_stream_whose_worker_dies_ends_with_an_error_event(fleet: Fleet) -> None:
    async def dies_midway(exchange: Exchange) -> None:
        await exchange.head()
        await exchange.event("some")
        exchange.die()

    router = await fleet.router(await fleet.worker(behaviour=dies_midway))
    answer = await router.complete("x", stream=True)
    events = [json.loads(line.removeprefix("data: ")) for line in answer.text.split("\n") if line]
    assert answer.status_code == 200 and events[0]["choices"] and events[1]["error"]["type"] == "server_error"
    assert (await router.metric("fairlead_router_broken_streams_total")) == 1


async def test_a_whole_answer_is_visibly_truncated_when_its_worker_dies(fleet: Fleet) -> None:
    async def dies_midway(exchange: Exchange) -> None:
        await exchange.head(200, 1000, "application/json")
        exchange.writer.write(b'{"object":')
        await exchange.writer.drain()
        exchange.writer.close()
        await exchange.writer.wait_closed()

    router = await fleet.router(await fleet.worker(behaviour=dies_midway))
    with pytest.raises(httpx.RemoteProtocolError):
        await router.complete("x")


async def test_a_silent_worker_is_given_up_at_the_deadline(fleet: Fleet) -> None:
    async def silent_later(exchange: Exchange) -> None:
        await exchange.head()
        await exchange.event("one")
        await exchange.until_client_gone()

    worker = await fleet.worker(behaviour=silent)
    router = await fleet.router(worker, request_timeout=0.3)
    answer = await router.complete("x")
    assert answer.status_code == 504 and answer.json()["error"]["code"] == "timeout"
    worker.behaviour = silent_later
    assert "error" in (await router.complete("x", stream=True)).text


async def test_a_kept_connection_that_the_worker_closed_is_no_failure(fleet: Fleet) -> None:
    async def answers_then_closes(exchange: Exchange) -> None:
        await answers(exchange)
        exchange.writer.close()

    router = await fleet.router(await fleet.worker(behaviour=answers_then_closes))
    assert [(await router.complete(f"p{number}")).status_code for number in range(5)] == [200] * 5


async def test_requests_are_held_while_the_only_worker_restarts_elsewhere(fleet: Fleet) -> None:
    old = await fleet.worker()
    router = await fleet.router(old, workers=fleet.list_in_file(old))
    assert (await router.complete("a")).status_code == 200
    await old.kill()
    held = [asyncio.create_task(router.complete(f"p{number}")) for number in range(10)]
    await eventually(lambda: not any(worker.usable for worker in router.table), "the router noticed")
    new = await fleet.worker()
    fleet.list_in_file(new)
    assert [answer.status_code for answer in await asyncio.gather(*held)] == [200] * 10
    assert len(new.received) == 10


async def test_a_worker_that_restarts_on_its_own_address_may_be_tried_again(fleet: Fleet) -> None:
    worker = await fleet.worker(behaviour=crashes)
    router = await fleet.router(worker)
    held = asyncio.create_task(router.complete("x"))
    await eventually(lambda: bool(worker.received), "the request was sent")
    await worker.kill()
    await eventually(lambda: all(worker.was_unready for worker in router.table), "a health check found it down")
    again = await fleet.worker(port=int(worker.address.split(":")[1]))
    assert (await held).status_code == 200 and len(again.received) == 1


async def test_a_worker_removed_from_discovery_gets_no_requests_and_its_streams_continue(fleet: Fleet) -> None:
    gate = asyncio.Event()

    async def waits(exchange: Exchange) -> None:
        await exchange.head()
        await exchange.event("one")
        await gate.wait()
        await exchange.end()

    leaving, staying = await fleet.worker(behaviour=waits), await fleet.worker()
    url = fleet.list_in_file(leaving)
    router = await fleet.router(leaving, workers=url)
    stream = asyncio.create_task(router.complete("x", stream=True))
    await eventually(lambda: bool(leaving.received), "the stream runs")
    fleet.list_in_file(staying)
    await eventually(lambda: router.table.get(leaving.address) is None, "it is gone")
    await router.usable(1)
    assert (await router.complete("y")).status_code == 200 and len(staying.received) == 1
    gate.set()
    assert (await stream).text.endswith("[DONE]\n\n")


async def test_without_any_worker_the_client_gets_503_after_the_hold_timeout(fleet: Fleet) -> None:
    router = await fleet.router(workers="static://127.0.0.1:9", hold_timeout=0.2)
    answer = await router.complete("x")
    assert answer.status_code == 503 and answer.headers["retry-after"] == "5"
    assert answer.json()["error"]["code"] == "service_unavailable"
    assert 'fairlead_router_refused_total{reason="hold"} 1.0' in (await router.client.get("/metrics")).text


@pytest.mark.parametrize("stays", [True, False], ids=["listed", "removed"])
async def test_a_silent_worker_loses_the_requests_that_it_has_not_started(fleet: Fleet, stays: bool) -> None:
    """As after SIGSTOP or on an unreachable node: connections stay open and nothing answers. It may also leave discovery."""
    stopped, other = await fleet.worker(behaviour=silent), await fleet.worker()
    router = await fleet.router(stopped, policy="RoundRobin", workers=fleet.list_in_file(stopped))
    waiting = asyncio.create_task(router.complete("x"))
    await eventually(lambda: len(stopped.received) == 1, "it has the request")
    stopped.stopped = True
    fleet.list_in_file(*([stopped] if stays else []), other)
    await eventually(lambda: stays or router.table.get(stopped.address) is None, "it was dropped")
    assert (await waiting).status_code == 200 and len(other.received) == 1


async def test_the_only_worker_is_given_up_while_silent_and_used_again_when_it_resumes(fleet: Fleet) -> None:
    worker = await fleet.worker(behaviour=silent)
    router = await fleet.router(worker, silence_timeout=2, hold_timeout=0.3)
    waiting = asyncio.create_task(router.complete("x"))
    await eventually(lambda: len(worker.received) == 1, "it has the request")
    worker.stopped = True
    answer = await waiting  # not after the request timeout of ten minutes
    assert answer.status_code == 503 and answer.headers["retry-after"]
    worker.stopped, worker.behaviour = False, answers
    await router.usable(1)
    assert (await router.complete("y")).status_code == 200


async def test_a_stream_of_a_worker_that_became_silent_ends_with_an_error_event(fleet: Fleet) -> None:
    async def falls_silent(exchange: Exchange) -> None:
        await exchange.head()
        await exchange.event("one")
        exchange.worker.stopped = True
        await exchange.until_client_gone()

    worker = await fleet.worker(behaviour=falls_silent)
    router = await fleet.router(worker, silence_timeout=2)
    events = [line for line in (await router.complete("x", stream=True)).text.split("\n") if line]
    assert len(events) == 2 and json.loads(events[1].removeprefix("data: "))["error"]["code"] == "stream_cut"


async def test_a_long_prefill_does_not_count_as_silence(fleet: Fleet) -> None:
    """No byte for longer than the silence timeout, while the worker answers health checks."""

    async def prefills_slowly(exchange: Exchange) -> None:
        await asyncio.sleep(2.6)
        await exchange.head()
        await exchange.event("one")
        await asyncio.sleep(2.6)
        await exchange.end()

    worker = await fleet.worker(behaviour=prefills_slowly)
    router = await fleet.router(worker, await fleet.worker(behaviour=prefills_slowly), silence_timeout=2)
    answer = await router.complete("x", stream=True)
    assert answer.text.endswith("[DONE]\n\n") and await router.metric("fairlead_router_retries_total") == 0


async def test_a_request_that_kills_processes_does_not_kill_them_all(fleet: Fleet) -> None:
    """The worker dies on kept connections and nothing listens afterwards, as when a process crashes."""

    async def crashes_with_it(exchange: Exchange) -> None:
        await asyncio.sleep(0.1)
        await crashes(exchange)

    workers = [await fleet.worker() for _ in range(5)]
    router = await fleet.router(*workers, policy="RoundRobin", poll_interval=30)
    assert [(await router.complete("fine")).status_code for _ in range(5)] == [200] * 5
    for worker in workers:
        worker.received.clear()
        worker.behaviour = crashes_with_it
    assert (await router.complete("poison")).status_code == 502
    assert sum(1 for worker in workers if worker.received) == 3


async def test_a_request_lost_in_mid_stream_is_not_retried(fleet: Fleet) -> None:
    async def dies_midway(exchange: Exchange) -> None:
        await exchange.head()
        await exchange.event("some")
        exchange.worker._server.close()
        exchange.die()

    doomed, other = await fleet.worker(behaviour=dies_midway), await fleet.worker()
    router = await fleet.router(doomed, other, policy="RoundRobin", poll_interval=30)
    while not doomed.received:
        await router.complete("x", stream=True)
    assert [(await router.complete(f"p{number}")).status_code for number in range(4)] == [200] * 4
    assert await router.metric("fairlead_router_retries_total") == 0


async def test_a_held_request_continues_without_a_notification_that_a_worker_is_back(fleet: Fleet) -> None:
    worker = await fleet.worker()
    router = await fleet.router(worker, poll_interval=30, hold_timeout=8)
    (known,) = router.table
    known.ready = False
    held = asyncio.create_task(router.complete("x"))
    await eventually(lambda: router.server.router.admission._num_waiting_for_worker() == 1, "it is held")
    known.ready = True  # as when a circuit breaker closes: nothing is notified
    async with asyncio.timeout(5):
        assert (await held).status_code == 200


async def test_a_health_check_begun_before_a_failure_does_not_mark_the_worker_healthy(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    router = await fleet.router(await fleet.worker(), poll_interval=0.05)
    (known,) = router.table
    poller = router.server.router._poller
    really, begun, gate, seen = poller._check, asyncio.Event(), asyncio.Event(), []

    async def slow(worker: Worker) -> str:
        seen.append(worker.ready)
        reason = await really(worker)
        begun.set()
        await gate.wait()
        return reason

    monkeypatch.setattr(poller, "_check", slow)
    await begun.wait()
    checks = len(seen)
    known.mark_unhealthy()
    gate.set()
    await eventually(lambda: len(seen) > checks, "it is checked again")
    assert seen[checks] is False
    await eventually(lambda: known.usable, "the next health check clears it")


async def test_a_worker_is_checked_again_after_an_unexpected_exception(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    router = await fleet.router(await fleet.worker())
    poller = router.server.router._poller
    really, failing = poller._check, True

    async def check(worker: Worker) -> str:
        if failing:
            raise KeyError("surprise")
        return await really(worker)

    monkeypatch.setattr(poller, "_check", check)
    await router.usable(0)
    failing = False
    await router.usable(1)


async def test_records_of_another_incarnation_do_not_discard_a_slow_health_check(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    really = Poller._check

    async def check(poller: Poller, worker: Worker) -> str:
        reason = await really(poller, worker)
        worker.checked_at -= 1.0  # the check took a second, and such a record arrived meanwhile
        worker.request_check()
        return reason

    monkeypatch.setattr(Poller, "_check", check)
    router = await fleet.router(await fleet.worker())
    assert (await router.complete("x")).status_code == 200
