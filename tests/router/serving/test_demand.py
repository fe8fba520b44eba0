"""`/fairlead/demand`: its figures, its long poll, and the errors of requests that wait while workers start."""

import asyncio
from typing import Any

import httpx
import pytest
from tests.router.harness import Fleet, RunningRouter, eventually

from fairlead_router.fleet.scale_up_status import ScaleUpStatus
from fairlead_router.serving.demand import WINDOW_SECONDS, Arrivals


async def demand(router: RunningRouter, query: str = "") -> dict[str, Any]:
    answer = await router.client.post(f"/fairlead/demand{query}")
    assert answer.status_code == 200, answer.text
    return answer.json()


async def empty(fleet: Fleet, **settings: Any) -> RunningRouter:
    return await fleet.router(ready=0, workers=fleet.list_in_file(), **settings)


async def test_demand_counts_arrivals_waiting_requests_and_prefill_rate(fleet: Fleet) -> None:
    worker = await fleet.worker(load={"prefill_rate": 1234.0, "running": 3, "waiting": 2, "pages_total": 10, "pages_free": 4})
    router = await fleet.router(worker)
    assert (await demand(router))["idle_seconds"] < 30
    for _ in range(4):
        assert (await router.complete("one two three four five six seven eight")).status_code == 200
    answer = await demand(router)
    assert answer["prompt_tokens_per_second"] > 0 and answer["requests_per_second"] > 0 and answer["active"] == answer["queued"] == 0
    assert answer["prefill_rate"] == 1234.0 and answer["idle_seconds"] < 5
    (one,) = answer["workers"]
    assert (one["pod"], one["usable"], one["running"], one["waiting"]) == ("pod-0", True, 3, 2)
    assert (one["pages_total"], one["pages_free"], one["unique_share"]) == (10, 4, None)
    await worker.kill()
    await router.usable(0)
    assert (await demand(router))["prefill_rate"] == 1234.0, "the last known rate outlives the workers"


