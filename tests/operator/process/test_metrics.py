"""The operator's own metrics, and its behavior without permission to list the kinds that the cluster serves."""

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest
from tests.operator.profiles.test_merge import profile
from tests.operator.support.manifests import manifest

from fairlead_operator.kube import discovery as optional_kinds
from fairlead_operator.kube.cache import Cache
from fairlead_operator.kube.client import ApiError, Cluster
from fairlead_operator.kube.discovery import KindDiscovery
from fairlead_operator.kube.kinds import OPTIONAL, Kind
from fairlead_operator.kube.workqueue import WorkQueue
from fairlead_operator.process.metrics import Metrics


def value(metrics: Metrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(name, labels)


async def test_a_reconcile_takes_a_slot_is_measured_and_always_returns_it() -> None:
    metrics, work_queue, inside = Metrics(), WorkQueue(1), asyncio.Event()
    leave = asyncio.Event()

    async def one(fails: bool) -> None:
        async with metrics.measure_reconcile(work_queue, urgent=False):
            inside.set()
            await leave.wait()
            if fails:
                raise ValueError("x")

    first = asyncio.create_task(one(True))
    await inside.wait()
    second = asyncio.create_task(one(False))
    cancelled = asyncio.create_task(one(False))
    await asyncio.sleep(0)
    assert value(metrics, "fairlead_operator_reconcile_queue") == 2
    cancelled.cancel()
    leave.set()
    results = await asyncio.gather(first, second, cancelled, return_exceptions=True)
    assert isinstance(results[0], ValueError) and results[1] is None and isinstance(results[2], asyncio.CancelledError)
    assert value(metrics, "fairlead_operator_reconcile_queue") == 0
    assert value(metrics, "fairlead_operator_reconcile_seconds_count") == 2
    await asyncio.wait_for(work_queue.acquire(urgent=False), 1)


def test_services_are_shown_as_their_status_says() -> None:
    metrics, leading = Metrics(), True
    body = manifest("qwen", "ml", replicas=3)
    conditions = [{"type": "Ready", "status": "False"}, {"type": "Degraded", "status": "True"}, {"type": "Odd", "status": "Unknown"}]
    body["status"] = {"replicas": 2, "readyReplicas": 1, "conditions": conditions}
    metrics.register_sources(lambda: leading, lambda: 7.0, lambda: 1, lambda: [body, manifest("new", "ml")])
    labels = {"namespace": "ml", "service": "qwen"}
    assert [value(metrics, "fairlead_service_condition", **labels, type=name) for name in ("Ready", "Degraded", "Odd")] == [0.0, 1.0, None]
    assert [value(metrics, "fairlead_service_workers", **labels, state=name) for name in ("desired", "existing", "ready")] == [
        3.0,
        2.0,
        1.0,
    ]
    assert value(metrics, "fairlead_operator_seconds_since_resync") == 7.0 and value(metrics, "fairlead_operator_leading") == 1.0
    leading = False
    assert value(metrics, "fairlead_operator_seconds_since_resync") == 0.0, "a standby lists nothing"
    metrics.count_error(ApiError(403, "no"))
    assert value(metrics, "fairlead_operator_reconcile_errors_total", error="ApiError") == 1.0


def test_a_service_that_its_autoscaler_has_brought_to_zero_wants_no_worker() -> None:
    """spec.replicas says 1, its default: an alert of every service that is asleep."""
    metrics, body = (
        Metrics(),
        manifest("qwen", "ml", replicas=1, scaling={"minReplicas": 0, "maxReplicas": 4, "target": {"ttftMilliseconds": 2000}}),
    )
    body["status"] = {"desiredReplicas": 0, "replicas": 0, "readyReplicas": 0}
    metrics.register_sources(lambda: True, lambda: 0.0, lambda: 1, lambda: [body])
    assert value(metrics, "fairlead_service_workers", namespace="ml", service="qwen", state="desired") == 0.0
    body["status"]["desiredReplicas"] = 3
    assert value(metrics, "fairlead_service_workers", namespace="ml", service="qwen", state="desired") == 3.0


class Served:
    """A cluster that serves `plurals`, and refuses lists while `forbidden`."""

    def __init__(self) -> None:
        self.plurals = {"httproutes"}
        self.forbidden = False
        self.busy: set[str] = set()  # whose group is not answered for

    async def resources(self, api_version: str) -> list[dict[str, Any]]:
        names = [kind.plural for kind in OPTIONAL if kind.api_version == api_version and kind.plural in self.plurals]
        if self.busy & {kind.plural for kind in OPTIONAL if kind.api_version == api_version}:
            raise ApiError(503, "busy")
        if not names:
            raise ApiError(404, "no such group")
        return [{"name": name} for name in names]

    async def pages(self, kind: Kind, namespace: str, *, labelled: bool) -> AsyncIterator[tuple[list[dict[str, Any]], int]]:
        if self.forbidden:
            raise ApiError(403, "may not list")
        yield [], 1


class Watched(Served):
    """A cluster whose watches deliver `events`."""

    def __init__(self) -> None:
        super().__init__()
        self.lists = self.queries = 0
        self.watching, self.events = asyncio.Event(), asyncio.Queue[tuple[str, dict[str, Any]]]()

    async def resources(self, api_version: str) -> list[dict[str, Any]]:
        self.queries += 1
        return await super().resources(api_version)

    async def pages(self, kind: Kind, namespace: str, *, labelled: bool) -> AsyncIterator[tuple[list[dict[str, Any]], int]]:
        self.lists += 1
        yield [], 1

    async def watch(self, kind: Kind, namespace: str, version: int) -> AsyncIterator[tuple[str, dict[str, Any]]]:
        self.watching.set()
        try:
            while True:
                yield await self.events.get()
        finally:
            self.watching.clear()


def route() -> dict[str, Any]:
    labels = {"app.kubernetes.io/instance": "qwen"}
    metadata = {"name": "qwen", "namespace": "ml", "uid": "r", "resourceVersion": "7", "labels": labels}
    return {"apiVersion": "gateway.networking.k8s.io/v1", "kind": "HTTPRoute", "metadata": metadata}


def service_with_gateway() -> dict[str, Any]:
    body = manifest("qwen", "ml", exposure={"gateway": {"parentRef": {"name": "web"}}})
    body["metadata"] |= {"uid": "s", "resourceVersion": "1", "generation": 1}
    return body


async def test_rules_of_an_older_chart_do_not_end_the_operator(caplog: pytest.LogCaptureFixture) -> None:
    cluster, changes = Served(), []
    optional = KindDiscovery(cast(Cluster, cluster), Cache(lambda owner: None), ("",), lambda: changes.append(optional.served))
    await optional.discover()
    assert optional.served == {"HTTPRoute"} and changes == [{"HTTPRoute"}]
    cluster.forbidden, cluster.plurals = True, {"httproutes", "inferencepools"}
    with caplog.at_level(logging.WARNING):
        await optional.discover()
    assert optional.served == {"HTTPRoute"} and "may not list" in caplog.text
    cluster.forbidden, cluster.plurals = False, set()
    await optional.discover()
    assert optional.served == frozenset() and changes[-1] == frozenset()


async def test_a_kind_without_an_answer_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    """It made the others unknown too, and an operator that was just started then took the route of a serving service away."""
    monkeypatch.setattr(optional_kinds, "RETRY", 0.0)
    cluster = Served()
    cluster.plurals, cluster.busy = {"httproutes", "inferencepools"}, {"inferencepools"}
    optional = KindDiscovery(cast(Cluster, cluster), Cache(lambda owner: None), ("",))
    task = asyncio.create_task(optional.run())
    await asyncio.wait_for(optional.discovered.wait(), 10)
    task.cancel()
    assert (optional.served, optional.unknown) == ({"HTTPRoute"}, {"InferencePool"}), "loops start all the same"
    cluster.busy = set()
    await optional.discover()
    assert (optional.served, optional.unknown) == ({"HTTPRoute", "InferencePool"}, frozenset())
    cluster.busy = {"inferencepools"}
    await optional.discover()
    assert (optional.served, optional.unknown) == ({"HTTPRoute", "InferencePool"}, frozenset()), "what was known stays"


async def test_objects_of_optional_kinds_are_watched_and_not_listed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optional_kinds, "PERIOD", 0.0)
    cluster, woken = Watched(), asyncio.Event()
    cache = Cache(lambda owner: woken.set())
    looking = KindDiscovery(cast(Cluster, cluster), cache, ("",))
    cache.put(service_with_gateway())
    task = asyncio.create_task(looking.run())
    async with asyncio.timeout(10):
        await cluster.watching.wait()
        lists = cluster.lists
        while cluster.queries < 50:  # noqa: ASYNC110
            await asyncio.sleep(0)
        woken.clear()
        cluster.events.put_nowait(("MODIFIED", route()))
        await woken.wait()
    assert ("HTTPRoute", "qwen") in cache.keys(("ml", "qwen")) and cluster.lists == lists
    cluster.plurals = set()
    async with asyncio.timeout(10):
        while cache.keys(("ml", "qwen")) or cluster.watching.is_set():  # noqa: ASYNC110
            await asyncio.sleep(0)
    task.cancel()


