"""The endpoint picker with a gRPC client that speaks as Envoy does: real router parts, real Redis for routing tests, stand-in workers."""

import asyncio
import json
import uuid
from collections.abc import Iterator
from typing import Any

import pytest
from tests.router.gateway import Exchange, Gateway, named_in
from tests.router.harness import Fleet, eventually
from tests.router.interop.picker import PATH, in_flight, picking, prompt
from tests.servers.redis_server import RedisServer

from fairlead_index.hashing import block_hashes, prompt_root, tokens_from_bytes
from fairlead_index.reader import IndexReader
from fairlead_router.interop.picker.ext_proc_pb2 import BUFFERED, NONE, STREAMED


@pytest.fixture
def redis() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


# The request


async def test_full_duplex_holds_the_body_until_it_is_complete_then_names_endpoints_and_forwards_it(fleet: Fleet) -> None:
    workers = [await fleet.worker() for _ in range(4)]
    text = "a long prompt " * 20_000  # many chunks of 62 KiB
    async with picking(fleet, *workers) as (router, asking):
        exchange = asking.exchange()
        body = prompt(text)
        await exchange.headers(PATH, content_length=str(len(body)), x_fairlead_prompt_tokens="7")
        await exchange.body(body[:100], body[100:70_000], end=False)
        waiting = asyncio.create_task(exchange.picked())
        await asyncio.wait([waiting], timeout=0.05)
        assert not waiting.done()
        await exchange.body(body[70_000:])
        endpoints, headers = await waiting
        assert len(set(endpoints)) == 3 and set(endpoints) <= {worker.address for worker in workers}
        passed = await exchange.streamed()
        tokens = int(headers["x-fairlead-prompt-tokens"])  # the router's own header, not the client's: the worker need not tokenize again
        assert headers["x-fairlead-prompt-format"] == router.table.get(endpoints[0]).format_tag
        assert passed[4 * tokens :] == body and len(tokens_from_bytes(passed[: 4 * tokens])) == tokens >= len(text)
        assert in_flight(router) == 1
        await exchange.call.done_writing()
        await eventually(lambda: in_flight(router) == 0, "the stream's end ends it")


async def test_a_client_cannot_set_the_routers_own_headers(fleet: Fleet) -> None:
    async with picking(fleet, await fleet.worker()) as (_, asking):
        exchange = asking.exchange()
        await exchange.headers("/tokenize", x_fairlead_prompt_tokens="7", x_gateway_destination_endpoint="6.6.6.6:80")
        answer = await exchange.read()
        mutation = answer.request_headers.response.header_mutation
        assert list(mutation.remove_headers) == ["x-fairlead-prompt-tokens"]
        assert [option.append_action for option in mutation.set_headers] == [2, 2]  # overwrites the client's value


async def test_trailers_may_end_the_body(fleet: Fleet) -> None:
    async with picking(fleet, await fleet.worker()) as (_, asking):
        exchange = asking.exchange()
        await exchange.headers(PATH)
        await exchange.body(prompt(), end=False)
        await exchange.trailers(checksum="1")
        await exchange.picked()
        piece = (await exchange.read()).request_body.response.body_mutation.streamed_response
        assert piece.body.endswith(prompt()) and not piece.end_of_stream
        assert (await exchange.read()).WhichOneof("response") == "request_trailers"


async def test_buffered_bodies_are_answered_phase_by_phase(fleet: Fleet) -> None:
    worker = await fleet.worker()
    async with picking(fleet, worker) as (_, asking):
        exchange = asking.exchange(BUFFERED, NONE)
        await exchange.headers(PATH)
        assert (await exchange.read()).WhichOneof("response") == "request_headers"  # Envoy sends the body only then
        await exchange.body(prompt())
        answer = await exchange.read()
        assert named_in(answer, answer.request_body.response.header_mutation)[0] == [worker.address]
        assert not answer.request_body.response.HasField("body_mutation")
        await exchange.respond(end=True)


@pytest.mark.parametrize("mode", [STREAMED, NONE])
async def test_without_a_body_in_time_only_load_decides(mode: int, fleet: Fleet) -> None:
    busy, idle = await fleet.worker(load={"backlog_tokens": 10_000}), await fleet.worker()
    async with picking(fleet, busy, idle) as (_, asking):
        exchange = asking.exchange(mode, NONE)
        await exchange.headers(PATH, content_length="400")
        assert (await exchange.picked())[0] == [idle.address, busy.address]
        if mode == STREAMED:
            await exchange.body(prompt())
            assert not (await exchange.read()).request_body.response.HasField("body_mutation")


