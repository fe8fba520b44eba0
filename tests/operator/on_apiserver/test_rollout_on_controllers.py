"""Rollouts by the real Deployment controller and scheduler; and the simulated controller compared with the real one."""

import copy
import random
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from tests.operator.simulated.api import Api
from tests.operator.simulated.deployments import Controller
from tests.operator.simulated.nodes import Nodes
from tests.operator.support import apiserver, controllers
from tests.operator.support.cluster import Cluster, eventually
from tests.operator.support.manifests import manifest
from tests.operator.support.running_operator import StubRouter, run_operator

from fairlead_operator.children import worker
from fairlead_operator.rollout.images import runtime_of
from fairlead_operator.rollout.strategy import revision_of

STEPS = 40  # random edits, at which the simulated controller is compared with the real one


@pytest.fixture(scope="module")
def controlled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[apiserver.ApiServer]:
    problem = controllers.missing()
    if problem:
        pytest.skip(problem)
    with controllers.start(tmp_path_factory.mktemp("controllers")) as server:
        yield server


def broken(pod: Any) -> bool:
    return "--broken" in (pod["spec"]["containers"][0].get("args") or [])


class Rolled(Cluster):
    """The service of these tests, and its workers."""

    def edit(self, engine: Any = None, **rollout: Any) -> None:
        self.patch("inferenceservices", "qwen", {"spec": {"engine": engine or {}, "rollout": rollout}})

    def settled(self, sequences: int) -> bool:
        """Ready, and every worker runs with `sequences`."""
        pods = self.workers()
        mine = [pod for pod in pods if f"--max-num-seqs={sequences}" in pod["spec"]["containers"][0]["args"]]
        return (
            len(pods) == len(mine) == 2 and self.condition("Progressing").get("reason") == "Complete" and self.ready()["status"] == "True"
        )

    def workers(self) -> list[Any]:
        listed = self.server.get(self.path("pods"))["items"]
        return [pod for pod in listed if "-worker-" in pod["metadata"]["name"] and "deletionTimestamp" not in pod["metadata"]]

    def surge(self) -> int:
        return int(self.get("deployments", "qwen-worker")["spec"]["strategy"]["rollingUpdate"]["maxSurge"])


def test_a_rollout_on_scarce_and_on_spare_gpus_and_one_that_is_taken_back(
    controlled: apiserver.ApiServer, router: StubRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "MIN_READY_SECONDS", 0)
    controllers.make_node(controlled, "node1", gpus=2)
    cluster = Rolled(controlled, controllers.NAMESPACE)
    spec = {"replicas": 2, "engine": {"maxNumSeqs": 1}, "rollout": {"surgeTimeoutSeconds": 2}}
    with controllers.Kubelets(controlled, broken) as kubelets, run_operator(controlled.kubeconfig, controllers.NAMESPACE, router.url):
        controlled.create(cluster.path("inferenceservices"), manifest("qwen", controllers.NAMESPACE, **spec))
        eventually(lambda: cluster.settled(1))

        kubelets.least_ready = None
        cluster.edit({"maxNumSeqs": 2})
        eventually(lambda: cluster.surge() == 0)
        eventually(lambda: "no room for a surge worker in 2 s: draining one first" in cluster.condition("Progressing")["message"])
        eventually(lambda: cluster.settled(2))
        assert kubelets.least_ready == 1, "one was drained, and never two"

        controllers.set_gpus(controlled, "node1", gpus=3)
        kubelets.least_ready = None
        cluster.edit({"maxNumSeqs": 3})
        eventually(lambda: cluster.settled(3))
        assert cluster.surge() == 1 and kubelets.least_ready == 2, "there was room: no worker was missing"

        before = {pod["metadata"]["uid"] for pod in cluster.workers()}
        cluster.edit({"maxNumSeqs": 4, "args": ["--broken"]})
        eventually(lambda: len(cluster.workers()) == 3)
        cluster.edit({"maxNumSeqs": 3, "args": []})
        eventually(lambda: cluster.settled(3))
        assert {pod["metadata"]["uid"] for pod in cluster.workers()} == before

        cluster.patch("inferenceservices", "qwen", {"spec": {"rollout": {"paused": True}, "engine": {"maxNumSeqs": 5}}})
        eventually(lambda: cluster.condition("Progressing").get("reason") == "Paused" and cluster.ready()["reason"] == "Serving")
        cluster.patch("inferenceservices", "qwen", {"spec": {"replicas": 3}})
        eventually(lambda: len(cluster.workers()) == 3)
        assert all("--max-num-seqs=3" in pod["spec"]["containers"][0]["args"] for pod in cluster.workers()), "scaled, and nothing rolled"
        cluster.patch("inferenceservices", "qwen", {"spec": {"replicas": 2, "rollout": {"paused": False}}})
        eventually(lambda: cluster.settled(5))

        listed = controlled.get(cluster.path("controllerrevisions"))["items"]
        second = next(one for one in listed if "--max-num-seqs=2" in one["data"]["template"]["spec"]["containers"][0].get("args", []))
        cluster.edit(revision=second["metadata"]["name"])
        eventually(lambda: cluster.settled(2))
        controlled.request("PATCH", cluster.path("deployments", "qwen-worker"), {"spec": {"paused": True}}, controllers.MERGE)
        eventually(lambda: not cluster.get("deployments", "qwen-worker")["spec"].get("paused"))
        cluster.edit(revision=None)
        eventually(lambda: cluster.settled(5))


