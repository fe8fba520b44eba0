"""Token rates: usage is what the worker reports, is shared by all routers, and is charged to its own tenant only."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.router.harness import Fleet, RunningRouter, eventually
from tests.router.stand_in_worker import Exchange, dies_at_once
from tests.router.tenancy.test_access import ANNA, BORIS, ask, bearer, guarded, key_file
from tests.servers.redis_server import RedisServer

from fairlead_common.memory import LARGE
from fairlead_index.redis.scripts import Scripts
from fairlead_router.fleet.workers import WorkerTable
from fairlead_router.metrics import Metrics
from fairlead_router.request.price import DOWNLOADED, FORWARDED, LEFT_PRICE, MICROSECONDS_A_TOKEN, PIECE, STORED, UPLOADED, price_of_cpu
from fairlead_router.tenancy.charge import UsageMeter
from fairlead_router.tenancy.quota import Account, Accounts
from fairlead_router.tenancy.tenants import Tenant

SLOW = {"anna": {"tokensPerMinute": 60, "burstTokens": 1000}, "boris": {}}
"""One token per second: the bucket does not refill within a test."""


def reports_usage(prompt: int, output: int) -> Any:
    """A worker that reports this usage."""

    async def behaviour(exchange: Exchange) -> None:
        if not exchange.request.json.get("stream"):
            await exchange.whole(200, {"choices": []}, x_fairlead_usage=f"{prompt} {output}")
            return
        assert exchange.request.headers["x-fairlead-usage"] == "1"
        await exchange.head()
        await exchange.event("one")
        await exchange.chunk(b": usage %d %d\n" % (prompt, output))  # the rest of the event comes in another packet
        await exchange.chunk(b"\n")
        await exchange.end()

    return behaviour


def level(router: RunningRouter, tenant: str = "anna") -> float:
    return router.server.router.handler._accounts._accounts[tenant].refill()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_tenant_is_charged_what_the_worker_reports(fleet: Fleet, tmp_path: Path, stream: bool) -> None:
    router, worker = await guarded(fleet, tmp_path, SLOW)
    worker.behaviour = reports_usage(300, 450)
    answer = await ask(router, ANNA, stream=stream)
    assert answer.status_code == 200 and answer.headers["x-ratelimit-limit-tokens"] == "1000"
    await eventually(lambda: 245 <= level(router) <= 255, "750 of 1000 tokens were charged")
    assert (await ask(router, BORIS)).status_code == 200
    worker.behaviour = reports_usage(300, 200)
    assert (await ask(router, ANNA, max_tokens=10)).status_code == 200  # below zero now
    refused = await ask(router, ANNA, max_tokens=1)
    error = refused.json()["error"]
    assert refused.status_code == 429 and error["code"] == "rate_limit_exceeded" and error["type"] == "tokens"
    assert int(refused.headers["retry-after"]) >= 240 and refused.headers["x-ratelimit-remaining-tokens"] == "0"
    assert refused.headers["x-ratelimit-reset-tokens"].endswith("s")
    assert (await ask(router, BORIS)).status_code == 200, "other tenants are unaffected"
    text = (await router.server.router.metrics.render()).decode()
    assert 'fairlead_router_tenant_tokens_total{kind="output",tenant="anna"} 650.0' in text
    assert await router.metric("fairlead_router_refused_total") == 1


async def test_a_request_that_was_retried_is_charged_once(fleet: Fleet, tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text(key_file({"anna": {"tokensPerMinute": 6, "burstTokens": 1000}}))
    lost = [await fleet.worker(behaviour=dies_at_once) for _ in range(2)]
    worker = await fleet.worker(behaviour=reports_usage(20, 30))
    router = await fleet.router(*lost, worker, policy="RoundRobin", api_keys_file=str(path))
    for left in (950, 900, 850):
        assert (await ask(router, ANNA, "hello", max_tokens=40)).status_code == 200
        await eventually(lambda left=left: left <= level(router) < left + 5, "50 tokens were charged")
    assert await router.metric("fairlead_router_retries_total") >= 2, "some were sent to workers that died"


async def test_a_request_that_was_retried_after_silence_is_charged_once(fleet: Fleet, tmp_path: Path) -> None:
    """The silent worker takes the router's leaving for the client's: it reports what it computed with the tenant's next answer."""
    path = tmp_path / "keys.yaml"
    path.write_text(key_file({"anna": {"tokensPerMinute": 6, "burstTokens": 20_000}}))
    silent = await fleet.worker(behaviour=Exchange.until_client_gone)
    router = await fleet.router(silent, await fleet.worker(behaviour=reports_usage(400, 10)), policy="RoundRobin", api_keys_file=str(path))
    (one,) = (one for one in router.table if one.address == silent.address)
    requests = 0

    async def ask_until(received: int) -> None:
        nonlocal requests
        while len(silent.received) < received:
            requests += 1
            asked = asyncio.create_task(ask(router, ANNA, "word " * 400, max_tokens=20))
            await eventually(lambda: asked.done() or len(silent.received) == received, "a worker has it")  # noqa: B023
            if silent.behaviour is Exchange.until_client_gone:
                one.pool.fail_unanswered()
            assert (await asked).status_code == 200

    async def reports(exchange: Exchange) -> None:
        await exchange.whole(200, {"choices": []}, x_fairlead_usage="400 10", x_fairlead_cpu_ms="1")

    await ask_until(1)
    silent.behaviour = reports
    await eventually(lambda: one.usable, "it is ready again")
    await ask_until(3)
    expected = 20_000 - 410 * requests - 250
    await eventually(lambda: expected <= level(router) < expected + 5, "of two reports of 250 tokens, the first was paid for")