async def test_a_second_request_on_a_stream_is_refused_and_both_release_everything(fleet: Fleet) -> None:
    async with picking(fleet, await fleet.worker()) as (router, asking):
        routed = asking.exchange()
        await routed.headers("/v1/models", method="GET", end=True)
        await routed.picked()
        await routed.headers("/v1/models", method="GET", end=True)
        assert (await routed.refused())[0] == 400
        await eventually(lambda: in_flight(router) == 0, "the refusal ends the first request")
        reading = asking.exchange()
        await reading.headers(PATH)
        await reading.body(b"x" * 1000, end=False)
        budget = router.server.router.handler.body_budget
        await eventually(lambda: budget.total == 1000, "the body is reserved")
        await reading.headers(PATH)
        assert (await reading.refused())[0] == 400
        await eventually(lambda: budget.total == 0, "the refusal releases the body")


async def test_a_body_or_trailers_without_headers_are_refused(fleet: Fleet) -> None:
    async with picking(fleet, await fleet.worker()) as (_, asking):
        for send in (lambda exchange: exchange.body(prompt()), lambda exchange: exchange.trailers(checksum="1")):
            exchange = asking.exchange()
            await send(exchange)
            status, body, _ = await exchange.refused()
            assert status == 400 and b"request_header_mode: SEND" in body


async def test_requests_without_a_prompt_are_forwarded_immediately(fleet: Fleet) -> None:
    worker = await fleet.worker()
    async with picking(fleet, worker) as (_, asking):
        listing = asking.exchange()
        await listing.headers("/v1/models", method="GET", end=True)
        assert (await listing.picked())[0] == [worker.address]
        other = asking.exchange()
        await other.headers("/tokenize")
        assert (await other.picked())[0] == [worker.address]
        await other.body(b"ab", b"cd")
        assert await other.streamed() == b"abcd"


# Routing


async def test_conversations_go_where_their_prefix_is_and_reservations_end(fleet: Fleet, redis: RedisServer) -> None:
    namespace = f"tests/{uuid.uuid4().hex[:8]}"
    workers = [await fleet.worker(redis=(redis.url, namespace)) for _ in range(3)]
    await eventually(lambda: all(worker.joined for worker in workers), "the workers joined")
    reader = IndexReader(redis.url, namespace, deadline=1)
    async with picking(fleet, *workers, redis_url=redis.url, index_namespace=namespace) as (router, asking):

        async def has_reservation(some: bool) -> bool:
            return any(state.reserved_tokens for state in await reader.workers()) == some

        for talk in ("alpha ", "beta "):
            text = talk * 60
            exchange = asking.exchange()
            await exchange.request(PATH, prompt(text))
            (home, *_), headers = await exchange.picked()
            passed = await exchange.streamed()
            assert await has_reservation(True)
            await exchange.respond(served=home, x_fairlead_cached_tokens="0")
            await eventually(lambda: has_reservation(False), "released when the answer begins")
            holder = next(worker for worker in workers if worker.address == home)
            tokens = tokens_from_bytes(passed[: 4 * int(headers["x-fairlead-prompt-tokens"])])
            hashes = block_hashes(prompt_root(holder.format), tokens, 16)
            holder._index.store(hashes)

            async def is_indexed(home: str = home, hashes: Any = hashes) -> bool:
                return (await reader.match(hashes)).get(home, 0) == 16 * len(hashes)

            await eventually(is_indexed, "the index knows the blocks")
            again = asking.exchange()
            await again.request(PATH, prompt(text + "and its next turn"))
            assert (await again.picked())[0][0] == home
            await again.streamed()
            added = await again.respond(served=home, x_fairlead_cached_tokens=str(16 * len(hashes)))
            assert added == {"x-fairlead-predicted-tokens": str(16 * len(hashes))}
            again.call.cancel()
            exchange.call.cancel()
        assert await router.metric("fairlead_router_prediction_error_tokens_sum") == 0
        assert await router.metric("fairlead_router_predicted_cached_tokens_total") > 500
        await eventually(lambda: in_flight(router) == 0, "cancelled streams end")
    await reader.close()


async def test_only_endpoints_of_the_gateways_subset_are_named(fleet: Fleet, redis: RedisServer) -> None:
    namespace = f"tests/{uuid.uuid4().hex[:8]}"
    workers = [await fleet.worker(redis=(redis.url, namespace)) for _ in range(3)]
    await eventually(lambda: all(worker.joined for worker in workers), "the workers joined")
    allowed = workers[2].address
    async with picking(fleet, *workers[1:], redis_url=redis.url, index_namespace=namespace) as (router, asking):
        for number in range(8):  # only the index knows the first worker
            exchange = asking.exchange()
            await exchange.request(PATH, prompt(f"{number} " * 100), subset=[allowed])
            assert (await exchange.picked())[0] == [allowed]
            exchange.call.cancel()
        for subset in ([], ["10.9.9.9:80"]):
            exchange = asking.exchange()
            await exchange.request(PATH, prompt(), subset=subset)
            status, body, _ = await exchange.refused()
            assert status == 503 and f"among the {len(subset)} endpoints" in json.loads(body)["error"]["message"]
        await eventually(lambda: in_flight(router) == 0, "nothing is left counted")


