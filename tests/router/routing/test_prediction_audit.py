"""Predicted against actual cached tokens: the metrics, and the resync of a worker with a sustained error."""

import asyncio
import uuid
from collections.abc import Iterator

import pytest
from tests.router.harness import Fleet, eventually
from tests.servers.redis_server import RedisServer

from fairlead_index.changes import Changes, pack
from fairlead_index.hashing import block_hashes
from fairlead_index.reader import IndexReader
from fairlead_index.redis.scripts import Scripts
from fairlead_index.worker_load import WorkerCard
from fairlead_index.writer import IndexWriter
from fairlead_router.fleet.adapters import Adapter
from fairlead_router.fleet.workers import Worker, WorkerTable
from fairlead_router.metrics import Metrics
from fairlead_router.routing import prediction_audit
from fairlead_router.routing.policies import Choice, RoutingRequest
from fairlead_router.routing.prediction_audit import MIN_ANSWERS, PredictionAudit

HASHES = block_hashes(7, range(640), 16)


@pytest.fixture
def redis() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


REQUEST = RoutingRequest(640, HASHES)


class AuditHarness:
    """An audit whose index holds `held` tokens and grants every resync."""

    def __init__(self) -> None:
        self.held, self.recalled = 0, list[str]()
        table = WorkerTable()
        table.set_addresses(["10.0.0.1:1"])
        self.worker = next(iter(table))
        self.audit = PredictionAudit(Metrics(table), self._held, self._recall)

    async def _held(self, wanted: RoutingRequest, worker: Worker) -> int:
        return self.held

    async def _recall(self, address: str) -> bool:
        self.recalled.append(address)
        return True

    async def answers(self, predicted: int, cached: int, count: int = MIN_ANSWERS, wanted: RoutingRequest = REQUEST) -> None:
        for _ in range(count):
            self.audit.record_answer(wanted, Choice(self.worker, predicted), cached)
            await asyncio.gather(*self.audit._tasks)
        await asyncio.gather(*self.audit._tasks)


async def test_an_error_below_one_block_is_ignored_and_causes_no_resync() -> None:
    harness = AuditHarness()
    await harness.answers(predicted=320, cached=332, count=40)
    await harness.answers(predicted=320, cached=310, count=40)
    assert harness.worker.prediction_error.to_dict() == {"answers": 80, "over": 0.0, "under": 0.0, "recalls": 0} and not harness.recalled


async def test_a_prediction_without_redis_is_no_error_of_the_index() -> None:
    harness = AuditHarness()
    for _ in range(2 * MIN_ANSWERS):
        harness.audit.record_answer(REQUEST, Choice(harness.worker, 640, is_outdated=True), 0)
    assert not harness.audit._tasks and not harness.worker.prediction_error.answers


async def test_what_the_router_expected_beyond_the_index_is_no_error_of_the_index() -> None:
    harness = AuditHarness()
    for _ in range(2 * MIN_ANSWERS):
        harness.audit.record_answer(REQUEST, Choice(harness.worker, 320, in_flight=320), 0)
    assert harness.worker.prediction_error.over == 0 and not harness.recalled
    for _ in range(2 * MIN_ANSWERS):
        harness.audit.record_answer(REQUEST, Choice(harness.worker, 640, in_flight=320), 0)
    await asyncio.gather(*harness.audit._tasks)
    assert harness.worker.prediction_error.over > 0.4 or harness.recalled, "the index showed 320 tokens that the worker did not hold"


async def test_another_adapter_under_the_same_name_is_no_error_of_the_index() -> None:
    """While a rollout replaces an adapter, prompts are hashed with the digest that most workers have."""
    harness = AuditHarness()
    harness.worker.adapters = {"sql": Adapter("new")}
    await harness.answers(predicted=0, cached=624, wanted=RoutingRequest(640, HASHES, model="sql", adapter="old"))
    assert not harness.recalled and not harness.worker.prediction_error.answers
    await harness.answers(predicted=0, cached=624, wanted=RoutingRequest(640, HASHES, model="sql", adapter="new"))
    assert harness.recalled


