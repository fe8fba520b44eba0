"""One reconciler with a fake API server: behavior that only a particular order of events shows."""

import asyncio
import contextvars
import gc
import itertools
import time
import weakref
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

import pytest
from tests.operator.support.manifests import SETTINGS, deployment, manifest, service

from fairlead_operator.kube.cache import Cache
from fairlead_operator.kube.client import Cluster
from fairlead_operator.kube.kinds import SERVICES, Kind
from fairlead_operator.kube.workqueue import WorkQueue
from fairlead_operator.observed import HubModel, ObservedRedis
from fairlead_operator.polling.hub import HubResolver
from fairlead_operator.polling.prober import Prober
from fairlead_operator.reconcile.controller import Controller
from fairlead_operator.reconcile.fleet import FleetRollout
from fairlead_operator.reconcile.reconciler import Dependencies, Reconciler

OWNER = ("default", "qwen")


class EmptyCluster:
    """An API server without objects; counts the requests."""

    def __init__(self) -> None:
        self.asked = 0

    async def get(self, kind: Kind, namespace: str, name: str) -> dict[str, Any] | None:
        self.asked += 1
        return None


class Broken:
    async def complete(self, service: object) -> str:
        raise RuntimeError("no such client")


def dependencies(cache: Cache, cluster: object, prober: object = None) -> Dependencies:
    fleet = FleetRollout(SETTINGS.waves, cache, lambda _: None)
    return Dependencies(
        cast(Cluster, cluster), cache, cast(Prober, prober), SETTINGS, lambda *_: None, WorkQueue(1), fleet, HubResolver("")
    )


async def test_a_missed_deletion_is_found_before_a_child_is_created() -> None:
    controller, cluster = Controller(), EmptyCluster()
    cache = Cache(controller.wake)
    controller.start(dependencies(cache, cluster))
    body = manifest()
    body["metadata"] |= {"uid": "u", "resourceVersion": "5", "generation": 1}
    cache.put(body)
    controller.wake(OWNER)
    deadline = time.monotonic() + 10
    while len(controller):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)
    assert cache.service(OWNER) is None and cluster.asked == 2, "one child, and then the service itself"
    await controller.close()


async def test_a_standby_that_takes_over_starts_a_reconciler_for_each_service() -> None:
    controller = Controller()
    cache = Cache(controller.wake)
    for name in ("qwen", "llama"):
        body = manifest(name)
        body["metadata"] |= {"uid": name, "resourceVersion": "5", "generation": 1}
        cache.put(body)
    assert not controller.is_started and len(controller) == 0, "a standby writes nothing"
    controller.start(dependencies(cache, EmptyCluster()))
    assert controller.is_started and len(controller) == 2
    await controller.close()


class Event:
    """What a handler is called with."""


async def test_a_reconciler_keeps_no_reference_to_the_event_that_started_it() -> None:
    """1,000 services that were made while the operator ran held the first event of each: 30 MiB."""
    controller = Controller()
    cache = Cache(controller.wake)
    controller.start(dependencies(cache, EmptyCluster()))
    called_with: contextvars.ContextVar[Event] = contextvars.ContextVar("event")
    event = Event()
    kept = weakref.ref(event)

    def handler(event: Event) -> None:
        called_with.set(event)
        body = manifest()
        body["metadata"] |= {"uid": "u", "resourceVersion": "5", "generation": 1}
        cache.put(body)

    contextvars.copy_context().run(handler, event)
    del event
    assert len(controller) == 1
    gc.collect()
    assert kept() is None
    await controller.close()


class Recording(EmptyCluster):
    """Keeps the status that is written."""

    async def patch_status(self, body: Mapping[str, Any], status: dict[str, Any]) -> dict[str, Any]:
        self.status = status
        return {**body, "status": status, "metadata": {**body["metadata"], "resourceVersion": "6"}}


async def test_an_unsupported_spec_is_reported_and_changes_no_child() -> None:
    cache, cluster = Cache(lambda _: None), Recording()
    body = manifest(engine={"tensorParallel": 16}, resources={"gpus": 16})
    body["metadata"] |= {"uid": "u", "resourceVersion": "5", "generation": 1}
    cache.put(body)
    assert await Reconciler(OWNER, dependencies(cache, cluster)).reconcile() is None
    (ready,) = [each for each in cluster.status["conditions"] if each["type"] == "Ready"]
    assert (ready["status"], ready["reason"]) == ("False", "TensorParallelUnsupported")
    words = "a pod's GPUs are one node's: set it to 8 or less, or divide the model over more nodes in a new service (spec.engine.nodes: 2)"
    assert "spec.engine.tensorParallel is 16" in ready["message"] and words in ready["message"]
    assert cluster.asked == 0, "no child was looked at, made or taken away"


