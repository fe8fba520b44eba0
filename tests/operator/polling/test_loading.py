"""`status.loading`: coarse progress of the slowest pod, polled only while a pod loads, and a stable cause."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

from tests.operator.support.manifests import SETTINGS, container, deployment, pod, service
from tests.operator.support.stub_server import StubServer

from fairlead_operator import causes
from fairlead_operator.children import worker
from fairlead_operator.desired import Desired, desired
from fairlead_operator.observed import Observed, ObservedLoading
from fairlead_operator.polling.loading import LoadingPoller
from fairlead_operator.polling.prober import Prober
from fairlead_operator.status.conditions import find
from fairlead_operator.status.loading import format_size, pods_to_poll

NOW = datetime(2026, 1, 1, 12, 0, 0, tzinfo=UTC)
GIB = 2**30


def loading_pod(name: str, address: str = "10.0.0.1", *, ready: bool = False) -> dict[str, Any]:
    conditions = [{"type": "Ready", "status": str(ready), "lastTransitionTime": "2026-01-01T11:00:00Z"}]
    state = container({"running": {"startedAt": "2026-01-01T11:00:00Z"}}, started=True, ready=ready)
    return pod(name, podIP=address, conditions=conditions, containerStatuses=[state], phase="Running")


def look(pods: list[dict[str, Any]], seen: dict[str, ObservedLoading], before: Desired | None = None) -> Desired:
    status = before.status.model_dump(by_alias=True, mode="json") if before else None
    observed = Observed({"worker": deployment("worker", 2, ready=0), "router": deployment("router", 2)}, tuple(pods), loading=seen)
    return desired(service(replicas=2, status=status), observed, SETTINGS, NOW)


def message(plan: Desired) -> tuple[str, str]:
    ready = find(plan.status.conditions, "Ready")
    assert ready is not None
    return ready.reason, ready.message


def test_the_slowest_pod_is_reported_with_its_progress() -> None:
    pods = [loading_pod("a"), loading_pod("b", "10.0.0.2")]
    seen = {"a": ObservedLoading("Loading", 40, round(12.1 * GIB)), "b": ObservedLoading("Preparing", 0)}
    plan = look(pods, seen)
    assert message(plan) == ("Loading", "Loading 40 % of 12.1 GiB (pod a)")
    assert plan.status.loading is not None and plan.status.loading.total_bytes == round(12.1 * GIB)
    downloading = look(pods, seen | {"b": ObservedLoading("Downloading", 95, 3 * GIB)})
    assert message(downloading) == ("Loading", "Downloading 95 % of 3.0 GiB (pod b)")


def test_a_restarted_operator_keeps_the_progress_and_a_loaded_service_has_none() -> None:
    pods = [loading_pod("a")]
    plan = look(pods, {"a": ObservedLoading("Loading", 40, GIB)})
    assert look(pods, {}, plan).status == plan.status
    assert look([loading_pod("a", ready=True)], {}, plan).status.loading is None
    assert look([loading_pod("c")], {}, plan).status.loading is None, "of a pod that is gone"


def test_loading_workers_are_polled() -> None:
    ending = loading_pod("d") | {"metadata": loading_pod("d")["metadata"] | {"deletionTimestamp": "2026-01-01T00:00:00Z"}}
    router = pod("r", "router", podIP="10.0.0.9", containerStatuses=[container({"running": {}})])
    waiting = pod("w", podIP="10.0.0.8", containerStatuses=[container({"waiting": {"reason": "ContainerCreating"}})])
    pods = [loading_pod("a", "fd00::7"), loading_pod("b", ready=True), ending, router, waiting]
    assert pods_to_poll(pods) == {"a": "[fd00::7]:8002"}
    assert len(pods_to_poll([loading_pod(f"p{number:03}") for number in range(100)])) == 8


def test_progress_is_coarse_and_an_older_worker_reports_none() -> None:
    assert ObservedLoading.parse({"stage": "Downloading", "percent": 44, "total_bytes": GIB}) == ObservedLoading("Downloading", 40, GIB)
    assert ObservedLoading.parse({"ready": False, "phase": "draining", "percent": 100}) is None
    assert ObservedLoading.parse({"ready": False, "phase": "loading", "percent": 3, "reason": "weights"}) is None
    assert (format_size(700), format_size(5 << 20), format_size(13 << 30)) == ("1 KiB", "5.0 MiB", "13.0 GiB")


def test_passing_the_startup_probe_is_not_having_served() -> None:
    """It passes as soon as the process answers: a pod that crashes while it loads must not look well in between."""
    failed = {"exitCode": 1, "reason": "Error", "message": "no such model\n"}
    loading = loading_pod("a")["status"]
    again = container({"running": {"startedAt": "2026-01-01T11:05:00Z"}}, {"terminated": failed}, restartCount=2, started=True)
    cause = causes.find_pod_cause(pod(**(loading | {"containerStatuses": [again]})))
    assert cause is not None and cause.reason == "CrashLoopBackOff" and "no such model" in cause.message
    first = causes.find_pod_cause(loading_pod("a"))
    assert first is not None and first.reason == "Loading"
    drains = [{"type": "Ready", "status": "False", "lastTransitionTime": "2026-01-01T11:30:00Z"}]
    lost = causes.find_pod_cause(pod(**(loading | {"conditions": drains})))
    assert lost is not None and lost.reason == "NotReady"


def test_the_startup_probe_bounds_no_load() -> None:
    (deployed,) = [each for each in worker.objects(service(), SETTINGS) if each["kind"] == "Deployment"]
    (made,) = deployed["spec"]["template"]["spec"]["containers"]
    assert made["startupProbe"]["httpGet"]["path"] == made["livenessProbe"]["httpGet"]["path"] == "/health"
    assert made["readinessProbe"]["httpGet"]["path"] == "/ready"


@contextmanager
def worker_answering(page: dict[str, Any], asked: list[str]) -> Iterator[str]:
    def answer(method: str, path: str, body: bytes) -> tuple[int, Any]:
        asked.append(path)
        return 503, page

    with StubServer(answer) as server:
        yield server.address


async def test_pods_are_polled_only_while_they_load(monkeypatch: Any) -> None:
    monkeypatch.setattr("fairlead_operator.polling.loading.PERIOD", 0.01)
    page: dict[str, Any] = {"ready": False, "stage": "Downloading", "percent": 12, "total_bytes": GIB}
    prober, told, asked = Prober("cluster.local"), asyncio.Event(), list[str]()
    with worker_answering(page, asked) as address:
        watch = LoadingPoller(prober, told.set)
        watch.follow({"a": address, "silent": "127.0.0.1:9"})
        await asyncio.wait_for(told.wait(), 10)
        assert watch.seen == {"a": ObservedLoading("Downloading", 10, GIB)}
        told.clear()
        page["percent"] = 13
        before = len(asked)
        while len(asked) < before + 3:  # noqa: ASYNC110  # another thread counts
            await asyncio.sleep(0.01)
        assert not told.is_set(), "the same figure in steps of five: nothing to write"
        page["percent"] = 15
        await asyncio.wait_for(told.wait(), 10)
        watch.follow({})
        await asyncio.sleep(0)
        silent = len(asked)
        await asyncio.sleep(0.1)
        assert len(asked) <= silent + 1 and watch.seen == {}
    await prober.close()
