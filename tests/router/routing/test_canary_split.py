"""Canary routing: the canary gets its weight of the conversations, failures fall back to the other side, and both are counted."""

import asyncio
import json
import math
import uuid
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.router.gateway import gateway
from tests.router.harness import Fleet, RunningRouter, eventually
from tests.router.prompt_format import make_format
from tests.router.stand_in_worker import Exchange, StandIn
from tests.servers.redis_server import RedisServer

from fairlead_common.canary_split import Durations, Split
from fairlead_router.request.body import conversation_of
from fairlead_router.routing.canary_split import TOLERANCE, belongs_to_canary

CANARY = {"canary": "new"}


def write_split(folder: Path, weight: int | None, revision: str = "new") -> str:
    """Write the split file as the kubelet renews it. Returns its path."""
    file, fresh = folder / "split.json", folder / "split.fresh"
    fresh.write_text("{}" if weight is None else json.dumps({"revision": revision, "weight": weight}))
    fresh.replace(file)
    return str(file)


async def report(router: RunningRouter) -> dict[str, Any]:
    answer: dict[str, Any] = (await router.client.get("/fairlead/split")).json()
    return answer


async def fails(exchange: Exchange) -> None:
    await exchange.whole(500, {"error": {"message": "a bad revision"}})


async def breaks_off(exchange: Exchange) -> None:
    await exchange.head()
    await exchange.event("one")
    exchange.die()


async def streams_an_error(exchange: Exchange) -> None:
    await exchange.head()
    await exchange.event("one")
    await exchange.chunk(b'data: {"error": {"message": "the engine has ended"}}\n\n')
    await exchange.chunk(b"")


def conversation(number: int, turns: int) -> list[dict[str, str]]:
    """Return a chat that grows; all chats begin with the same long instructions."""
    chat = [{"role": "system", "content": "Be brief. " * 50}]
    for turn in range(turns):
        chat += [{"role": "user", "content": f"{number}: question {turn}"}, {"role": "assistant", "content": f"answer {turn}"}]
    return chat[:-1]


async def test_a_failing_canary_gets_its_weight_and_no_client_sees_it(fleet: Fleet, tmp_path: Path) -> None:
    stable, canary = await fleet.worker(), await fleet.worker(load=CANARY, behaviour=fails)
    router = await fleet.router(stable, canary, canary_file=write_split(tmp_path, 20), policy="RoundRobin")
    answers = [await router.complete(f"prompt {number}") for number in range(200)]
    assert Counter(answer.status_code for answer in answers) == {200: 200}
    share = len(canary.received)
    assert abs(share - 40) <= TOLERANCE + 4 * math.sqrt(200 * 0.2 * 0.8) + 1
    assert len(stable.received) == 200, "requests that the canary failed went to the other side"
    seen = await report(router)
    assert seen["revision"] == "new" and seen["weight"] == 20
    assert seen["canary"] == {"requests": share, "errors": share, "ttft": {"buckets": {}}}
    assert seen["stable"]["requests"] == 200 and seen["stable"]["errors"] == 0
    assert sum(seen["stable"]["ttft"]["buckets"].values()) == 200
    assert await router.metric("fairlead_router_retries_total") == share
    assert await router.metric("fairlead_router_side_errors_total") == share and await router.metric("fairlead_router_canary_weight") == 20


async def test_a_conversation_stays_on_its_side_at_every_router_and_as_the_weight_grows(fleet: Fleet, tmp_path: Path) -> None:
    stable, canary = await fleet.worker(), await fleet.worker(load=CANARY)
    file = write_split(tmp_path, 30)
    routers = [await fleet.router(stable, canary, canary_file=file) for _ in range(2)]

    async def side(number: int, turns: int, router: RunningRouter) -> str:
        answer = await router.client.post("/v1/chat/completions", json={"model": "stand-in", "messages": conversation(number, turns)})
        return answer.headers["x-fairlead-pod"]

    first = [await side(number, 1, routers[0]) for number in range(30)]
    assert set(first) == {stable.pod, canary.pod}
    for turns, router in ((2, routers[1]), (3, routers[0])):
        assert [await side(number, turns, router) for number in range(30)] == first
    write_split(tmp_path, 60)
    await eventually(
        lambda: all(router.server.router.canary.report().weight == 60 for router in routers if router.server.router.canary), "told"
    )
    later = [await side(number, 4, routers[1]) for number in range(30)]
    assert all(now == canary.pod for before, now in zip(first, later, strict=True) if before == canary.pod)
    assert later.count(canary.pod) > first.count(canary.pod)