async def test_a_long_poll_is_answered_by_the_first_request_or_the_timeout(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fairlead_router.serving.demand.BURST_SECONDS", 2.0)  # a busy machine takes longer to accept a burst
    router = await empty(fleet, hold_timeout=5)
    loop = asyncio.get_running_loop()
    began = loop.time()
    assert (await demand(router, "?wait=0.3"))["active"] == 0 and loop.time() - began >= 0.3
    asking = asyncio.create_task(demand(router, "?wait=60"))
    await asyncio.sleep(0)
    burst = [asyncio.create_task(router.complete("hello")) for _ in range(20)]
    answer = await asyncio.wait_for(asking, 5)
    assert answer["active"] == 20 and answer["queued"] >= 19 and answer["idle_seconds"] == 0 and answer["prompt_tokens_per_second"] > 0
    assert (await demand(router, "?wait=60"))["active"] == 20, "immediately, while requests wait"
    worker = await fleet.worker()
    fleet.list_in_file(worker)
    assert {answer.status_code for answer in await asyncio.gather(*burst)} == {200}
    await eventually(lambda: router.server.router.demand._active == 0, "the burst is over")


async def test_best_effort_prompts_keep_a_service_busy_and_call_for_no_more_workers(fleet: Fleet) -> None:
    router = await empty(fleet, hold_timeout=30)
    held = asyncio.create_task(router.client.post("/v1/completions", json={"prompt": "hello"}, headers={"x-slo-class": "batch"}))
    await eventually(lambda: router.server.router.admission.queued()[0] == 1, "it waits for a worker")
    answer = await demand(router)
    assert answer["active"] == answer["queued"] == 1 and answer["idle_seconds"] == 0
    assert answer["queued_tokens"] == answer["prompt_tokens_per_second"] == answer["requests_per_second"] == 0
    fleet.list_in_file(await fleet.worker())
    assert (await held).status_code == 200


async def test_draining_ends_long_polls(fleet: Fleet) -> None:
    router = await empty(fleet)
    asking = asyncio.create_task(demand(router, "?wait=60"))
    await eventually(lambda: bool(router.server.router.demand._has_requests._waiters), "it waits")
    router.server.router.drain()
    assert (await asyncio.wait_for(asking, 5))["draining"] is True


async def test_a_parameter_that_is_no_number_is_named_in_the_refusal(fleet: Fleet) -> None:
    router = await empty(fleet)
    for query, name in (("wait=soon", "wait"), ("wanted=-1", "wanted"), ("wait=nan", "wait")):
        answer = await router.client.get(f"/fairlead/demand?{query}")
        assert answer.status_code == 400 and name in answer.json()["error"]["message"]


async def test_a_request_that_waited_in_vain_is_told_the_workers_startup_progress(fleet: Fleet) -> None:
    router = await empty(fleet, hold_timeout=0.2)
    plain = await router.complete("hello")
    assert plain.status_code == 503 and plain.headers["retry-after"] == "5" and "Try again later" in plain.text
    await demand(router, "?wanted=2&starting=1&seconds=41&reason=Loading")
    told = await router.complete("hello")
    assert told.status_code == 503 and told.headers["retry-after"] == "41"
    message = told.json()["error"]["message"]
    assert message == "No worker became ready within 0.2 s: 1 of 2 workers being started, for 41 s now, Loading. Try again in 41 s."
    await demand(router, "?wanted=2&starting=1&seconds=41&reason=%3Cscript%3E")
    assert "script" not in (await router.complete("hello")).text, "anybody may set this text: it is one word without markup"
    await demand(router, "?wanted=0&starting=0")
    assert "the service is scaled to zero" in (await router.complete("hello")).text


async def test_a_get_reports_nothing(fleet: Fleet) -> None:
    """An image on any web page can send one. Operators of earlier releases do, and get their figures."""
    router = await empty(fleet, hold_timeout=0.2)
    answer = await router.client.get("/fairlead/demand?wanted=2&starting=1&seconds=41&reason=Loading")
    assert answer.status_code == 200 and "idle_seconds" in answer.json()
    assert "Try again later" in (await router.complete("hello")).text


async def test_requests_wait_beyond_the_default_only_while_starting_workers_progress(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fairlead_router.serving.admission.HOLD_SECONDS", 0.2)
    monkeypatch.setattr("fairlead_router.serving.admission.RECHECK_SECONDS", 0.05)
    router = await empty(fleet, hold_timeout=None)
    assert (await router.complete("nobody says anything")).status_code == 503
    await demand(router, "?wanted=1&starting=1&seconds=1&reason=Loading&advancing=1")
    held = asyncio.create_task(router.complete("hello"))
    given_up = asyncio.create_task(router.complete("hello"))
    done, _ = await asyncio.wait({held, given_up}, timeout=0.6)
    assert not done, "three times as long as without a progress report"
    await demand(router, "?wanted=1&starting=1&seconds=2&reason=FailedScheduling")
    refused = await given_up
    assert refused.status_code == 503 and "FailedScheduling" in refused.text and refused.headers["retry-after"]
    assert (await held).status_code == 503
    await demand(router, "?wanted=1&starting=1&seconds=3&reason=Loading&advancing=1")
    answered = asyncio.create_task(router.complete("hello"))
    fleet.list_in_file(await fleet.worker())
    assert (await answered).status_code == 200


async def test_an_explicit_hold_timeout_is_kept_whatever_the_progress(fleet: Fleet) -> None:
    router = await empty(fleet, hold_timeout=0.2)
    await demand(router, "?wanted=1&starting=1&seconds=1&reason=Loading&advancing=1")
    assert (await router.complete("hello")).status_code == 503


async def test_the_router_is_ready_without_workers_only_with_the_flag(fleet: Fleet) -> None:
    plain, zero = await empty(fleet), await empty(fleet, ready_without_workers=True)
    assert (await plain.client.get("/ready")).status_code == 503
    assert (await zero.client.get("/ready")).status_code == 200


async def test_a_probe_does_not_scale_up_from_zero(fleet: Fleet) -> None:
    router = await empty(fleet, hold_timeout=30)
    answer = await router.client.get("/fairlead/probe")
    assert answer.status_code == 503 and "No worker is ready" in answer.text
    answer = await demand(router)
    assert answer["active"] == answer["queued"] == 0


async def test_a_burst_beyond_the_queue_is_held_or_gets_retry_after(fleet: Fleet) -> None:
    router = await empty(fleet, max_queue_requests=120)
    await demand(router, "?wanted=1&starting=1&seconds=12&reason=Loading")
    burst = [asyncio.create_task(router.complete("hello", stream=number % 2 == 0)) for number in range(200)]
    await eventually(lambda: sum(task.done() for task in burst) >= 79, "what has no room is told so at once")
    worker = await fleet.worker()
    fleet.list_in_file(worker)
    answers: list[httpx.Response] = await asyncio.gather(*burst)
    held = [answer for answer in answers if answer.status_code == 200]
    told = [answer for answer in answers if answer.status_code == 503]
    assert len(held) + len(told) == 200 and len(held) >= 120
    assert all(answer.headers["retry-after"].isdigit() and "being started" in answer.text for answer in told)


def test_a_startup_report_expires() -> None:
    now = [1000.0]
    coming = ScaleUpStatus(lambda: now[0])
    assert coming.description == "" and coming.retry_after == 5
    coming.update(4, 2, 30.0, "FailedScheduling")
    now[0] += 10
    assert coming.description == ": 2 of 4 workers being started, for 40 s now, FailedScheduling" and coming.retry_after == 40
    now[0] += 200
    assert coming.description == "" and coming.retry_after == 5


def test_a_rate_is_measured_over_the_window() -> None:
    now = [0.0]
    arrivals = Arrivals(lambda: now[0])
    for _ in range(100):
        arrivals.add(50)
        now[0] += 0.5
    assert arrivals.rates() == (2.0, 100.0) or abs(arrivals.rates()[1] - 100) < 8
    now[0] += WINDOW_SECONDS + 1
    assert arrivals.rates() == (0.0, 0.0)
