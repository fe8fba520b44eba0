"""The operator on a real API server. No node runs: the tests write the statuses of controllers and kubelets."""

import time
from itertools import product
from typing import Any

import pytest
from tests.operator.support import apiserver
from tests.operator.support.cluster import CHILDREN, Cluster, eventually
from tests.operator.support.manifests import container, manifest
from tests.operator.support.running_operator import StubRouter, run_operator

from fairlead_operator.polling import index as index_watch
from fairlead_operator.polling import loading as loading_watch
from fairlead_operator.status import index as index_status


def test_ready_only_after_a_completion_on_this_generation(cluster: Cluster, router: StubRouter) -> None:
    router.failing = True
    cluster.create()
    eventually(lambda: cluster.ready().get("status") == "False")
    assert not router.asked, "asked before any pod was ready"
    cluster.play_controllers()
    eventually(lambda: cluster.ready().get("reason") == "RequestFailed")
    assert "answered 503" in cluster.ready()["message"]
    router.failing = False
    eventually(lambda: cluster.ready().get("status") == "True")
    assert router.asked[-1]["max_tokens"] == 1 and router.asked[-1]["model"] == "qwen"
    status = cluster.get("inferenceservices", "qwen")["status"]
    assert (
        status["desiredReplicas"] == status["readyReplicas"] == 1
        and status["url"] == f"http://qwen.{cluster.namespace}.svc/v1"
        and status["observedGeneration"] == 1
    )
    asked = len(router.asked)
    cluster.play_controllers(workers_ready=False)
    eventually(lambda: cluster.ready().get("status") == "False")
    cluster.play_controllers()
    eventually(lambda: cluster.ready().get("status") == "True")
    assert len(router.asked) == asked + 1, "asked anew after it had been unready, and once"


def test_an_edited_deployment_is_put_back_and_others_fields_stay(cluster: Cluster) -> None:
    """So are the owner and the labels by which children are found, and children that were deleted. Children have our fields only."""
    uid = cluster.create()["metadata"]["uid"]
    cluster.server.create(cluster.path("inferenceservices"), manifest("image", cluster.namespace, model={"uri": "oci://a.io/qwen:1#8b"}))
    for plural, name in CHILDREN:
        child = eventually(lambda plural=plural, name=name: cluster.get(plural, name))
        (owner,) = child["metadata"]["ownerReferences"]
        assert owner["uid"] == uid and owner["controller"]
        assert {entry["manager"] for entry in child["metadata"]["managedFields"]} == {"fairlead-operator"}
        assert all(entry["operation"] == "Apply" for entry in child["metadata"]["managedFields"])
    service = cluster.get("inferenceservices", "qwen")
    assert "finalizers" not in service["metadata"] and "annotations" not in service["metadata"]
    volumes = eventually(lambda: cluster.get("deployments", "image-worker"))["spec"]["template"]["spec"]["volumes"]
    assert [each["image"]["reference"] for each in volumes if each["name"] == "model"] == ["a.io/qwen:1"]

    own = {"labels": {"app.kubernetes.io/instance": "qwen", "team": "a"}, "annotations": {"note": "mine"}}
    pod = {"terminationGracePeriodSeconds": 1, "priorityClassName": ""}
    cluster.patch("deployments", "qwen-worker", {"metadata": own, "spec": {"replicas": 7, "template": {"spec": pod}}})

    def is_put_back() -> bool:
        body = cluster.get("deployments", "qwen-worker")
        labels, spec = body["metadata"]["labels"], body["spec"]
        is_ours = (labels.get("app.kubernetes.io/instance"), labels.get("app.kubernetes.io/managed-by")) == ("qwen", "fairlead")
        return is_ours and spec["replicas"] == 1 and spec["template"]["spec"]["terminationGracePeriodSeconds"] == 135

    eventually(is_put_back)
    metadata = cluster.get("deployments", "qwen-worker")["metadata"]
    assert metadata["labels"]["team"] == "a" and metadata["annotations"]["note"] == "mine"
    for label, value in product(("app.kubernetes.io/instance", "app.kubernetes.io/managed-by"), (None, "other")):
        cluster.patch("deployments", "qwen-worker", {"metadata": {"labels": {label: value}}, "spec": {"replicas": 5}})
        eventually(is_put_back)
    for plural in ("deployments", "serviceaccounts", "controllerrevisions"):
        names = [body["metadata"]["name"] for body in cluster.server.get(cluster.path(plural))["items"]]
        orphan = (plural, next(name for name in names if name.startswith("qwen")))
        cluster.patch(*orphan, {"metadata": {"ownerReferences": None}})
        eventually(lambda orphan=orphan: cluster.get(*orphan)["metadata"].get("ownerReferences"))
    old = cluster.get("services", "qwen")["metadata"]["uid"]
    cluster.server.request("DELETE", cluster.path("services", "qwen"))
    eventually(lambda: (cluster.get("services", "qwen") or {"metadata": {"uid": old}})["metadata"]["uid"] != old)