async def test_uncomputed_requests_pay_for_their_reading_and_truncated_ones_are_estimated(fleet: Fleet, tmp_path: Path) -> None:
    router, worker = await guarded(fleet, tmp_path, SLOW)

    async def refuses(exchange: Exchange) -> None:
        await exchange.whole(400, {"error": {"message": "no"}})

    worker.behaviour = refuses
    assert (await ask(router, ANNA)).status_code == 400
    await eventually(lambda: 865 < level(router) <= 876, "its forwarding costs 0.5 ms, and its expected answer nothing")

    async def endless(exchange: Exchange) -> None:
        await exchange.head()
        for _ in range(100):
            await exchange.event("word")
        await exchange.until_client_gone()

    worker.behaviour = endless
    body = {"prompt": "x" * 40, "stream": True, "max_tokens": 4000}
    async with router.client.stream("POST", "/v1/completions", json=body, headers={"authorization": f"Bearer {ANNA}"}) as answer:
        got = b""
        async for piece in answer.aiter_raw():
            got += piece
            if got.count(b"word") == 100:
                break
    await eventually(lambda: 675 < level(router) <= 776, "the events that came were charged")


@pytest.mark.parametrize("runtime", ["", "vllm"])
async def test_a_client_that_leaves_before_its_answer_pays_for_its_reading(fleet: Fleet, tmp_path: Path, runtime: str) -> None:
    """A worker reports what it computed with the tenant's next answer. An agent does not, so there the expected tokens stay charged."""
    router, worker = await guarded(fleet, tmp_path, SLOW)
    assert (await ask(router, ANNA, max_tokens=1)).status_code == 200
    for one in router.table:
        one.runtime = runtime
    worker.behaviour = Exchange.until_client_gone
    before, sent = level(router), len(worker.received)
    asked = asyncio.create_task(ask(router, ANNA, "word " * 100, max_tokens=600))
    await eventually(lambda: len(worker.received) > sent, "the worker has it")
    expected = before - level(router)
    asked.cancel()
    await eventually(lambda: not router.server._running_tasks(), "it has ended")
    paid = before - level(router) - LEFT_PRICE
    if runtime:
        assert paid == pytest.approx(expected, abs=50)
    else:
        assert 100 / 4 < paid < expected / 4


RICH = {"anna": {"tokensPerMinute": 60, "burstTokens": 200_000}, "boris": {}}


