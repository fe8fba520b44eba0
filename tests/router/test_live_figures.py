"""What `kubectl fairlead` and the operator read from a real router: the workers' load and counters, and the waiting requests."""

import asyncio

import pytest
from tests.operator.support.manifests import pod
from tests.router.harness import Fleet, RunningRouter, eventually

from fairlead.errors import UserError
from fairlead.kube.live import Live, read_routers
from fairlead.kube.snapshot import row
from fairlead.kube.top import add_rates
from fairlead_operator.status import traffic

READY = {"conditions": [{"type": "Ready", "status": "True"}]}
SERVICE = {
    "metadata": {"namespace": "default", "name": "qwen"},
    "status": {"ready": "1/1", "conditions": [{"type": "Ready", "status": "True"}]},
}


def load(prompt: int, cached: int, output: int) -> dict[str, int]:
    counters = {"prompt_tokens": prompt, "cached_tokens": cached, "output_tokens": output}
    return {"running": 3, "waiting": 2, "pages_free": 25, "pages_total": 100, **counters}


async def read_live(router: RunningRouter) -> Live:
    """Read the router's pages as through the API server's proxy, which only forwards."""
    texts = {page: (await router.client.get(f"/{page}")).text for page in ("fairlead/workers", "metrics")}
    return read_routers([pod("qwen-router-0", "router", **READY)], lambda _, page: texts[page])


async def test_the_figures_of_a_service_are_aggregated_from_its_routers(fleet: Fleet) -> None:
    worker = await fleet.worker(pod="qwen-worker-0")
    worker.load = load(1000, 250, 100)
    router = await fleet.router(worker)

    async def shown(prompt: int) -> bool:
        entry = (await read_live(router)).workers.get("qwen-worker-0", {})
        return (entry.get("load") or {}).get("prompt_tokens") == prompt

    await eventually(lambda: shown(1000), "the worker's counters are shown")
    pods = [pod("qwen-worker-0", "worker", **READY), pod("qwen-router-0", "router", **READY)]
    first_live = await read_live(router)
    first = row(SERVICE, pods, first_live)
    figures = first.figures
    assert (figures.running, figures.queued, figures.kv_use, figures.hit_rate) == (3, 2, 0.75, 0.25)
    assert [(one.name, one.state) for one in first.pods] == [("qwen-worker-0", "Ready"), ("qwen-router-0", "Ready")] and first.notes == []
    worker.load = load(2000, 1150, 400)
    await eventually(lambda: shown(2000), "the worker's counters have moved")
    second_live = await read_live(router)
    (second,) = add_rates([first], [row(SERVICE, pods, second_live)], 10.0)
    assert second.pods[0].figures.tokens_per_second == 30.0 == second.figures.tokens_per_second
    assert second.pods[0].figures.hit_rate == 0.9, "rates cover the time between the two reads"
    before, after = (
        traffic.CounterSnapshot.parse({"workers": list(live.workers.values())}, at) for live, at in ((first_live, 0.0), (second_live, 10.0))
    )
    assert before is not None and after is not None
    seen = traffic.measure_traffic(before, after)
    assert seen is not None and (seen.tokens_per_second, seen.prompt_tokens_per_second, seen.cache_hit_percent) == (30, 100, 90)


async def test_requests_that_wait_in_routers_count_as_the_queue(fleet: Fleet) -> None:
    router = await fleet.router(workers=fleet.list_in_file(), ready=0)
    waits = [asyncio.create_task(router.complete()) for _ in range(3)]
    try:

        async def three_wait() -> bool:
            return (await read_live(router)).queued == 3

        await eventually(three_wait, "the router says that three wait")
    finally:
        for one in waits:
            one.cancel()
        await asyncio.gather(*waits, return_exceptions=True)


def test_unreadable_routers_are_reported_and_a_partial_queue_is_not_shown() -> None:
    routers = [pod("r-0", "router", **READY), pod("r-1", "router", **READY)]

    def read(name: str, page: str) -> str:
        if page == "metrics" and name == "r-1":
            raise UserError("away")
        return '{"index": "ok", "workers": []}' if page != "metrics" else "fairlead_router_queued_requests 4.0\n"

    assert read_routers(routers, read).queued is None and read_routers(routers[:1], read).queued == 4
    assert read_routers([], read).problem == "no router is ready"

    def refused(name: str, page: str) -> str:
        raise UserError("you may not get pods/proxy")

    assert read_routers(routers, refused).problem == "you may not get pods/proxy"
    assert "not a Fairlead router" in read_routers(routers, lambda *_: "<html>").problem


@pytest.mark.parametrize("counters", [{}, {"prompt_tokens": 5, "cached_tokens": 0, "output_tokens": 0}])
def test_a_restarted_or_older_worker_has_no_rate(counters: dict[str, int]) -> None:
    pods = [pod("w", "worker", **READY)]
    before = Live(workers={"w": {"load": load(100, 50, 10)}})
    after = Live(workers={"w": {"load": {"running": 1, **counters}}})
    (shown,) = add_rates([row(SERVICE, pods, before)], [row(SERVICE, pods, after)], 1.0)
    assert shown.pods[0].figures.tokens_per_second is None
