"""`--forwarding-mode redirect`, with clients that follow and with one that does not."""

import asyncio

import openai
import pytest
from tests.admin_paths import ROUTER, WORKER, status, variants
from tests.router.harness import Fleet, eventually, running_router
from tests.router.stand_in_worker import StandIn, drains
from tests.servers.redis_server import RedisServer

from fairlead_index.reader import IndexReader
from fairlead_index.writer import IndexWriter
from fairlead_router.config import RouterConfig
from fairlead_router.router import Router

CHAT = [{"role": "user", "content": "hello there"}]


async def test_httpx_follows_the_redirect_with_the_whole_body(fleet: Fleet) -> None:
    worker = await fleet.worker()
    router = await fleet.router(worker, forwarding_mode="redirect")
    body = {"model": "stand-in", "prompt": "long " * 5000, "max_tokens": 3}
    first = await router.client.post("/v1/completions?trace=1", json=body)  # the query string is for the router only
    assert first.status_code == 307 and first.headers["location"] == f"http://{worker.address}/v1/completions"
    assert not worker.received, "the router itself has sent nothing"
    answer = await router.client.post("/v1/completions?trace=1", json=body, follow_redirects=True)
    assert answer.status_code == 200 and answer.json()["choices"][0]["text"] == " 0 1 2 3 4"
    assert worker.received[0].json == body and worker.received[0].path == "/v1/completions"


async def test_the_openai_client_follows_streams_and_does_not_forward_its_key(fleet: Fleet) -> None:
    worker = await fleet.worker()
    router = await fleet.router(worker, forwarding_mode="redirect")
    async with openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{router.port}/v1", api_key="secret", max_retries=0) as client:
        stream = await client.completions.create(model="stand-in", prompt="hello", stream=True)
        texts = [chunk.choices[0].text async for chunk in stream]  # type: ignore[union-attr]  # stream=True gives a stream
    assert texts == [" 0", " 1", " 2", " 3", " 4"]
    assert worker.received[0].json["prompt"] == "hello"
    assert "authorization" not in worker.received[0].headers, "dropped on the redirect to another origin"


async def test_a_client_that_does_not_follow_is_told_what_to_do_and_can_opt_out(fleet: Fleet) -> None:
    worker = await fleet.worker()
    router = await fleet.router(worker, forwarding_mode="redirect")
    answer = await router.client.post("/v1/chat/completions", json={"model": "stand-in", "messages": CHAT})
    error = answer.json()["error"]
    assert answer.status_code == 307 and error["code"] == "temporary_redirect" and "X-Fairlead-Forwarding-Mode: proxy" in error["message"]
    assert answer.headers["cache-control"] == "no-store" and answer.headers["x-fairlead-pod"] == "pod-0"
    headers = {"X-Fairlead-Forwarding-Mode": "proxy"}
    answer = await router.client.post("/v1/chat/completions", json={"model": "stand-in", "messages": CHAT}, headers=headers)
    assert answer.status_code == 200 and worker.received[0].tokens is not None
    assert "x-fairlead-forwarding-mode" not in worker.received[0].headers


async def test_other_paths_and_refusals_are_answered_by_the_router(fleet: Fleet) -> None:
    worker = await fleet.worker()
    router = await fleet.router(worker, forwarding_mode="redirect")
    assert (await router.client.post("/tokenize", json={"prompt": "x"})).status_code == 200
    assert (await router.client.post("/v1/completions", json={"model": "none", "prompt": "x"})).status_code == 404
    assert (await router.client.post("/v1/completions", content=b"{")).status_code == 400


async def test_simultaneous_requests_are_spread_before_workers_report_them(fleet: Fleet) -> None:
    workers = [await fleet.worker() for _ in range(4)]
    router = await fleet.router(*workers, forwarding_mode="redirect", policy="LeastLoad")
    answers = await asyncio.gather(*(router.complete("word " * 400) for _ in range(40)))
    places = [answer.headers["location"] for answer in answers]
    assert {places.count(f"http://{worker.address}/v1/completions") for worker in workers} == {10}


async def test_no_other_path_is_redirected(fleet: Fleet) -> None:
    worker = await fleet.worker()
    router = await fleet.router(worker, forwarding_mode="redirect", admin_port=0)
    asked = [(target, method) for path in (*WORKER, *ROUTER) for target in variants(path) for method in ("GET", "POST")]
    codes = {one: await asyncio.to_thread(status, router.port, *one) for one in asked}
    assert set(codes.values()) <= {400, 404, 405}, codes


class ReportsNoLoad(StandIn):
    """A worker that reports no load: reservations on it end by time alone."""

    async def _report(self, index: IndexWriter) -> None:
        pass


async def test_the_reservation_in_the_index_stays_after_the_redirect(fleet: Fleet) -> None:
    with RedisServer() as redis:
        worker = await ReportsNoLoad(redis=(redis.url, "tests/redirect")).start()
        reader = IndexReader(redis.url, "tests/redirect", deadline=5)
        try:
            await eventually(lambda: worker.joined, "the worker joined")
            router = await fleet.router(worker, forwarding_mode="redirect", redis_url=redis.url, index_namespace="tests/redirect")

            async def by_the_index() -> bool:  # a busy machine may take longer than a router waits for its index
                answer = await router.complete("cold prefix " * 400)
                return answer.headers.get("x-fairlead-predicted-tokens") == "0"

            await eventually(by_the_index, "a redirect by the index")
            (state,) = await reader.workers()
            assert state.reserved_tokens >= len("cold prefix " * 400), "after the router has finished its part"
        finally:
            await reader.close()
            await worker.kill()


async def test_a_draining_worker_sends_its_client_back_to_the_router(fleet: Fleet) -> None:
    draining, other = await fleet.worker(behaviour=drains), await fleet.worker()
    router = await fleet.router(draining, other, forwarding_mode="redirect", policy="RoundRobin")
    async with openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{router.port}/v1", api_key="x", max_retries=5) as client:
        for _ in range(3):
            answer = await client.completions.create(model="stand-in", prompt="hello")
            assert answer.choices[0].text == " 0 1 2 3 4"


async def test_requests_that_wait_for_a_worker_are_bounded_as_in_proxy_mode() -> None:
    async with running_router(workers="static://127.0.0.1:9", forwarding_mode="redirect", hold_timeout=1, max_queue_requests=1) as router:
        waiting = asyncio.create_task(router.complete())
        await eventually(lambda: len(router.server.router.admission._queue) == 1, "it waits in the common queue")
        answer = await router.complete()
        assert answer.status_code == 503 and "too many requests wait" in answer.text
        assert (await waiting).status_code == 503 and not len(router.server.router.admission._queue)


def test_keys_and_redirects_exclude_each_other() -> None:
    with pytest.raises(ValueError, match="--forwarding-mode redirect goes past --api-keys-file"):
        Router(RouterConfig(workers="static://a:1", forwarding_mode="redirect", api_keys_file="/keys.yaml"))
    Router(RouterConfig(workers="static://a:1", forwarding_mode="redirect"))