def test_a_service_changes_its_engine_with_no_worker_missing(
    controlled: apiserver.ApiServer, router: StubRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real scheduler counts the GPU of an engine, which is in a sidecar container."""
    monkeypatch.setattr(worker, "MIN_READY_SECONDS", 0)
    images = {"vllm_image": "vllm:1", "sglang_image": "sglang:1"}
    controllers.make_node(controlled, "node2", gpus=3)
    cluster = Rolled(controlled, controllers.NAMESPACE)
    on_node2 = {"spec": {"nodeSelector": {"kubernetes.io/hostname": "node2"}}}
    spec = {"replicas": 2, "rollout": {"surgeTimeoutSeconds": 2}, "podTemplate": on_node2}

    def runs(runtime: str) -> bool:
        pods = cluster.workers()
        mine = [pod for pod in pods if runtime_of(pod) == runtime]
        complete = cluster.condition("Progressing").get("reason") == "Complete"
        return len(pods) == len(mine) == 2 and complete and cluster.ready()["status"] == "True"

    with (
        controllers.Kubelets(controlled, broken) as kubelets,
        run_operator(controlled.kubeconfig, controllers.NAMESPACE, router.url, **images),
    ):
        if cluster.get("inferenceservices", "qwen") is None:
            controlled.create(cluster.path("inferenceservices"), manifest("qwen", controllers.NAMESPACE, **spec))
        else:  # of the test above
            cluster.patch("inferenceservices", "qwen", {"spec": spec})
            eventually(lambda: all(pod["spec"].get("nodeName") == "node2" for pod in cluster.workers()))
        eventually(lambda: runs("Fairlead"))
        for runtime in ("VLLM", "Fairlead"):
            kubelets.least_ready = None
            cluster.edit({"runtime": runtime})
            eventually(lambda runtime=runtime: runs(runtime))
            assert kubelets.least_ready == 2, f"{runtime}: a worker was missing"
        controllers.set_gpus(controlled, "node2", gpus=2)
        cluster.edit({"runtime": "SGLang"})
        eventually(lambda: "no room for a surge worker in 2 s: draining one first" in cluster.condition("Progressing")["message"])
        eventually(lambda: runs("SGLang"))


class Beside:
    """One Deployment twice: by the real controllers, and by the simulated ones. Its pods have no node, and are ready when the test says."""

    NAME = "twin"

    def __init__(self, server: apiserver.ApiServer) -> None:
        self.server, self.api = server, Api()
        nodes = Nodes(self.api, random.Random(0), [0])
        self.controller = Controller(self.api, nodes.make_pod, nodes.end_pod)
        self.path = f"/apis/apps/v1/namespaces/{controllers.NAMESPACE}/deployments"

    def create(self, spec: Any) -> None:
        body = {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": self.NAME}, "spec": spec}
        self.server.create(self.path, body)
        self.api.put(copy.deepcopy(body))

    def edit(self, spec: Any) -> None:
        if "template" in spec:
            self._await_next_second()
        controllers.patch(self.server, f"{self.path}/{self.NAME}", {"spec": spec})
        self.api.edit(("Deployment", self.NAME), {"spec": spec})

    def make_ready(self, revision: str) -> None:
        """One more pod of this revision, where there is one that is not ready."""
        waiting = [pod for pod in self._pods() if revision_of(pod) == revision and not controllers.is_ready(pod)]
        if waiting:
            path = f"{controllers.PODS}/{waiting[0]['metadata']['name']}/status"
            ready = {"type": "Ready", "status": "True", "lastTransitionTime": "2026-01-01T00:00:00Z"}
            controllers.patch(self.server, path, {"status": {"phase": "Running", "conditions": [ready]}})
        mine = [pod for pod in self.api.of("Pod") if revision_of(pod) == revision and pod["sim"].ready is None]
        for pod in mine[:1]:
            pod["sim"].ready = 0.0

    def real(self) -> dict[str, tuple[int, int]]:
        """Revision → its ReplicaSet's size and ready pods, once the controllers have come to rest; those of size 0 are left out."""
        sets = self.server.get(self.path.replace("deployments", "replicasets"))["items"]
        mine = [one for one in sets if one["metadata"]["name"].startswith(f"{self.NAME}-")]
        return {
            revision_of(one["spec"]["template"]): (one["spec"]["replicas"], one["status"].get("readyReplicas", 0))
            for one in mine
            if one["spec"]["replicas"]
        }

    def simulated(self) -> dict[str, tuple[int, int]]:
        for _ in range(20):
            self.controller.sync_sets(self.NAME)
            self.controller.sync(self.NAME)
        return {revision_of(one.template): (one.replicas, one.ready) for one in self.controller.sets if one.replicas}

    def _await_next_second(self) -> None:
        """Age decides between ReplicaSets of one size, and its unit is a second: of two of the same second, the controller takes either."""
        sets = self.server.get(self.path.replace("deployments", "replicasets"))["items"]
        latest = max((datetime.fromisoformat(one["metadata"]["creationTimestamp"]) for one in sets), default=None)
        if latest is not None:
            eventually(lambda: datetime.now(UTC) - latest >= timedelta(seconds=1))

    def _pods(self) -> list[Any]:
        selector = f"labelSelector=app%3D{self.NAME}"
        return [pod for pod in self.server.get(f"{controllers.PODS}?{selector}")["items"] if "deletionTimestamp" not in pod["metadata"]]


def twin(revision: str, **more: Any) -> dict[str, Any]:
    labels = {"app": "twin", "fairlead.dev/revision": revision}
    container = {"name": "worker", "image": "w:1", "args": [revision], "resources": {"limits": {"nvidia.com/gpu": "64"}}}
    return {"template": {"metadata": {"labels": labels}, "spec": {"containers": [container]}}, **more}


def bounds(surge: int, unavailable: int) -> dict[str, Any]:
    return {"strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": surge, "maxUnavailable": unavailable}}}