@pytest.mark.parametrize("prompt", ["word " * 10_000, "word " * 100_000], ids=["in a thread", "in a process"])
async def test_a_refused_request_pays_for_its_reading(fleet: Fleet, tmp_path: Path, prompt: str) -> None:
    """A tokenized token costs a quarter of a token. In a parser process, the CPU time counts. It does not matter who refuses."""
    router, worker = await guarded(fleet, tmp_path, RICH)
    worker.behaviour = reports_usage(len(prompt), 10)
    assert (await ask(router, ANNA, "hello", max_tokens=1)).status_code == 200
    await eventually(lambda: level(router) < 200_000, "it is settled")
    router.server.router.handler._accounts._accounts["anna"].level = 200_000

    async def refuses(exchange: Exchange) -> None:
        await exchange.whole(400, {"error": {"message": "no"}})

    worker.behaviour = refuses
    assert (await ask(router, ANNA, prompt)).status_code == 400
    await eventually(lambda: level(router) <= 200_000 - 250, "what the reading cost is not given back")
    if len(prompt) < LARGE:
        price = len(prompt) / 4
        await eventually(lambda: price <= 200_000 - level(router) < 4 * price, "the tokens were computed in vain")
    before, price = level(router), 200_000 - level(router)
    assert (await ask(router, ANNA, prompt, model="nobody")).status_code == 404
    assert 0 < before - level(router) < price, "nothing was tokenized"


async def test_a_request_that_the_router_refuses_pays_for_its_handling(fleet: Fleet, tmp_path: Path) -> None:
    router, _ = await guarded(fleet, tmp_path, SLOW)
    for number in range(1, 5):
        assert (await ask(router, ANNA, model="nobody")).status_code == 404
        await eventually(lambda number=number: 25 * number <= 1000 - level(router) < 27 * number, "0.1 ms are 25 tokens")


@pytest.mark.parametrize("path", ["/v1/files", f"/v1/responses/resp_{'0' * 32}", "/docs"])
async def test_a_request_without_a_prompt_has_a_price_and_is_refused_in_deep_debt(fleet: Fleet, tmp_path: Path, path: str) -> None:
    (tmp_path / "secret").write_text("0123456789abcdef")
    batch = await fleet.worker()
    router, worker = await guarded(fleet, tmp_path, SLOW, batch_url=f"http://{batch.address}", batch_secret_file=str(tmp_path / "secret"))

    async def answers(exchange: Exchange) -> None:
        await exchange.whole(200, {})

    batch.behaviour = worker.behaviour = answers
    statuses = []
    for _ in range(20):
        before = len(batch.received) + len(worker.received)
        statuses.append((await router.client.get(path, headers=bearer(ANNA))).status_code)
        assert len(batch.received) + len(worker.received) - before == (statuses[-1] == 200)
    assert statuses == [200] * 17 + [429] * 3, "125 tokens each: the last one begins with a debt of 1,000"
    assert (await router.client.get(path, headers=bearer(BORIS))).status_code == 200


async def test_a_body_that_is_not_needed_is_paid_and_not_received_in_deep_debt(fleet: Fleet, tmp_path: Path) -> None:
    router, worker = await guarded(fleet, tmp_path, SLOW)

    async def answers(exchange: Exchange) -> None:
        await exchange.whole(200, {})

    worker.behaviour = answers
    path, body = f"/v1/responses/resp_{'0' * 32}/cancel", b" " * 4_000_000
    assert (await router.client.post(path, content=body, headers=bearer(ANNA))).status_code == 200
    price = price_of_cpu(len(body), 0.0)
    assert price + 120 < 1000 - level(router) < price + 130, "beside the 125 tokens of each"
    assert (await router.client.post(path, content=body, headers=bearer(ANNA))).status_code == 200
    before = level(router)
    assert before < -1000
    assert (await router.client.post(path, content=body, headers=bearer(ANNA))).status_code == 429
    assert before - level(router) < 1, "a refusal that reads nothing costs nothing"


@pytest.mark.parametrize(("method", "size", "milliseconds"), [("GET", 8_000_000, 0), ("POST", 4_000_000, 0), ("GET", 0, 400)])
async def test_a_request_of_the_batch_server_pays_for_its_bytes_and_what_is_reported(
    fleet: Fleet, tmp_path: Path, method: str, size: int, milliseconds: int
) -> None:
    (tmp_path / "secret").write_text("0123456789abcdef")
    batch = await fleet.worker()
    router, _ = await guarded(fleet, tmp_path, RICH, batch_url=f"http://{batch.address}", batch_secret_file=str(tmp_path / "secret"))
    sent, received = (size, 0) if method == "POST" else (0, size)

    async def answers(exchange: Exchange) -> None:
        await exchange.whole(200, {"x": "x" * received}, x_fairlead_cpu_ms=str(milliseconds))

    batch.behaviour = answers
    answer = await router.client.request(method, "/v1/files", content=b"x" * sent, headers={"authorization": f"Bearer {ANNA}"})
    assert answer.status_code == 200 and "x-fairlead-cpu-ms" not in answer.headers
    bought = UPLOADED * sent + DOWNLOADED * received + 1000 * milliseconds
    price = (bought + (STORED if method == "POST" else FORWARDED)) / MICROSECONDS_A_TOKEN
    await eventually(lambda: price - 60 <= 200_000 - level(router) < 1.1 * price + 60, "a token refills each second")