def test_a_crash_is_one_cause_and_a_load_is_reported_in_coarse_steps_until_it_ends(
    cluster: Cluster, router: StubRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading_watch, "PERIOD", 0.02)
    cluster.create()
    cluster.play_controllers(workers_ready=False)
    ended = {"exitCode": 1, "reason": "Error", "message": "Traceback:\n  ...\nModelNotFound: Qwen/Qwen3-8B: 404 from the hub\n"}
    ended |= {"startedAt": "2026-01-01T00:00:00Z", "finishedAt": "2026-01-01T00:00:01Z"}
    states = [
        container({"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 10s"}}, {"terminated": ended}, restartCount=1),
        container({"running": {"startedAt": "2026-01-01T00:00:02Z"}}, {"terminated": ended}, restartCount=2, started=False),
        container({"terminated": ended}, {"terminated": ended}, restartCount=2),
        container({"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 20s"}}, {"terminated": ended}, restartCount=2),
    ]
    seen = set()
    for state in [*states, *states]:
        # Kubernetes requires these two of a status that a kubelet writes
        cluster.play_kubelet("qwen-worker-x", {"phase": "Running", "containerStatuses": [{**state, "imageID": ""}]})
        eventually(lambda: cluster.ready().get("reason") == "CrashLoopBackOff")
        ready = cluster.ready()
        assert "ModelNotFound: Qwen/Qwen3-8B: 404 from the hub" in ready["message"]
        seen.add((ready["status"], ready["reason"], ready["message"], ready["lastTransitionTime"]))
    assert len(seen) == 1, seen
    events = cluster.server.get(cluster.path("events"))["items"]
    assert [event["reason"] for event in events].count("CrashLoopBackOff") <= 1

    began = "2026-01-01T00:00:00Z"
    running = {**container({"running": {"startedAt": began}}, started=True), "imageID": ""}
    unready = [{"type": "Ready", "status": "False", "lastTransitionTime": began}]
    pod = {"phase": "Running", "podIP": "10.0.0.9", "podIPs": [{"ip": "10.0.0.9"}]}
    cluster.play_kubelet("qwen-worker-x", {**pod, "conditions": unready, "containerStatuses": [running]})
    versions = set()
    for percent in range(30, 41):
        router.loading = {"ready": False, "stage": "Downloading", "percent": percent, "total_bytes": 13 << 30}
        asked = router.asked_loading
        eventually(lambda asked=asked: router.asked_loading >= asked + 3)
        versions.add(cluster.get("inferenceservices", "qwen")["metadata"]["resourceVersion"])
    eventually(lambda: cluster.ready().get("message") == "Downloading 40 % of 13.0 GiB (pod qwen-worker-x)")
    assert len(versions) <= 4, "ten steps of one percent are two of five"
    loading = cluster.get("inferenceservices", "qwen")["status"]["loading"]
    assert loading == {"phase": "Downloading", "percent": 40, "totalBytes": 13 << 30, "podName": "qwen-worker-x"}
    ready = [{"type": "Ready", "status": "True", "lastTransitionTime": "2026-01-01T00:01:00Z"}]
    cluster.play_kubelet("qwen-worker-x", {**pod, "conditions": ready, "containerStatuses": [{**running, "ready": True}]})
    cluster.play_controllers()
    eventually(lambda: cluster.ready().get("status") == "True")
    eventually(lambda: "loading" not in cluster.get("inferenceservices", "qwen")["status"])
    asked = router.asked_loading
    time.sleep(0.3)  # the absence of a question can only be waited for
    assert router.asked_loading == asked


def test_a_pod_template_that_kubernetes_refuses_is_named(cluster: Cluster) -> None:
    cluster.create(podTemplate={"spec": {"containers": [{"name": "worker", "imagePullPolice": "Never"}]}})
    eventually(lambda: cluster.ready().get("reason") == "PodTemplateInvalid")
    assert "imagePullPolice" in cluster.ready()["message"]
    good = {"spec": {"containers": [{"name": "worker", "imagePullPolice": None, "imagePullPolicy": "Never"}]}}
    cluster.patch("inferenceservices", "qwen", {"spec": {"podTemplate": good}})
    deployment = eventually(lambda: cluster.get("deployments", "qwen-worker"))
    assert deployment["spec"]["template"]["spec"]["containers"][0]["imagePullPolicy"] == "Never"


