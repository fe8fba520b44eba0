"""A real router before workers that prefill at a known rate: bounds, promises and best-effort work beyond what they can serve."""

import asyncio
import json
import random
from dataclasses import dataclass

from tests.router.harness import Fleet, RunningRouter, eventually
from tests.router.stand_in_worker import Exchange, StandIn, answers

RATE = 2000.0
TOKENS = 200
BOUND_SECONDS = 2.0
CLASSES = json.dumps([{"name": "chat", "ttftMilliseconds": int(1000 * BOUND_SECONDS)}])


class Prefill:
    """Behaviour of a worker that computes one prompt after another, in order of arrival."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()

    async def __call__(self, exchange: Exchange) -> None:
        async with self._lock:
            await asyncio.sleep(exchange.backlog / RATE)
            exchange.begun()
        await answers(exchange)


@dataclass
class Tally:
    """What clients of one class saw."""

    served: int = 0
    returned: int = 0


async def prefilling_worker(fleet: Fleet) -> StandIn:
    return await fleet.worker(behaviour=Prefill(), load={"prefill_rate": RATE})


def prompt(number: int, name: str) -> str:
    """Return a prompt of TOKENS tokens (bytes) that shares no block with others."""
    return f"{number:08d} {name} ".ljust(TOKENS, ".")


async def client(router: RunningRouter, number: int, name: str, tally: Tally) -> None:
    """Send one request; if it is rejected, again after exactly Retry-After."""
    body = {"prompt": prompt(number, name), "stream": True}
    for attempt in range(10):
        answer = await router.client.post("/v1/completions", json=body, headers={"x-slo-class": name})
        tally.returned += attempt > 0
        if answer.status_code == 200:
            tally.served += 1
            return
        assert answer.status_code == 429, answer.text
        await asyncio.sleep(int(answer.headers["retry-after"]))


async def arrivals(router: RunningRouter, load: float, seconds: float, tally: Tally) -> None:
    """Start clients at `load` times the capacity of one worker for `seconds`, and wait until all are served."""
    rng, clients, left = random.Random(7), [], seconds
    while left > 0:
        clients.append(asyncio.create_task(client(router, len(clients), "chat", tally)))
        pause = rng.expovariate(load * RATE / TOKENS)
        left -= pause
        await asyncio.sleep(pause)
    await asyncio.gather(*clients)


async def test_a_rejected_request_has_one_booking_however_often_it_returns_until_it_is_served(fleet: Fleet) -> None:
    """Here a worker's report says how busy it is. test_bounded_admission.py has whole loads, in simulated time."""
    worker = await fleet.worker(load={"prefill_rate": RATE, "backlog_tokens": int(300 * RATE), "running": 1})
    router = await fleet.router(worker, slo_classes=CLASSES)
    await eventually(lambda: all(one.load.backlog_tokens for one in router.table), "the router knows the worker's backlog")
    body, headers = {"prompt": prompt(1, "chat"), "stream": True}, {"x-slo-class": "chat"}
    for _ in range(2):
        answer = await router.client.post("/v1/completions", json=body, headers=headers)
        assert answer.status_code == 429 and 200 < int(answer.headers["retry-after"]) < 300, answer.text
        assert await router.metric("fairlead_router_slo_open_promises") == 1, "one body has one booking"
    worker.load = {"prefill_rate": RATE, "running": 1}
    await eventually(lambda: not any(one.load.backlog_tokens for one in router.table), "the router knows that the backlog is gone")
    assert (await router.client.post("/v1/completions", json=body, headers=headers)).status_code == 200
    assert await router.metric("fairlead_router_slo_open_promises") == 0
    text = (await router.client.get("/metrics")).text
    assert 'fairlead_router_slo_promises_total{outcome="kept"} 1.0' in text


async def test_chats_keep_their_bound_while_batch_work_uses_the_rest_and_nothing_starves(fleet: Fleet) -> None:
    router, chats, batch = await fleet.router(await prefilling_worker(fleet), slo_classes=CLASSES), Tally(), Tally()
    await eventually(lambda: all(one.load.prefill_rate for one in router.table), "the router knows the worker's rate")
    work = [asyncio.create_task(client(router, number, "batch", batch)) for number in range(30)]
    await eventually(lambda: batch.served > 0, "batch work has begun")
    await arrivals(router, 0.5, 3.0, chats)
    served_beside = batch.served
    assert chats.returned == 0, "half of the capacity is enough for all chats"
    assert served_beside >= 5, "batch work got a part of the other half"
    await asyncio.gather(*work)
    assert batch.served == 30 and batch.returned == 0


async def test_batch_work_keeps_its_share_while_chats_alone_are_too_many(fleet: Fleet) -> None:
    worker = await prefilling_worker(fleet)
    router, chats, batch = await fleet.router(worker, slo_classes=CLASSES), Tally(), Tally()
    await eventually(lambda: all(one.load.prefill_rate for one in router.table), "the router knows the worker's rate")
    overload = asyncio.create_task(arrivals(router, 2.0, 2.5, chats))
    await eventually(lambda: all(one.pending_tokens > TOKENS for one in router.table), "the worker is behind")
    work = [asyncio.create_task(client(router, number, "batch", batch)) for number in range(10)]
    await overload
    order = [seen.headers["x-fairlead-priority"] for seen in worker.received]
    assert "1000" in order[: len(order) - order[::-1].index("0")], "batch work was served before the last chat"
    await asyncio.gather(*work)
    assert batch.served == 10