async def test_a_body_in_tiny_chunks_pays_for_each(fleet: Fleet, tmp_path: Path) -> None:
    """Parsing costs by the chunk: 25,000 chunks of 8 bytes take 11 ms of the event loop."""
    router, worker = await guarded(fleet, tmp_path, RICH)
    body = json.dumps({"prompt": "x", "user": 5, "padding": "x" * 80_000}).encode()

    async def refuses(exchange: Exchange) -> None:
        await exchange.whole(400, {"error": {"message": "no"}})

    async def chunks(size: int) -> AsyncIterator[bytes]:
        for at in range(0, len(body), size):
            yield body[at : at + size]

    assert (await ask(router, ANNA)).status_code == 200
    worker.behaviour = refuses
    spent = []
    for size in (len(body), 8):
        before = level(router)
        answer = await router.client.post("/v1/completions", content=chunks(size), headers={"authorization": f"Bearer {ANNA}"})
        assert answer.status_code == 400
        spent.append(before - level(router))
    assert spent[1] - spent[0] > 0.9 * len(body) / 8 * PIECE / MICROSECONDS_A_TOKEN


async def test_a_body_that_is_cut_off_pays_for_what_came(fleet: Fleet, tmp_path: Path) -> None:
    router, _ = await guarded(fleet, tmp_path, RICH)
    assert (await ask(router, ANNA)).status_code == 200
    before, size = level(router), 4 << 20
    _, writer = await asyncio.open_connection("127.0.0.1", router.port)
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {ANNA}\r\ncontent-length: {size + 1}\r\n\r\n"
    writer.write(head.encode() + b" " * size)
    await writer.drain()
    writer.close()
    least = price_of_cpu(size, 0.0) / 2
    await eventually(lambda: before - level(router) > least, "it is paid for")


async def test_a_request_as_large_as_the_bucket_is_admitted_although_its_reading_is_paid_first(fleet: Fleet, tmp_path: Path) -> None:
    router, worker = await guarded(fleet, tmp_path, SLOW)
    worker.behaviour = reports_usage(5000, 10)
    assert (await ask(router, ANNA, "word " * 1000)).status_code == 200
    await eventually(lambda: -4015 <= level(router) <= -4000, "the usage is charged once, with the price of reading in it")


@pytest.mark.parametrize(("status", "headers"), [(400, {}), (429, {"x_fairlead_retry": "other", "retry_after": "1"})])
async def test_the_cpu_time_that_a_worker_reports_is_charged(fleet: Fleet, tmp_path: Path, status: int, headers: dict[str, str]) -> None:
    """A worker with unreported time of earlier requests refuses the next one."""
    router, worker = await guarded(fleet, tmp_path, RICH)

    async def checks(exchange: Exchange) -> None:
        await exchange.whole(status, {"error": {"message": "no"}}, x_fairlead_cpu_ms="200", **headers)

    worker.behaviour = checks
    assert (await ask(router, ANNA)).status_code == status
    await eventually(lambda: 149_900 <= level(router) <= 150_001, "200 ms are 50,000 tokens")


async def test_an_empty_bucket_of_one_tenant_is_shared_by_all_routers(fleet: Fleet, tmp_path: Path) -> None:
    with RedisServer() as redis:
        path = tmp_path / "keys.yaml"
        path.write_text(key_file(SLOW))
        worker = await fleet.worker(behaviour=reports_usage(400, 400))
        settings = {"api_keys_file": str(path), "redis_url": redis.url, "policy": "LeastLoad"}
        one, two = [await fleet.router(worker, **settings) for _ in range(2)]
        accounts = [router.server.router.handler._accounts for router in (one, two)]
        await eventually(lambda: all(one.is_shared and one._replicas == 2 for one in accounts), "both share")
        assert (await ask(one, ANNA, max_tokens=1)).status_code == 200
        assert (await ask(two, ANNA, max_tokens=1)).status_code in (200, 429)  # the router may not know it yet
        await eventually(lambda: accounts[1].of(accounts[1]._accounts["anna"].tenant).refill() < 300, "the other router knows")
        assert (await ask(two, ANNA, "x" * 4 * 400)).status_code == 429
        redis.stop()
        await eventually(lambda: not accounts[0].is_shared and not accounts[1].is_shared, "both noticed")
        assert accounts[0]._replicas == 2 and level(one) <= 500, "each router continues with its half"
        assert (await ask(one, BORIS)).status_code == 200


