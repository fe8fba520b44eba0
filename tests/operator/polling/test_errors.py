"""Failed requests of a service while its images are updated, from the metrics of real routers' registries."""

import asyncio
from collections.abc import AsyncIterator

import pytest
from aiohttp import web
from prometheus_client import generate_latest

from fairlead_operator.observed import ObservedErrors
from fairlead_operator.polling.errors import ErrorPoller
from fairlead_operator.polling.prober import Prober
from fairlead_router.fleet.workers import WorkerTable
from fairlead_router.metrics import Metrics


class Router:
    """A router's /metrics on a port of its own."""

    def __init__(self) -> None:
        self.metrics, self.up = Metrics(WorkerTable()), True

    async def start(self) -> "Router":
        app = web.Application()
        app.router.add_get("/metrics", self._answer)
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        host, port = self._runner.addresses[0][:2]
        self.address = f"{host}:{port}"
        return self

    async def _answer(self, request: web.Request) -> web.Response:
        return web.Response(body=generate_latest(self.metrics.registry), status=200 if self.up else 503)

    def count(self, code: str, times: int) -> None:
        self.metrics.requests.labels("/v1/chat/completions", code).inc(times)

    async def close(self) -> None:
        await self._runner.cleanup()


@pytest.fixture
async def routers() -> AsyncIterator[list[Router]]:
    made = [await Router().start() for _ in range(3)]
    yield made
    for one in made:
        await one.close()


async def test_requests_since_the_update_are_counted_over_routers_that_come_and_go(routers: list[Router]) -> None:
    prober, changes = Prober("cluster.local"), []
    poller = ErrorPoller(prober, lambda: changes.append(poller.seen))
    old, other, new = routers
    old.count("200", 990)
    old.count("503", 10)
    other.up = False
    poller._addresses = (old.address, other.address)
    await poller._poll()
    assert poller.seen == ObservedErrors(0, 0, 0.01), "the share before the update"
    old.count("200", 40)
    old.count("500", 10)
    other.count("200", 500)
    other.up = True
    await poller._poll()
    assert poller.seen == ObservedErrors(50, 10, 0.01), "what a router had counted before its first answer is not of the update"
    new.count("200", 30)
    new.count("502", 20)
    old.up = False
    poller._addresses = (old.address, other.address, new.address)
    await poller._poll()
    assert poller.seen == ObservedErrors(100, 30, 0.01), "a new router counts from its start"
    new.metrics = Metrics(WorkerTable())
    new.count("200", 5)
    await poller._poll()
    assert poller.seen == ObservedErrors(105, 30, 0.01), "a restarted one too"
    assert len(changes) == 4
    await prober.close()


async def test_routers_that_never_answer_do_not_hold_an_update_back() -> None:
    prober, woken = Prober("cluster.local"), asyncio.Event()
    poller = ErrorPoller(prober, woken.set)
    poller.follow(("127.0.0.1:9",), active=True)
    async with asyncio.timeout(60):
        await woken.wait()
    assert poller.seen == ObservedErrors(0, 0, None)
    poller.follow((), active=False)
    assert poller.seen is None
    await prober.close()