async def test_an_endpoint_that_the_gateway_could_not_use_is_checked_and_the_one_that_served_is_charged(fleet: Fleet) -> None:
    first, second = await fleet.worker(), await fleet.worker(load={"backlog_tokens": 100})
    async with picking(fleet, first, second) as (router, asking):
        exchange = asking.exchange()
        await exchange.request(PATH, prompt())
        assert (await exchange.picked())[0] == [first.address, second.address]
        await exchange.streamed()
        first.ready = False
        await exchange.respond(served=second.address, x_fairlead_pod=second.pod)
        assert not router.table.get(first.address).usable and router.table.get(second.address).in_flight == 1
        assert (await exchange.response_body(b"data: x\n\n")).response_body.response.body_mutation.streamed_response.body == b"data: x\n\n"
        await exchange.response_body(b"", end=True)
        assert in_flight(router) == 0


async def test_the_gateways_own_errors_open_the_circuit_breaker(fleet: Fleet) -> None:
    worker = await fleet.worker()
    async with picking(fleet, worker) as (router, asking):
        for _ in range(3):
            await router.usable(1)
            exchange = asking.exchange()
            await exchange.request(PATH, prompt())
            await exchange.picked()
            await exchange.streamed()
            await exchange.respond(503, end=True)  # Envoy: no connection
        assert not router.table.get(worker.address).breaker.is_closed


async def test_concurrent_requests_cancelled_at_every_phase_leave_nothing_counted(fleet: Fleet) -> None:
    workers = [await fleet.worker() for _ in range(3)]

    async def one(asking: Gateway, number: int) -> None:
        exchange: Exchange = asking.exchange()
        phase = number % 5
        await exchange.headers(PATH)
        if phase > 0:
            await exchange.body(prompt(f"{number} " * 200), end=phase > 1)
        if phase > 2:
            await exchange.picked()
            await exchange.streamed()
        if phase > 3:
            await exchange.respond()
        exchange.call.cancel()

    async with picking(fleet, *workers) as (router, asking):
        await asyncio.gather(*(one(asking, number) for number in range(200)))
        await eventually(lambda: in_flight(router) == 0, "nothing is in flight")
        assert all(worker.pending_tokens == 0 for worker in router.table)


# Refusals


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        (b"not json", 400, "not valid JSON"),
        (b"\xff\xfe", 400, "not valid JSON"),
        (b"[1]", 400, "must be a JSON object"),
        (b"", 400, "not valid JSON"),
        (prompt(model="gpt-9"), 404, "'gpt-9' does not exist"),
        (prompt("x" * 5000), 413, "limit of 4096 bytes (--max-body-bytes)"),
    ],
)
async def test_a_request_that_no_worker_would_accept_gets_an_openai_error(body: bytes, status: int, words: str, fleet: Fleet) -> None:
    async with picking(fleet, await fleet.worker(), max_body_bytes=4096) as (router, asking):
        exchange = asking.exchange()
        await exchange.request(PATH, body, x_request_id="mine")
        code, answer, headers = await exchange.refused()
        assert f'fairlead_router_picks_total{{code="{status}"}} 1.0' in (await router.server.router.metrics.render()).decode()
        assert code == status and words in json.loads(answer)["error"]["message"]
        assert headers["content-type"] == "application/json" and headers["x-request-id"] == "mine"


async def test_an_announced_length_over_the_limit_is_refused_before_the_body(fleet: Fleet) -> None:
    async with picking(fleet, await fleet.worker(), max_body_bytes=4096) as (_, asking):
        exchange = asking.exchange()
        await exchange.headers(PATH, content_length="5000")
        assert (await exchange.refused())[0] == 413


async def test_no_worker_is_503_and_a_queue_timeout_is_429(fleet: Fleet) -> None:
    worker = await fleet.worker(load={"backlog_tokens": 90_000, "prefill_rate": 1000.0})
    async with picking(fleet, worker) as (router, asking):
        loaded = router.table.get(worker.address)
        assert loaded is not None
        await eventually(lambda: loaded.load.backlog_tokens > 0, "its load was read")
        exchange = asking.exchange()
        await exchange.request(PATH, prompt())
        status, body, headers = await exchange.refused()
        assert status == 429 and json.loads(body)["error"]["code"] == "overloaded" and 29 <= int(headers["retry-after"]) <= 32
        worker.ready = False
        await router.usable(0)
        exchange = asking.exchange()
        await exchange.request(PATH, prompt())
        status, body, headers = await exchange.refused()
        assert status == 503 and headers["retry-after"] == "5" and json.loads(body)["error"]["code"] == "service_unavailable"
        assert await router.metric("fairlead_router_picks_total") == 2
        exchange = asking.exchange()
        await exchange.request(PATH, b'{"prompt": 5}')
        status, body, headers = await exchange.refused()
        assert status == 400 and json.loads(body)["error"]["param"] == "prompt", "wrong for every worker: none is asked"
