"""Background tasks of the router: each is restarted after an exception, which is logged and counted."""

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter
from tests.router.harness import Fleet, eventually
from tests.router.tenancy.test_access import ANNA, ask, key_file
from tests.servers.redis_server import RedisServer

from fairlead_common.http.connection_limiter import ConnectionLimiter
from fairlead_index.mirror.workers import FleetReader
from fairlead_router import supervision as background
from fairlead_router.file_follower import FileFollower
from fairlead_router.fleet.prompt_formats import PromptFormats
from fairlead_router.fleet.workers import WorkerTable
from fairlead_router.routing.prefix_aware import PrefixAware
from fairlead_router.serving.admission import Admission
from fairlead_router.supervision import supervise
from fairlead_router.tenancy.quota import Accounts


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "BACKOFF_SECONDS", (0.01, 0.04))


@pytest.fixture
def failures() -> Counter:
    return Counter("failures", "of tasks", ["task"], registry=CollectorRegistry())


def counted(failures: Counter) -> dict[str, float]:
    """Return the failures of the tasks that failed."""
    samples = [one for family in failures.collect() for one in family.samples if one.name.endswith("_total")]
    return {one.labels["task"]: one.value for one in samples if one.value}


async def test_a_failed_task_is_logged_counted_and_restarted_until_it_returns(failures: Counter, caplog: pytest.LogCaptureFixture) -> None:
    turns = 0

    async def work() -> None:
        nonlocal turns
        turns += 1
        if turns < 4:
            raise RuntimeError(f"fault {turns}")

    await asyncio.wait_for(supervise("a loop", work, failures), 10)
    assert turns == 4 and counted(failures) == {"a loop": 3}
    assert [record.levelname for record in caplog.records] == ["ERROR"] * 3
    assert all("'a loop' failed" in record.message and record.exc_info for record in caplog.records)


async def test_supervision_ends_when_it_is_cancelled(failures: Counter) -> None:
    running = asyncio.Event()

    async def work() -> None:
        running.set()
        await asyncio.Event().wait()

    task = supervise("a loop", work, failures)
    await asyncio.wait_for(running.wait(), 10)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(task, 10)
    assert counted(failures) == {}


async def test_supervision_ends_when_it_is_cancelled_during_its_backoff(failures: Counter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "BACKOFF_SECONDS", (3600.0, 3600.0))

    async def work() -> None:
        raise RuntimeError("a fault")

    task = supervise("a loop", work, failures)
    await eventually(lambda: bool(counted(failures)), "it failed")
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(task, 10)


class FailsOnce:
    """Replaces a method: its first call within the task of that name (None: any task) raises, and all later calls run the real method."""

    def __init__(self, real: Callable[..., Any], task: str | None) -> None:
        self.calls = 0
        self._real, self._task = real, task

    def __get__(self, owner: Any, kind: Any = None) -> Callable[..., Any]:
        def call(*args: Any, **named: Any) -> Any:
            if self._task is None or ((task := asyncio.current_task()) is not None and task.get_name() == self._task):
                self.calls += 1
                if self.calls == 1:
                    raise RuntimeError("a fault of ours")
            return self._real(owner, *args, **named)

        return call


@pytest.fixture
def redis() -> Iterator[RedisServer]:
    with RedisServer() as running:
        yield running


async def test_every_background_task_of_a_router_survives_an_exception(
    fleet: Fleet, redis: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Put a fault into what each loop calls, once the router serves."""
    split, keys = tmp_path / "split.json", tmp_path / "keys.yaml"
    keys.write_text(key_file({"anna": {"tokensPerMinute": 60_000, "burstTokens": 10_000}}))
    split.write_text("{}")
    worker = await fleet.worker(redis=(redis.url, "tests/background"))
    router = await fleet.router(
        worker,
        redis_url=redis.url,
        index_namespace="tests/background",
        index_mode="auto",
        api_keys_file=str(keys),
        canary_file=str(split),
    )
    policy = router.server.router.policy
    assert isinstance(policy, PrefixAware)
    await eventually(lambda: policy.read_mode == "mirror", "the index is read as wanted")
    faults = {
        "token quotas": FailsOnce(Accounts._sync, "token quotas"),
        "key file": FailsOnce(FileFollower.reload, None),  # in a thread
        "split file": FailsOnce(FileFollower.reload, None),
        "mirror size": FailsOnce(vars(FleetReader)["capacity"].fget, "mirror size"),
        "index watch": FailsOnce(PrefixAware._report_change, "index watch"),
        "health check": FailsOnce(PromptFormats.choose_current, "health check"),
        "queue": FailsOnce(Admission._admit_waiting, "queue"),
        "connections": FailsOnce(ConnectionLimiter.close_overdue, "connections"),
        "discovery": FailsOnce(WorkerTable.set_addresses, "discovery"),
    }
    monkeypatch.setattr(Accounts, "_sync", faults["token quotas"])
    for name, file in (("key file", router.server.router.handler.keys._file), ("split file", router.server.router.canary._file)):
        monkeypatch.setattr(file, "reload", faults[name].__get__(file))
    monkeypatch.setattr(FleetReader, "capacity", property(lambda reader: faults["mirror size"].__get__(reader)()))
    monkeypatch.setattr(PrefixAware, "_report_change", faults["index watch"])
    monkeypatch.setattr(PromptFormats, "choose_current", faults["health check"])
    monkeypatch.setattr(Admission, "_admit_waiting", faults["queue"])
    monkeypatch.setattr(ConnectionLimiter, "close_overdue", faults["connections"])
    monkeypatch.setattr(WorkerTable, "set_addresses", faults["discovery"])
    worker.ready = False  # a health check that finds another worker than before, and a request that has to wait
    await router.usable(0)
    waiting = asyncio.create_task(ask(router, ANNA))
    await eventually(lambda: faults["queue"].calls > 1, "the queue is processed again")
    worker.ready = True
    assert (await asyncio.wait_for(waiting, 30)).status_code == 200
    for name, fault in faults.items():
        await eventually(lambda: fault.calls > 1, f"{name} goes on", 10)  # noqa: B023 (awaited here)
    told = counted(router.server.router.metrics.task_failures)
    assert told == dict.fromkeys(faults.keys() - {"discovery"}, 1), "discovery handles the exception itself: the known workers stay"
    assert (await ask(router, ANNA)).status_code == 200


async def test_a_poller_ends_although_a_check_is_requested_in_the_same_loop_iteration(fleet: Fleet) -> None:
    """Until Python 3.12, asyncio.wait_for lost the cancellation, and a draining router never ended."""
    router = await fleet.router(await fleet.worker(), poll_interval=60.0)
    for worker in router.table:
        worker.check_requested.set()
    async with asyncio.timeout(5):
        await router.server.router._poller.close()