async def test_a_rotation_reaches_pods_whose_spec_is_refused() -> None:
    """Or they would lose the index when the previous password goes."""
    cache, cluster = Cache(lambda _: None), Taking()
    body = manifest(engine={"tensorParallel": 16}, resources={"gpus": 16})
    body["metadata"] |= {"uid": "u", "resourceVersion": "5", "generation": 1}
    cache.put(body)
    seen = [ObservedRedis("PerService", key="old")]
    settings = replace(SETTINGS, redis_credentials=True)
    loop = Reconciler(OWNER, replace(dependencies(cache, cluster), settings=settings, redis=lambda: seen[0]))
    await loop.reconcile()
    assert not cluster.applied, "nothing runs"
    running = deployment("worker", 1) | {"apiVersion": "apps/v1", "kind": "Deployment"}
    running["metadata"] |= {"name": "qwen-worker", "namespace": "default", "uid": "d", "resourceVersion": "7"}
    running["metadata"]["labels"]["app.kubernetes.io/instance"] = "qwen"
    cache.put(running)
    for key in ("old", "new"):
        seen[0] = ObservedRedis("PerService", key=key)
        await loop.reconcile()
    passwords = [each["data"]["password"] for each in cluster.applied]
    assert [each["kind"] for each in cluster.applied] == ["Secret"] * 4 and len(set(passwords)) == 4
    loop._stop_polling()


class Taking(Recording):
    """Takes what is applied, and keeps what was deleted."""

    def __init__(self) -> None:
        super().__init__()
        self.deleted: list[str] = []
        self.applied: list[Mapping[str, Any]] = []
        self._versions = itertools.count(10)

    async def get(self, kind: Kind, namespace: str, name: str) -> dict[str, Any] | None:
        return served_body() if kind is SERVICES else None

    async def apply(self, body: Mapping[str, Any]) -> dict[str, Any]:
        self.applied.append(body)
        version = str(next(self._versions))
        return {**body, "metadata": {**body["metadata"], "uid": f"of {body['kind']} {version}", "resourceVersion": version}}

    async def create(self, kind: Kind, body: Mapping[str, Any]) -> dict[str, Any]:
        return dict(body)

    async def delete(self, body: Mapping[str, Any]) -> None:
        self.deleted.append(body["kind"])


def served_body() -> dict[str, Any]:
    body = manifest(exposure={"gateway": {"parentRef": {"name": "public"}, "backend": "EndpointPicker"}})
    body["metadata"] |= {"uid": "u", "resourceVersion": "5", "generation": 1}
    return body


@pytest.mark.parametrize("unknown", [frozenset({"InferencePool"}), frozenset()])
async def test_a_route_is_kept_while_the_pool_kind_is_unknown(unknown: frozenset[str]) -> None:
    cache, cluster = Cache(lambda _: None), Taking()
    cache.put(served_body())
    owner = {"apiVersion": "fairlead.dev/v1alpha1", "kind": "InferenceService", "name": "qwen", "uid": "u", "controller": True}
    labels = {"app.kubernetes.io/instance": "qwen"}
    route = {"name": "qwen", "namespace": "default", "uid": "r", "resourceVersion": "6", "ownerReferences": [owner], "labels": labels}
    cache.put({"apiVersion": "gateway.networking.k8s.io/v1", "kind": "HTTPRoute", "metadata": route})
    loop = Reconciler(OWNER, replace(dependencies(cache, cluster), served=lambda: frozenset({"HTTPRoute"}), unknown=lambda: unknown))
    await loop.reconcile()
    loop._stop_polling()
    assert cluster.deleted == ([] if unknown else ["HTTPRoute"])


async def test_an_unexpected_error_of_a_probe_is_a_failed_probe() -> None:
    loop = Reconciler(OWNER, dependencies(Cache(lambda _: None), EmptyCluster(), Broken()))
    loop._start_probing(service(), "")
    assert loop._probe_task is not None
    await loop._probe_task
    assert loop._probe_task is None and loop._probe is not None and "no such client" in loop._probe.message


async def test_a_new_revision_waits_for_the_commit_of_its_model_and_nothing_else_does() -> None:
    cache, cluster, answer = Cache(lambda _: None), Taking(), asyncio.Event()
    body = manifest()
    body["metadata"] |= {"uid": "u", "resourceVersion": "5", "generation": 1}
    cache.put(body)

    async def fetch(model: HubModel, endpoint: str) -> str:
        await answer.wait()
        return "a" * 40

    hub = HubResolver("http://hub.example", fetch)
    loop = Reconciler(OWNER, replace(dependencies(cache, cluster), hub=hub))
    assert await loop.reconcile() is None and not cluster.applied, "no template without its commit"
    answer.set()
    async with asyncio.timeout(60):
        await loop._wake_event.wait()
    await loop.reconcile()
    (worker,) = [one for one in cluster.applied if one["kind"] == "Deployment" and one["metadata"]["name"] == "qwen-worker"]
    assert f"--model=hf://Qwen/Qwen3-8B@{'a' * 40}" in worker["spec"]["template"]["spec"]["containers"][0]["args"]
    edited = manifest(model={"uri": "s3://bucket/llama"})
    edited["metadata"] |= {"uid": "u", "resourceVersion": "100", "generation": 2}
    cache.put(edited)
    await loop.reconcile()
    worker = [one for one in cluster.applied if one["kind"] == "Deployment" and one["metadata"]["name"] == "qwen-worker"][-1]
    assert "--model=s3://bucket/llama" in worker["spec"]["template"]["spec"]["containers"][0]["args"]
    assert loop._model_commit is None, "the answer for the model before is forgotten"
    loop._stop_polling()
    await hub.close()