async def test_optional_kinds_that_no_service_needs_are_not_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gateway's CRDs may be removed afterwards: a watch would fail every 30 s from then on."""
    monkeypatch.setattr(optional_kinds, "PERIOD", 0.0)
    cluster, cache = Watched(), Cache(lambda owner: None)
    looking = KindDiscovery(cast(Cluster, cluster), cache, ("",))
    cache.put(service_with_gateway())
    task = asyncio.create_task(looking.run())
    async with asyncio.timeout(10):
        await cluster.watching.wait()
        cache.remove(service_with_gateway())
        while cluster.watching.is_set():  # noqa: ASYNC110
            await asyncio.sleep(0)
        cache.put(service_with_gateway())
        await cluster.watching.wait()
    task.cancel()


async def test_a_late_event_of_a_kind_that_is_gone_leaves_no_object(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing would remove it: a kind that is not served is not listed."""
    monkeypatch.setattr(optional_kinds, "PERIOD", 0.0)
    cluster, gone = Watched(), asyncio.Event()
    cache = Cache(lambda owner: None)
    looking = KindDiscovery(cast(Cluster, cluster), cache, ("",), gone.set)
    forget = cache.forget

    def forget_before_the_event(kind: Kind) -> None:
        forget(kind)
        cluster.events.put_nowait(("MODIFIED", route()))

    monkeypatch.setattr(cache, "forget", forget_before_the_event)
    cache.put(service_with_gateway())
    task = asyncio.create_task(looking.run())
    async with asyncio.timeout(10):
        await cluster.watching.wait()
        gone.clear()
        cluster.plurals = set()
        await gone.wait()
        for _ in range(20):
            await asyncio.sleep(0)
    task.cancel()
    assert not cache.keys(("ml", "qwen"))


async def test_an_unneeded_optional_object_is_listed_until_it_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """No watch reports a route's removal: a route that stayed in the store would be deleted again in each reconcile."""
    monkeypatch.setattr(optional_kinds, "PERIOD", 0.0)
    woken = asyncio.Event()
    cache = Cache(lambda owner: woken.set())
    looking = KindDiscovery(cast(Cluster, Served()), cache, ("",))
    metadata = {"name": "qwen", "namespace": "ml", "uid": "r", "resourceVersion": "1", "labels": {"app.kubernetes.io/instance": "qwen"}}
    (routes,) = [kind for kind in OPTIONAL if kind.kind == "HTTPRoute"]
    cache.put({"apiVersion": routes.api_version, "kind": "HTTPRoute", "metadata": metadata})
    woken.clear()
    task = asyncio.create_task(looking.run())
    await asyncio.wait_for(woken.wait(), 10)
    task.cancel()
    assert not cache.keys(("ml", "qwen"))


@pytest.mark.parametrize(
    "shared", [{"router": {"tls": {"issuerRef": {"name": "company"}}}}, {"router": {"autoscaling": {"maxReplicas": 4}}}, {}]
)
async def test_kinds_that_only_a_profile_needs_are_looked_for(monkeypatch: pytest.MonkeyPatch, shared: dict[str, Any]) -> None:
    monkeypatch.setattr(optional_kinds, "PERIOD", 0.0)
    cluster, found, cache = Served(), asyncio.Event(), Cache(lambda owner: None)
    looking = KindDiscovery(cast(Cluster, cluster), cache, ("",), found.set)
    for name in ("h100", "missing"):
        body = manifest(name, profileRef={"name": name})
        body["metadata"] |= {"uid": name, "resourceVersion": "1", "generation": 1}
        cache.put(body)
    cache.put(profile(**shared))
    assert looking._is_needed() == bool(shared)
    if not shared:
        return
    task = asyncio.create_task(looking.run())
    await asyncio.wait_for(looking.discovered.wait(), 10)
    found.clear()
    cluster.plurals = {"httproutes", "inferencepools"}  # installed after the operator started
    await asyncio.wait_for(found.wait(), 10)
    task.cancel()
    assert "InferencePool" in looking.served


def test_services_are_counted_by_the_phase_of_their_update() -> None:
    metrics = Metrics()
    phases = ["Waiting", "Waiting", "Failed", "Current"]
    bodies = [manifest(f"s{number}") | {"status": {"imageUpdate": {"phase": phase}}} for number, phase in enumerate(phases)]
    metrics.register_sources(lambda: True, lambda: 0.0, lambda: 0, lambda: [*bodies, manifest("new")])
    found = {one: value(metrics, "fairlead_operator_image_update_services", phase=one) for one in (*phases, "RollingBack")}
    assert found == {"Waiting": 2.0, "Failed": 1.0, "Current": 1.0, "RollingBack": 0.0}