def test_a_bucket_refills_to_its_limit_and_admits_a_request_larger_than_it() -> None:
    now = [0.0]
    account = Account(Tenant("t", rate=10, burst=100), lambda: 1.0, lambda: now[0])
    account.check(5000)  # full: the bucket goes into debt
    account.use(5000)
    now[0] = 100.0
    with pytest.raises(Exception, match="Try again in 391 s"):
        account.check(10)
    now[0] = 491.0
    account.check(10)
    now[0] = 1e6
    assert account.refill() == 100
    account.use(30)
    account.use(-5)
    assert account.refill() == 75


def test_two_routers_together_hold_a_tenants_rate_over_time() -> None:
    """While Redis is down each router has its share: together they grant what the tenant may have."""
    now, given = [0.0], 0.0
    accounts = [Account(Tenant("t", rate=100, burst=100), lambda: 0.5, lambda: now[0]) for _ in range(2)]
    for _ in range(10_000):
        now[0] += 0.01
        for account in accounts:
            try:
                account.check(7)
            except Exception:
                continue
            account.use(7)
            given += 7
    assert 0.97 * 100 * now[0] <= given <= 100 * now[0] + 100


@pytest.mark.parametrize("cut", range(0, 60, 7))
def test_usage_is_read_wherever_the_stream_is_split(cut: int) -> None:
    stream = b'data: {"text": "a"}\n\ndata: {"text": ": usage 9 9\\n\\n"}\n\n: usage 12 345\n\ndata: [DONE]\n\n'
    meter = UsageMeter(1)
    for piece in (stream[: cut + 30], stream[cut + 30 :]):
        meter.feed(piece)
    assert (meter.prompt, meter.output, meter.is_exact) == (12, 345, True)


@pytest.fixture(autouse=True)
def quick_sync(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("fairlead_router.tenancy.quota.SYNC_SECONDS", 0.05)
    monkeypatch.setattr("fairlead_router.tenancy.quota.HEARTBEAT_SECONDS", 0.5)
    yield


async def test_a_tenant_in_debt_is_refused_before_its_body_is_read(fleet: Fleet, tmp_path: Path) -> None:
    router, worker = await guarded(fleet, tmp_path, SLOW)
    worker.behaviour = reports_usage(900, 900)
    assert (await ask(router, ANNA, max_tokens=1)).status_code == 200
    reader, writer = await asyncio.open_connection("127.0.0.1", router.port)
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {ANNA}\r\ncontent-length: 1000000\r\n\r\n"
    writer.write(head.encode())  # nothing of the body
    assert b" 429 " in await asyncio.wait_for(reader.readline(), 5)
    writer.close()


async def test_a_charge_whose_reply_was_lost_is_applied_once() -> None:
    """Redis applied the call and the reply was lost: the router repeats it with the same number."""
    with RedisServer() as redis:
        scripts = Scripts(redis.url, "tests/quota", timeout=5.0)
        accounts = Accounts(scripts, 1, Metrics(WorkerTable()).task_failures)
        account = accounts.of(Tenant("anna", rate=0.001, burst=1000.0))
        call, lost = scripts.call, [True]

        async def answers(name: str, *args: bytes | str | int | float) -> list[Any]:
            reply = await call(name, *args)
            if lost.pop() if lost else False:
                raise TimeoutError
            return reply

        scripts.call = answers  # type: ignore[method-assign]
        account.use(100)
        with pytest.raises(TimeoutError):
            await accounts._sync(scripts, [account])
        account.use(10)
        await accounts._sync(scripts, [account])
        assert account.refill() == pytest.approx(890, abs=0.1) and account.unreported == 10
        await accounts._sync(scripts, [account])
        assert account.refill() == pytest.approx(890, abs=0.1) and account.unreported == 0
        await accounts.close()
