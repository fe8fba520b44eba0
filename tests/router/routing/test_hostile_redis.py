"""Whatever Redis answers, a request is routed: over a socket, in each mode of reading the index."""

import logging
import struct
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from tests.router.harness import Fleet, eventually
from tests.router.tenancy.test_access import ANNA, ask, key_file
from tests.servers.hostile_redis import RAW, HostileRedis, encode, replies

from fairlead_router.routing.prefix_aware import PrefixAware

INCARNATION = "0102030405060708"
PROMPT = "a prompt that is longer than one block of sixteen tokens"


def examples(addresses: list[str], count: int) -> list[bytes]:
    """Return generated replies: hypothesis cannot draw while an event loop runs."""
    drawn: list[bytes] = []

    @settings(max_examples=count, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(replies(addresses, INCARNATION))
    def draw(reply: bytes) -> None:
        drawn.append(reply)

    draw()
    return [*RAW, *drawn]


@pytest.mark.parametrize("mode", ["remote", "mirror", "auto"])
async def test_whatever_redis_answers_a_request_is_routed(fleet: Fleet, mode: str, caplog: pytest.LogCaptureFixture) -> None:
    workers = [await fleet.worker(load={"incarnation": INCARNATION}) for _ in range(2)]
    reply = [b"*0\r\n"]
    async with HostileRedis(lambda: reply[0]) as redis:
        router = await fleet.router(*workers, redis_url=redis.url, index_mode=mode)
        policy = router.server.router.policy
        assert isinstance(policy, PrefixAware) and policy.lookup is not None
        for reply[0] in examples([worker.address for worker in workers], 150):
            policy.lookup.reader._backoff.reset()  # type: ignore[union-attr]  # else only the first bad reply would reach routing
            for body in ({"prompt": PROMPT}, {"prompt": "short"}):
                answer = await router.complete(**body)
                assert answer.status_code == 200, (reply[0], answer.text)
                assert answer.headers["x-fairlead-pod"] in ("pod-0", "pod-1")
        assert await router.metric("fairlead_router_task_failures_total") == 0
        if mode == "remote":
            assert await router.metric("fairlead_router_index_unavailable_total") > 0, "counted"
    told = [record for record in caplog.records if record.levelno >= logging.WARNING and "index" in record.getMessage()]
    assert not [record for record in caplog.records if record.exc_info], "a reply is no bug of ours"
    assert len([record for record in told if "ignored" not in record.getMessage()]) <= 3, "a line a minute of each reader"


async def test_a_holder_with_forged_figures_gets_sound_predictions(fleet: Fleet) -> None:
    worker = await fleet.worker(load={"incarnation": INCARNATION})
    reply = [b""]
    async with HostileRedis(lambda: reply[0]) as redis:
        router = await fleet.router(worker, redis_url=redis.url, index_mode="remote")
        for cached in (2**63 - 1, -(2**63), 10**6):
            reply[0] = encode([struct.pack("<q8s", cached, bytes.fromhex(INCARNATION)) + worker.address.encode()])
            answer = await router.complete(PROMPT)
            assert answer.status_code == 200
            assert 0 <= int(answer.headers.get("x-fairlead-predicted-tokens", 0)) <= len(PROMPT)
        await eventually(lambda: all(each.pending_tokens == 0 for each in router.table), "nothing stays pending")


@pytest.mark.parametrize("level", [b"nan", b"inf", b"-inf", b"1e300", b"x", b""])
async def test_a_forged_quota_is_no_answer(fleet: Fleet, tmp_path: Path, level: bytes) -> None:
    keys = tmp_path / "keys.yaml"
    keys.write_text(key_file({"anna": {"tokensPerMinute": 6000}}))
    async with HostileRedis(lambda: encode([1, level])) as redis:
        router = await fleet.router(await fleet.worker(), redis_url=redis.url, api_keys_file=str(keys), policy="LeastLoad")
        assert (await ask(router, ANNA)).status_code == 200
        before = redis.commands
        await eventually(lambda: redis.commands > before + 1, "the quotas were synchronised")
        assert (await ask(router, ANNA)).status_code == 200
        assert not router.server.router.handler._accounts.is_shared
