"""`POST /fairlead/score`: the workers for a prompt in the order in which the router would choose them, with each term."""

import random
import uuid
from collections.abc import Iterator
from typing import Any

import pytest
from tests.router.harness import Fleet, RunningRouter, eventually
from tests.servers.redis_server import RedisServer

from fairlead_router.routing.prefix_aware import PrefixAware


@pytest.fixture(scope="module")
def redis() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


async def score(router: RunningRouter, body: dict[str, Any]) -> dict[str, Any]:
    answer = await router.client.post("/fairlead/score", json=body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    for worker in found["workers"]:
        assert worker["score"] == pytest.approx(sum(worker["terms"].values())), "the terms are the score"
        assert worker["ttft"] == pytest.approx(sum(worker["terms"][name] for name in ("backlog", "reserved", "work", "step")))
    return found


@pytest.mark.parametrize("mode", ["remote", "mirror"])
async def test_the_first_worker_is_the_one_that_gets_the_request(fleet: Fleet, redis: RedisServer, mode: str) -> None:
    namespace, draw = f"tests/{uuid.uuid4().hex[:8]}", random.Random(7)
    loads = [{"prefill_rate": draw.choice([2000.0, 8000.0]), "waiting": draw.randrange(4), "step_seconds": 0.01 * n} for n in range(4)]
    workers = [await fleet.worker(redis=(redis.url, namespace), backlog=draw.randrange(20_000), load=load) for load in loads]
    router = await fleet.router(*workers, redis_url=redis.url, index_namespace=namespace, index_mode=mode)
    policy = router.server.router.policy
    assert isinstance(policy, PrefixAware)
    await eventually(lambda: all(worker.joined for worker in workers) and policy.read_mode == mode, "the index is read as wanted")

    async def has_loads() -> bool:
        found = await score(router, {"prompt": "x"})
        return len(found["workers"]) == 4 and all(worker["terms"]["backlog"] > 0 for worker in found["workers"])

    await eventually(has_loads, "the loads are known")
    for number in range(12):
        prompt = f"{draw.randrange(3)} " * draw.randrange(1, 400)
        expected = await score(router, {"prompt": prompt})
        assert expected["source"] == mode and expected["prompt_tokens"] == len(prompt)
        answer = await router.complete(f"{prompt}{number}")
        first = expected["workers"][0]
        assert first["pod"] == answer.headers["x-fairlead-pod"]
        assert not any(worker.backlog < 0 for worker in workers)

        async def is_over() -> bool:
            found = await score(router, {"prompt": "x"})
            return not any(worker["terms"]["reserved"] for worker in found["workers"])

        await eventually(is_over, "the reservation was released")


async def test_without_an_index_the_workers_own_loads_count(fleet: Fleet) -> None:
    router = await fleet.router(await fleet.worker(), await fleet.worker())
    found = await score(router, {"messages": [{"role": "user", "content": "hello"}]})
    assert found["source"] == "local" and len(found["workers"]) == 2
    assert min(worker["cached_tokens"] for worker in found["workers"]) == 0, "the prompt is expected at its home alone"


async def test_what_has_no_score_is_refused(fleet: Fleet) -> None:
    router = await fleet.router(await fleet.worker())
    assert (await router.client.get("/fairlead/score")).status_code == 405
    assert (await router.client.post("/fairlead/score", content=b"[]")).status_code == 400
    other = await fleet.router(*fleet.workers, policy="RoundRobin")
    refused = await other.client.post("/fairlead/score", json={"prompt": "x"})
    assert refused.status_code == 501 and "RoundRobin" in refused.json()["error"]["message"]
