"""The page of the hottest prefixes: a nested tree with the pods that hold each one, of the caller's own requests only."""

import re
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest
from tests.router.console.test_console import HOSTILE
from tests.router.console.test_prefix_tree import chain
from tests.router.harness import Fleet, RunningRouter, eventually
from tests.router.tenancy.test_access import ANNA, BORIS, ask, bearer, guarded
from tests.servers.redis_server import RedisServer

from fairlead_index.reader import IndexUnavailable
from fairlead_router.console.prefixes import MAX_HOLDERS, MAX_LOOKUPS, MAX_NODES, describe_prefixes
from fairlead_router.routing.prefix_aware import PrefixAware

SHARED = "You are a helpful assistant. Answer in one word.".ljust(64)
"""Four blocks of 16 tokens: the stand-in has one token for each byte."""


@pytest.fixture(scope="module")
def redis() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


async def page(router: RunningRouter, **headers: str) -> str:
    answer = await router.client.get("/ui/prefixes", headers=headers)
    assert answer.status_code == 200
    return answer.text


def summaries(text: str) -> list[str]:
    return [re.sub("<.*?>", "", one) for one in re.findall("<summary>(.*?)</summary>", text)]


@pytest.mark.parametrize("mode", ["mirror", "remote"])
async def test_the_tree_has_the_shared_prefix_with_its_holders(fleet: Fleet, redis: RedisServer, mode: str) -> None:
    namespace = f"tests/{uuid.uuid4().hex[:8]}"
    workers = [await fleet.worker(redis=(redis.url, namespace), pod=f"{HOSTILE}{number}") for number in range(2)]
    router = await fleet.router(*workers, redis_url=redis.url, index_namespace=namespace, index_mode=mode, console=True)
    policy = router.server.router.policy
    assert isinstance(policy, PrefixAware)
    await eventually(lambda: all(worker.joined for worker in workers) and policy.read_mode == mode, "the index is read")
    for ending in ("a", "b", "c"):
        await router.complete(SHARED + 32 * ending)

    async def has_holders() -> bool:
        return all("1 holder" in one or "2 holders" in one for one in summaries(await page(router)))

    await eventually(has_holders, "the workers' blocks are in the index")
    text = await page(router)
    shared, *rest = summaries(text)
    assert "64 tokens, 3 requests (100 %)" in shared
    assert len(rest) == 3 and all("96 tokens, 1 request (33 %)" in one for one in rest)
    assert text.count("<details") == text.count("</details>") == 4
    assert "helpful" not in text and HOSTILE not in text and "&lt;script&gt;" in text


async def test_a_page_without_prefixes_or_without_an_index_says_so(fleet: Fleet) -> None:
    worker = await fleet.worker()
    router = await fleet.router(worker, console=True)
    assert "No prefixes yet" in await page(router)
    await router.complete("short")
    assert "No prefixes yet" in await page(router), "a prompt without a full block has no hash"
    await router.complete(SHARED)
    text = await page(router)
    assert (
        "Holders are unknown: this router reads no index." in text and "64 tokens, 1 request (100 %), holders unknown" in summaries(text)[0]
    )
    other = await fleet.router(worker, ready=1, console=True, policy="LeastLoad")
    await other.complete(SHARED)
    assert "policy LeastLoad computes no block hashes" in await page(other)


async def test_a_key_sees_the_prefixes_of_its_tenant_and_the_admin_port_all(fleet: Fleet, tmp_path: Path) -> None:
    router, _ = await guarded(fleet, tmp_path, console=True, admin_port=0)
    await ask(router, ANNA, SHARED)
    for _ in range(2):
        await ask(router, BORIS, SHARED)
    assert (await router.client.get("/ui/prefixes")).status_code == 401
    (anna,) = summaries(await page(router, **bearer(ANNA)))
    (boris,) = summaries(await page(router, **bearer(BORIS)))
    assert "1 request (100 %)" in anna and "2 requests (100 %)" in boris
    admin = await router.client.get(f"http://127.0.0.1:{router.server.admin_port}/ui/prefixes", headers=bearer(ANNA))
    assert len(summaries(admin.text)) == 2, "tenants' hashes have different salts"


async def test_the_page_and_its_questions_to_the_index_are_bounded() -> None:
    asked: list[Sequence[int]] = []

    async def look_up(hashes: Sequence[int]) -> Mapping[str, int]:
        asked.append(hashes)
        return {f"10.0.0.{number}": 16 * len(hashes) for number in range(500)}

    prompts = [chain(0, number, number) for number in range(300) for _ in range(2)]
    found = await describe_prefixes(prompts, look_up, 16, {})
    rows = found["rows"]
    assert len(rows) == MAX_NODES and len(asked) == MAX_LOOKUPS and rows[0].shown.hidden == 300 - (MAX_NODES - 1)
    assert rows[0].num_holders == 500 and len(rows[0].holders) == MAX_HOLDERS
    assert sum(row.holders is None for row in rows) == MAX_NODES - 1 - MAX_LOOKUPS


async def test_holders_are_unknown_with_a_reason_while_the_index_does_not_answer() -> None:
    async def look_up(hashes: Sequence[int]) -> Mapping[str, int]:
        raise IndexUnavailable("Redis does not answer")

    found = await describe_prefixes([chain(1)], look_up, 16, {})
    assert found["reason"] == "Redis does not answer" and found["rows"][0].holders is None
