"""Reasons and Events on a real API server: each cause reaches the REASON column, and an Event is made once and then counted."""

import time
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import pytest
from tests.operator.causes.test_causes import TABLE
from tests.operator.support import apiserver
from tests.operator.support.cluster import Cluster, eventually
from tests.operator.support.manifests import container
from tests.operator.support.running_operator import StubRouter, run_operator

from fairlead_operator.kube import event_recorder as event_recorder
from fairlead_operator.polling import index as index_watch
from fairlead_operator.polling import pod_events

READY = {"phase": "Running", "podIP": "10.0.0.7", "podIPs": [{"ip": "10.0.0.7"}], "conditions": [{"type": "Ready", "status": "True"}]}


@pytest.fixture
def cluster(server: apiserver.ApiServer, namespace: str, router: StubRouter, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    monkeypatch.setattr(pod_events, "STUCK_AFTER", 0.05)
    monkeypatch.setattr(pod_events, "PERIOD", 0.1)
    with run_operator(server.kubeconfig, namespace, router.url):
        yield Cluster(server, namespace)


def post(cluster: Cluster, pod: str, reason: str, message: str) -> None:
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    event = {"apiVersion": "v1", "kind": "Event", "metadata": {"generateName": "e-", "namespace": cluster.namespace}}
    event |= {"reason": reason, "message": message, "type": "Warning", "firstTimestamp": now, "lastTimestamp": now, "count": 1}
    involved = {"kind": "Pod", "apiVersion": "v1", "name": pod, "namespace": cluster.namespace}
    cluster.server.create(cluster.path("events"), event | {"involvedObject": involved})


def as_a_kubelet_writes_it(status: dict[str, Any]) -> dict[str, Any]:
    """With the fields that the API server requires."""
    whole = {"phase": "Pending", **status}
    whole["containerStatuses"] = [{**one, "imageID": ""} for one in status.get("containerStatuses", [])]
    return whole


def test_every_reason_reaches_the_service(cluster: Cluster) -> None:
    """One pod after another with a status of the table for each reason, as the only worker."""
    cluster.create()
    cluster.play_controllers(workers_ready=False)
    rows = {row[3]: row for row in reversed(TABLE)}
    for number, (_, status, event, reason, _) in enumerate(rows.values()):
        name = f"qwen-worker-{number}"
        if event is not None:
            post(cluster, name, *event)
        cluster.play_kubelet(name, as_a_kubelet_writes_it(status))

        def said(name: str = name) -> str:
            ready = cluster.ready()
            return ready["reason"] if name in ready.get("message", "") else ""

        eventually(lambda said=said, reason=reason: said() == reason or None, within=20)
        cluster.server.request("DELETE", cluster.path("pods", name) + "?gracePeriodSeconds=0")


def events(cluster: Cluster) -> list[dict[str, Any]]:
    path = f"/apis/events.k8s.io/v1/namespaces/{cluster.namespace}/events"
    return [one for one in cluster.server.get(path)["items"] if one["regarding"]["kind"] == "InferenceService"]


def count(cluster: Cluster, reason: str) -> list[int]:
    """Return the count of each Event of this reason."""
    return [(one.get("series") or {}).get("count", 1) for one in events(cluster) if one["reason"] == reason]


def test_a_repeated_event_is_counted_and_a_restart_repeats_none(
    server: apiserver.ApiServer, namespace: str, router: StubRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_recorder, "MIN_INTERVAL", 0.0)
    cluster = Cluster(server, namespace)
    ended = {"exitCode": 1, "reason": "Error", "message": "ValueError: x", "startedAt": None, "finishedAt": None}
    crashed = {"phase": "Running", "containerStatuses": [{**container({"terminated": ended}, restartCount=3), "imageID": ""}]}
    with run_operator(server.kubeconfig, namespace, router.url):
        cluster.create()
        for times in (1, 2, 3):
            cluster.play_controllers()
            eventually(lambda: cluster.ready().get("status") == "True")
            eventually(lambda times=times: count(cluster, "Serving") == [times])
            cluster.play_kubelet("qwen-worker-x", crashed)
            cluster.play_controllers(workers_ready=False)
            eventually(lambda: cluster.ready().get("reason") == "CrashLoopBackOff")
            eventually(lambda times=times: count(cluster, "CrashLoopBackOff") == [times])
    (said,) = [one for one in events(cluster) if one["reason"] == "CrashLoopBackOff"]
    assert said["type"] == "Warning" and "ValueError: x" in said["note"] and said["reportingController"] == "fairlead.dev/fairlead-operator"
    seen = cluster.server.kubectl("-n", namespace, "describe", "inferenceservice", "qwen").stdout if apiserver.program("kubectl") else ""
    assert not seen or "CrashLoopBackOff" in seen.rpartition("Events:")[2]

    def versions() -> dict[str, str]:
        """Return those of all Events but the one of the edit below."""
        return {one["metadata"]["name"]: one["metadata"]["resourceVersion"] for one in events(cluster) if one["reason"] != "RollingOut"}

    before = versions()
    with run_operator(server.kubeconfig, namespace, router.url):
        cluster.patch("inferenceservices", "qwen", {"spec": {"rollout": {"progressDeadlineSeconds": 7200}}})
        eventually(lambda: cluster.ready().get("observedGeneration") == 2)
        assert versions() == before


def test_a_routers_page_gives_the_traffic_and_the_fallbacks_of_workers_and_an_idle_service_is_not_written(
    cluster: Cluster, router: StubRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index_watch, "PERIOD", 0.1)
    monkeypatch.setattr("fairlead_operator.status.traffic.MIN_SECONDS", 0.05)
    tokens = {"prompt_tokens": 0, "cached_tokens": 0, "output_tokens": 0}
    router.page = {"index": "ok", "index_read": "mirror", "workers": [{"pod": "w", "ready": True, "load": tokens}]}
    cluster.create()
    cluster.play_controllers()
    cluster.play_kubelet("qwen-router-x", READY, "router")

    def status() -> Any:
        return cluster.get("inferenceservices", "qwen").get("status") or {}

    eventually(lambda: status().get("index") and cluster.ready().get("status") == "True")
    looks, version = router.looks, cluster.get("inferenceservices", "qwen")["metadata"]["resourceVersion"]
    eventually(lambda: router.looks >= looks + 5)
    assert cluster.get("inferenceservices", "qwen")["metadata"]["resourceVersion"] == version and "traffic" not in status()
    deadline = time.monotonic() + 30
    while "traffic" not in status():
        assert time.monotonic() < deadline
        tokens.update(prompt_tokens=tokens["prompt_tokens"] + 400, cached_tokens=tokens["cached_tokens"] + 300)
        tokens["output_tokens"] += 100
        time.sleep(0.05)  # traffic goes on while the status is read
    traffic = status()["traffic"]
    assert traffic["promptTokensPerSecond"] > 100 and traffic["cacheHitPercent"] == 75

    why = "CUDA graphs failed the start-up trial and is off: RuntimeError: CUDA error"
    cluster.play_kubelet("qwen-worker-x", READY)

    def report(fallback: str) -> None:
        router.page = {"index": "ok", "index_read": "mirror", "workers": [{"pod": "qwen-worker-x", "ready": True, "fallback": fallback}]}

    report(why)
    eventually(lambda: cluster.condition("Degraded").get("reason") == "WorkerFallback")
    assert f"Pod qwen-worker-x: {why}" in cluster.condition("Degraded")["message"] and cluster.ready()["status"] == "True"
    eventually(lambda: any(why in one["note"] for one in events(cluster) if one["reason"] == "WorkerFallback"))
    report("")
    eventually(lambda: cluster.condition("Degraded").get("reason") == "AsExpected")