def test_the_simulated_deployment_controller_counts_as_the_real_one(controlled: apiserver.ApiServer) -> None:
    """Random edits of size, template, bounds and pause, and pods that become ready: after each, both have the same ReplicaSets."""
    chance = random.Random(7)
    both = Beside(controlled)
    both.create({"selector": {"matchLabels": {"app": "twin"}}, "replicas": 3, "progressDeadlineSeconds": 600, **twin("a"), **bounds(1, 0)})
    done: list[Any] = []
    for _ in range(STEPS):
        same(both, done)
        what = chance.choices(["ready", "template", "replicas", "bounds", "paused"], weights=[6, 2, 2, 2, 1])[0]
        change: Any = chance.choice(sorted(both.real()) or ["a"])
        if what == "ready":
            both.make_ready(change)
        else:
            change = {
                "template": lambda: twin(chance.choice("abcd")),
                "replicas": lambda: {"replicas": chance.randint(0, 6)},
                "bounds": lambda: bounds(*chance.choice([(1, 0), (0, 1)])),
                "paused": lambda: {"paused": chance.random() < 0.5},
            }[what]()
            both.edit(change)
        done.append((what, change))
    same(both, done)


def same(both: Beside, done: list[Any]) -> None:
    simulated = both.simulated()
    deadline = time.monotonic() + 30.0
    while both.real() != simulated:
        assert time.monotonic() < deadline, (both.real(), simulated, done)
        time.sleep(0.02)