async def test_a_request_that_one_canary_failed_does_not_go_to_another_canary(fleet: Fleet, tmp_path: Path) -> None:
    """This holds even when the failed worker has left the table, which then no longer says that the request was with it."""
    stable, listed = await fleet.worker(), fleet.list_in_file()
    router = await fleet.router(ready=0, workers=listed, canary_file=write_split(tmp_path, 100), policy="RoundRobin")
    canaries: list[StandIn] = []

    async def leaves_and_dies(exchange: Exchange) -> None:
        fleet.list_in_file(stable, *[one for one in canaries if one is not exchange.worker])
        await eventually(lambda: len(list(router.table)) == 2, "the router has forgotten one of three")
        exchange.die()

    canaries += [await fleet.worker(load=CANARY, behaviour=leaves_and_dies) for _ in range(2)]
    fleet.list_in_file(stable, *canaries)
    await router.usable(3)
    answer = await router.complete("to a canary")
    assert answer.status_code == 200 and answer.headers["x-fairlead-pod"] == stable.pod
    received = sorted(len(one.received) for one in canaries)
    assert received[0] == 0 and received[1] in (1, 2), "at most one retry, where a kept connection may have ended before the request came"


async def test_a_session_is_one_conversation_and_one_repeated_prompt_is_still_split(fleet: Fleet, tmp_path: Path) -> None:
    stable, canary = await fleet.worker(), await fleet.worker(load=CANARY)
    router = await fleet.router(stable, canary, canary_file=write_split(tmp_path, 25))
    for session in range(10):
        pods = set()
        for number in range(3):
            body = {"model": "stand-in", "prompt": f"{number} of {session}"}
            pods.add(
                (await router.client.post("/v1/completions", json=body, headers={"x-session-id": f"s{session}"})).headers["x-fairlead-pod"]
            )
        assert len(pods) == 1
    before = len(canary.received)
    for _ in range(240):
        assert (await router.complete("the same")).status_code == 200
    assert abs(len(canary.received) - before - 60) <= 2 * (TOLERANCE + 4 * math.sqrt(270 * 0.25 * 0.75))


async def test_each_side_replaces_the_other_when_it_has_no_worker(fleet: Fleet, tmp_path: Path) -> None:
    stable, canary = await fleet.worker(), await fleet.worker(load=CANARY)
    router = await fleet.router(stable, canary, canary_file=write_split(tmp_path, 50), hold_timeout=0.5)
    canary.ready = False
    await router.usable(1)
    assert {(await router.complete(f"a{number}")).headers["x-fairlead-pod"] for number in range(10)} == {stable.pod}
    canary.ready, stable.ready = True, False
    await eventually(lambda: [worker.usable for worker in router.table if worker.canary] == [True], "the canary is back")
    await router.usable(1)
    assert {(await router.complete(f"b{number}")).headers["x-fairlead-pod"] for number in range(10)} == {canary.pod}
    canary.behaviour = fails
    assert (await router.complete("c")).status_code == 500, "without another worker, the canary's answer stands"


async def test_a_canary_without_a_weight_is_a_last_resort_and_a_new_weight_takes_effect(fleet: Fleet, tmp_path: Path) -> None:
    stable, canary = await fleet.worker(), await fleet.worker(load=CANARY)
    router = await fleet.router(stable, canary, canary_file=str(tmp_path / "split.json"))
    split = router.server.router.canary
    assert split is not None

    async def pods(name: str) -> set[str]:
        return {(await router.complete(f"{name}{number}")).headers["x-fairlead-pod"] for number in range(30)}

    assert await pods("none") == {stable.pod}
    write_split(tmp_path, 50)
    await eventually(lambda: split.report().weight == 50, "the weight is known")
    assert await pods("half") == {stable.pod, canary.pod}
    (tmp_path / "split.json").write_text("{broken")
    await asyncio.sleep(0)
    assert await pods("as before") == {stable.pod, canary.pod}
    write_split(tmp_path, 50, revision="newer")
    await eventually(lambda: split.report().revision == "newer", "another canary")
    assert split.report().canary.requests == 0, "a new revision starts a new count"
    assert await pods("of another revision") == {stable.pod}
    write_split(tmp_path, None)
    await eventually(lambda: not split.report().revision, "no canary")
    assert await pods("over") == {stable.pod}
    await stable.kill()
    assert (await router.complete("nobody else")).headers["x-fairlead-pod"] == canary.pod


@pytest.mark.parametrize("behaviour", [breaks_off, streams_an_error])
async def test_truncated_answers_count_as_errors_of_their_side(fleet: Fleet, tmp_path: Path, behaviour: Any) -> None:
    stable, canary = await fleet.worker(), await fleet.worker(load=CANARY, behaviour=behaviour)
    router = await fleet.router(stable, canary, canary_file=write_split(tmp_path, 50), poll_interval=0.02)
    for number in range(20):
        await router.complete(f"p{number}", stream=True)
    seen = await report(router)
    assert 0 < len(canary.received) == seen["canary"]["requests"] == seen["canary"]["errors"] and seen["stable"]["errors"] == 0
    assert sum(seen["canary"]["ttft"]["buckets"].values()) == len(canary.received)