def test_a_foreign_service_is_not_adopted(cluster: Cluster) -> None:
    theirs = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "qwen"}, "spec": {"ports": [{"port": 1234}]}}
    cluster.server.create(cluster.path("services"), theirs)
    cluster.create()
    eventually(lambda: cluster.ready().get("reason") == "ApplyFailed")
    assert "Service/qwen" in cluster.ready()["message"] and "does not belong" in cluster.ready()["message"]
    assert cluster.get("services", "qwen")["spec"]["ports"][0]["port"] == 1234
    assert cluster.get("deployments", "qwen-router") is not None


def test_a_lost_index_is_reported_once(cluster: Cluster, router: StubRouter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_watch, "PERIOD", 0.1)
    monkeypatch.setattr(index_status, "UNAVAILABLE_GRACE", 1.0)
    cluster.create()
    cluster.play_controllers()
    ready = {"phase": "Running", "podIP": "10.0.0.7", "podIPs": [{"ip": "10.0.0.7"}], "conditions": [{"type": "Ready", "status": "True"}]}
    cluster.play_kubelet("qwen-router-x", ready, "router")

    def status() -> Any:
        return cluster.get("inferenceservices", "qwen").get("status") or {}

    found = eventually(lambda: status().get("index"))
    assert (found["state"], found["readMode"], found["message"]) == ("Available", "Mirror", "") and "predictionErrorPercent" not in found
    worker = {"prediction": {"answers": 40, "over": 0.31, "under": 0.0, "recalls": 0}}
    router.page = {"index": "unavailable", "index_reason": "no password for redis", "index_read": "remote", "workers": [worker]}
    eventually(lambda: cluster.condition("Degraded").get("reason") == "IndexUnavailable")
    assert status()["index"]["message"] == "no password for redis" and status()["index"]["predictionErrorPercent"] == 30
    assert cluster.ready()["status"] == "True"

    def told() -> list[str]:
        events = cluster.server.get(cluster.path("events"))["items"]
        return [event["message"] for event in events if event["reason"] == "IndexUnavailable"]

    eventually(told)
    version, looks = cluster.get("inferenceservices", "qwen")["metadata"]["resourceVersion"], router.looks
    eventually(lambda: router.looks >= looks + 5)
    assert cluster.get("inferenceservices", "qwen")["metadata"]["resourceVersion"] == version and len(told()) == 1
    router.page = {"index": "ok", "index_reason": "", "index_read": "mirror", "workers": []}
    eventually(lambda: cluster.condition("Degraded").get("reason") == "AsExpected")
    assert "predictionErrorPercent" not in status()["index"], "null in the patch removes it"


def test_nothing_is_written_when_nothing_differs_and_a_restart_changes_nothing(
    server: apiserver.ApiServer, namespace: str, router: StubRouter
) -> None:
    cluster = Cluster(server, namespace)

    def versions() -> dict[str, str]:
        found = {f"{plural}/{name}": cluster.get(plural, name)["metadata"]["resourceVersion"] for plural, name in CHILDREN}
        return found | {"service": cluster.get("inferenceservices", "qwen")["metadata"]["resourceVersion"]}

    with run_operator(server.kubeconfig, namespace, router.url):
        cluster.create(resources={"cpu": "1000m", "memory": "1024Mi"})
        cluster.play_controllers()
        eventually(lambda: cluster.ready().get("status") == "True")
        before = versions()
        cluster.patch("deployments", "qwen-worker", {"metadata": {"annotations": {"other": "writer"}}})
        cluster.play_controllers()
        time.sleep(0.5)  # the absence of a write can only be waited for
        after = versions()
        assert {name for name in before if before[name] != after[name]} == {"deployments/qwen-worker"}
    asked = len(router.asked)
    with run_operator(server.kubeconfig, namespace, router.url):
        cluster.patch("inferenceservices", "qwen", {"spec": {"scaling": {"maxReplicas": 3}}})
        eventually(lambda: (cluster.ready().get("observedGeneration"), cluster.ready()["status"]) == (2, "True"))
        again = versions()
        assert {name for name in after if again[name] != after[name]} == {"service"}
    assert len(router.asked) == asked + 1