async def test_sustained_overprediction_causes_one_resync() -> None:
    harness = AuditHarness()
    await harness.answers(predicted=320, cached=0, count=MIN_ANSWERS - 1)
    assert not harness.recalled and harness.worker.prediction_error.over == 0.5
    await harness.answers(predicted=320, cached=0, count=60)
    assert harness.recalled == ["10.0.0.1:1"]  # further errors are ignored until the resync has had time
    assert harness.worker.prediction_error.recalls == 1


async def test_underprediction_counts_only_if_the_index_still_does_not_know_the_blocks() -> None:
    harness = AuditHarness()
    harness.held = 640  # blocks of a prompt that was being computed when its followers were routed
    await harness.answers(predicted=0, cached=624, count=60)
    assert not harness.recalled and harness.worker.prediction_error.under == 0
    harness.held = 0
    await harness.answers(predicted=0, cached=624, count=60)
    assert harness.recalled == ["10.0.0.1:1"]


async def test_a_new_incarnation_of_a_worker_starts_without_errors() -> None:
    harness = AuditHarness()
    await harness.answers(predicted=320, cached=0, count=MIN_ANSWERS - 1)
    harness.worker.generation += 1
    await harness.answers(predicted=320, cached=0, count=MIN_ANSWERS - 1)
    assert not harness.recalled


async def test_resyncs_are_granted_one_at_a_time_and_repair_the_index(redis: RedisServer) -> None:
    namespace = f"tests/{uuid.uuid4().hex[:8]}"
    writers = [IndexWriter(redis.url, namespace, WorkerCard(pod, f"{pod}:1", 16), lease_seconds=1.0) for pod in "ab"]
    readers = [IndexReader(redis.url, namespace, deadline=2.0) for _ in range(4)]
    scripts = Scripts(redis.url, namespace, timeout=2)

    async def shows(blocks: int) -> bool:
        return await readers[0].match(HASHES) == {"a:1": 16 * blocks, "b:1": 16 * 40}

    try:
        for writer in writers:
            writer.start()
            writer.store(HASHES)
        await eventually(lambda: shows(40), "both are in the index")
        me = writers[0]._current
        assert me is not None
        held = Changes()
        held.restart()
        held.store(HASHES)
        held.take(len(HASHES))
        held.remove(HASHES[10:][::-1])
        await scripts.call("apply", me.slot, me.epoch, me.sequence + 1, *pack(held.take(len(HASHES))))  # make the index wrong
        me.sequence += 1
        assert await shows(10)
        granted = await asyncio.gather(*(reader.recall(address) for reader in readers for address in ("a:1", "b:1")))
        assert sum(granted) == 1 and granted[0]
        await eventually(lambda: shows(40), "it resynced", 10)
        assert writers[0].stats.joins == 2 and writers[1].stats.joins == 1
        assert not await readers[1].recall("a:1") and not await readers[1].recall("nobody:1")
    finally:
        await asyncio.gather(*(writer.leave() for writer in writers), *(reader.close() for reader in readers), scripts.close())


@pytest.mark.parametrize("mode", ["remote", "mirror"])
async def test_a_worker_that_silently_lost_its_cache_is_detected(
    fleet: Fleet, redis: RedisServer, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prediction_audit, "RECALL_INTERVAL_SECONDS", 0.1)  # on a busy machine Redis misses the deadline of a recall
    worker = await fleet.worker(redis=(redis.url, "tests/audit"))
    await eventually(lambda: worker.joined, "it joined")
    router = await fleet.router(worker, redis_url=redis.url, index_namespace="tests/audit", index_mode=mode)
    prompts = [f"{number} of many things that were said before " * 10 for number in range(MIN_ANSWERS + 4)]
    for prompt in prompts:
        await router.complete(prompt)
    assert worker._index is not None
    await eventually(lambda: worker._index.stats.pending == 0, "all is told")
    index = worker._index
    worker.tells = False
    await asyncio.sleep(0.5)  # The router polls the worker meanwhile and must still know it by its incarnation.
    for prompt in prompts[1:]:
        worker._cache.clear()
        await router.complete(prompt)

    async def recalled() -> bool:
        if not await router.metric("fairlead_router_recalls_total"):
            worker._cache.clear()
            await router.complete(prompts[0])
        return index.stats.joins == 2

    await eventually(recalled, "it was recalled", 30)
    (shown,) = (await router.client.get("/fairlead/workers")).json()["workers"]
    assert shown["prediction"]["recalls"] == 1