@pytest.fixture
def redis() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


@pytest.mark.parametrize("mode", ["remote", "mirror"])
async def test_two_models_in_one_service_are_each_routed_by_their_own_blocks(
    fleet: Fleet, tmp_path: Path, redis: RedisServer, mode: str
) -> None:
    """Same names, other weights and other blocks: prompts are hashed in each side's own format, and no KV counts for the other side."""
    namespace = f"tests/{uuid.uuid4().hex[:8]}"
    other = make_format(revision="r2")
    other = type(other)(**{name: getattr(other, name) for name in other.__struct_fields__} | {"block_tokens": 32})
    stable = [await fleet.worker(redis=(redis.url, namespace)) for _ in range(2)]
    canary = [await fleet.worker(redis=(redis.url, namespace), load=CANARY, format=other) for _ in range(3)]
    index = {"redis_url": redis.url, "index_namespace": namespace, "index_mode": mode}
    router = await fleet.router(*stable, *canary, canary_file=write_split(tmp_path, 50), **index)
    await eventually(lambda: all(worker.joined for worker in (*stable, *canary)), "the workers joined the index")
    formats = router.server.router.formats
    assert formats.current is not None and formats.current.format.block_tokens == 16, "three canaries do not outvote two others"
    split = Split("new", 50)
    prompts = [f"{number} " * 200 for number in range(40)]
    of = {prompt: belongs_to_canary(conversation_of(None, prompt, ""), split) for prompt in prompts}
    chosen = [next(prompt for prompt in prompts if of[prompt] is on_canary) for on_canary in (True, False)]
    for prompt, side in zip(chosen, (canary, stable), strict=True):
        first = await router.complete(prompt)
        (holder,) = [worker for worker in (*stable, *canary) if worker.pod == first.headers["x-fairlead-pod"]]
        assert holder in side and holder.received[-1].tokens is not None, "it was tokenized for that side"
        await eventually(lambda side=side: _repeated(router, prompt, side), "the index leads back to where its blocks are")  # noqa: B023
    assert await router.metric("fairlead_router_recalls_total") == 0


async def _repeated(router: RunningRouter, prompt: str, side: list[StandIn]) -> bool:
    """Return whether the prompt went where its blocks were known. A repeat before the index knew may have taken them to a second pod."""
    again = await router.complete(prompt)
    assert again.status_code == 200 and again.headers["x-fairlead-pod"] in {worker.pod for worker in side}
    predicted = int(again.headers.get("x-fairlead-predicted-tokens", "0"))
    return 0 <= int(again.headers["x-fairlead-cached-tokens"]) - predicted <= 1 < predicted


def test_quantiles_are_close_to_the_measured_values() -> None:
    times = Durations()
    for milliseconds in range(1, 1001):
        times.add(milliseconds / 1000)
    more = Durations()
    more.include(times)
    more.add(0.0)
    assert more.count == 1001 and abs(more.quantile(0.5) / 0.5 - 1) < 0.1 and abs(more.quantile(0.9) / 0.9 - 1) < 0.1
    assert Durations().quantile(0.9) == 0.0


async def test_gateway_requests_are_counted_by_response_headers_and_never_fall_back_to_a_canary(fleet: Fleet, tmp_path: Path) -> None:
    stable, other, canary = await fleet.worker(), await fleet.worker(), await fleet.worker(load=CANARY)
    settings: dict[str, Any] = {"picker_port": 0, "picker_tls": "off", "policy": "RoundRobin"}
    router = await fleet.router(stable, other, canary, canary_file=write_split(tmp_path, 0), **settings)
    picker, split = router.server.router.picker, router.server.router.canary
    assert picker is not None and split is not None
    async with gateway(picker.port) as asking:

        async def asked(status: int, **said: str) -> list[str]:
            exchange = asking.exchange()
            await exchange.request("/v1/completions", json.dumps({"model": "stand-in", "prompt": uuid.uuid4().hex}).encode())
            endpoints, _ = await exchange.picked()
            await exchange.streamed()
            await exchange.respond(status, end=True, **said)
            await exchange.call.done_writing()
            return endpoints

        assert sorted(await asked(200, x_fairlead_pod=stable.pod)) == sorted([stable.address, other.address])
        write_split(tmp_path, 100)
        await eventually(lambda: split.report().weight == 100, "the router read it")
        assert (await asked(200, x_fairlead_pod=canary.pod))[0] == canary.address
        assert (await asked(500, x_fairlead_pod=canary.pod))[0] == canary.address
        assert (await asked(503))[0] == canary.address  # the gateway's own status: no worker answered
        seen = split.report()
        assert (seen.stable.requests, seen.stable.errors, seen.stable.ttft.count) == (1, 0, 1)
        assert (seen.canary.requests, seen.canary.errors, seen.canary.ttft.count) == (3, 2, 1)
