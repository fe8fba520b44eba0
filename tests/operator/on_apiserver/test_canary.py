"""The canary's objects on a real API server, from the edit to the end; the tests simulate controllers, kubelet and routers' counts."""

import json
from datetime import UTC, datetime
from typing import Any

import pytest
from tests.operator.support.cluster import Cluster, eventually
from tests.operator.support.running_operator import StubRouter

from fairlead_operator.names import CANARY_FAILED
from fairlead_operator.polling import canary as canary_watch

ASKED = {"trafficPercent": 25, "analysisSeconds": 1, "minRequests": 10}


@pytest.fixture(autouse=True)
def poll_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(canary_watch, "PERIOD", 0.1)


def revision(deployment: Any) -> str:
    return str(deployment["spec"]["template"]["metadata"]["labels"]["fairlead.dev/revision"])


def ready(address: str = "") -> dict[str, Any]:
    since = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    status = {"phase": "Running", "conditions": [{"type": "Ready", "status": "True", "lastTransitionTime": since}]}
    return status | ({"podIP": address, "podIPs": [{"ip": address}]} if address else {})


def figures(of: str, errors: int, canary: Any) -> dict[str, Any]:
    """A router's answer: 40 requests of the canary, 120 of the others."""
    times = {"buckets": {"50": 30}}
    sides = {"canary": {"requests": 40, "errors": errors, "ttft": times}, "stable": {"requests": 120, "errors": 0, "ttft": times}}
    return {"revision": of, "weight": 25, "trial": canary["metadata"]["uid"], **sides}


def begin(cluster: Cluster) -> tuple[str, Any]:
    """A service that serves, edited; its old revision and the canary's Deployment."""
    cluster.create(rollout={"canary": ASKED}, engine={"maxNumSeqs": 8})
    cluster.play_controllers()
    cluster.play_kubelet("qwen-router-1", ready("127.0.0.1"), "router")
    eventually(lambda: cluster.ready().get("status") == "True")
    old = revision(cluster.get("deployments", "qwen-worker"))
    assert cluster.get("deployments", "qwen-worker-canary") is None and told(cluster) == {}
    cluster.patch("inferenceservices", "qwen", {"spec": {"engine": {"maxNumSeqs": 9}}})
    return old, eventually(lambda: cluster.get("deployments", "qwen-worker-canary"))


def start(cluster: Cluster, canary: Any) -> None:
    count = dict.fromkeys(("replicas", "readyReplicas", "availableReplicas", "updatedReplicas"), 1)
    status = {"observedGeneration": canary["metadata"]["generation"], **count}
    cluster.patch("deployments", "qwen-worker-canary", {"status": status}, "status")
    cluster.play_kubelet("qwen-worker-canary-1", ready(), "worker-canary")


def told(cluster: Cluster) -> Any:
    return json.loads(cluster.get("configmaps", "qwen-split")["data"]["split.json"])


def test_a_canary_stands_beside_the_old_revision_and_is_promoted(cluster: Cluster, router: StubRouter) -> None:
    old, canary = begin(cluster)
    new = revision(canary)
    assert new != old == revision(cluster.get("deployments", "qwen-worker"))
    labels = canary["spec"]["template"]["metadata"]["labels"]
    assert canary["spec"]["selector"]["matchLabels"].items() <= labels.items() and labels["fairlead.dev/track"] == "canary"
    assert cluster.get("services", "qwen-workers")["spec"]["selector"].items() <= labels.items(), "routers find its pods"
    assert {"name": "FAIRLEAD_CANARY", "value": new} in canary["spec"]["template"]["spec"]["containers"][0]["env"]
    assert canary["spec"]["strategy"] == {"type": "Recreate"} and canary["spec"]["replicas"] == 1
    trial = canary["metadata"]["uid"]
    eventually(lambda: told(cluster) == {"revision": new, "weight": 25, "trial": trial})
    (owner,) = canary["metadata"]["ownerReferences"]
    assert owner["kind"] == "InferenceService" and owner["controller"]
    router.split = figures("another", 0, canary)
    start(cluster, canary)
    eventually(lambda: cluster.get("inferenceservices", "qwen")["status"]["canary"]["phase"] == "Analyzing")
    assert revision(cluster.get("deployments", "qwen-worker")) == old, "figures of another canary are none"
    router.split = figures(new, 0, canary)
    eventually(lambda: revision(cluster.get("deployments", "qwen-worker")) == new)
    eventually(lambda: cluster.get("inferenceservices", "qwen")["status"]["canary"]["phase"] == "Promoting")
    assert cluster.get("deployments", "qwen-worker-canary") is not None, "it serves until the old pods have been replaced"
    cluster.play_controllers()
    eventually(lambda: cluster.get("deployments", "qwen-worker-canary") is None and told(cluster) == {})
    eventually(lambda: cluster.condition("Progressing").get("reason") == "Complete")
    status = cluster.get("inferenceservices", "qwen")["status"]
    assert cluster.ready()["status"] == "True" and "canary" not in status and status["revision"] == f"qwen-{new}"


def test_a_bad_canary_is_rolled_back_with_its_figures_and_tried_again_when_asked(cluster: Cluster, router: StubRouter) -> None:
    old, canary = begin(cluster)
    new = revision(canary)
    router.split = figures(new, 12, canary)
    start(cluster, canary)
    eventually(lambda: cluster.condition("Stalled").get("reason") == "CanaryFailed")
    assert cluster.ready()["status"] == "True", "the old revision serves"
    assert "12 of 40 requests (30 %) failed, of the old revision 0 of 120" in cluster.condition("Degraded")["message"]
    eventually(lambda: cluster.get("deployments", "qwen-worker-canary") is None and told(cluster) == {})
    assert revision(cluster.get("deployments", "qwen-worker")) == old
    kept = cluster.get("controllerrevisions", f"qwen-worker-{new}")["metadata"]["annotations"]
    assert kept[CANARY_FAILED] in cluster.condition("Degraded")["message"]
    assert "annotations" not in cluster.get("inferenceservices", "qwen")["metadata"]
    eventually(lambda: [one for one in cluster.server.get(cluster.path("events"))["items"] if one["reason"] == "CanaryFailed"])
    cluster.patch("inferenceservices", "qwen", {"spec": {"rollout": {"canary": {"retryToken": "1"}}}})
    again = eventually(lambda: cluster.get("deployments", "qwen-worker-canary"))
    assert revision(again) == new and again["metadata"]["uid"] != canary["metadata"]["uid"]
    cluster.server.request("DELETE", cluster.path("pods", "qwen-worker-canary-1"))
    eventually(lambda: cluster.get("pods", "qwen-worker-canary-1") is None)
    start(cluster, again)
    eventually(lambda: told(cluster).get("trial") == again["metadata"]["uid"])
    eventually(lambda: (cluster.get("inferenceservices", "qwen")["status"].get("canary") or {}).get("phase") == "Analyzing")
    failed = cluster.get("controllerrevisions", f"qwen-worker-{new}")["metadata"].get("annotations", {}).get(CANARY_FAILED, "")
    assert failed == "", "what routers still say of the first trial counts no more"
    router.split = figures(new, 0, again)
    eventually(lambda: revision(cluster.get("deployments", "qwen-worker")) == new)
