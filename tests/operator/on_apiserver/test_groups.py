"""LeaderWorkerSet's CRD is installed and removed while the operator runs. The tests simulate controllers and kubelets."""

from base64 import b64decode
from collections.abc import Iterator
from typing import Any

import pytest
from tests.operator.support import apiserver, foreign_crds
from tests.operator.support.cluster import CRDS, MERGE, Cluster, eventually
from tests.operator.support.running_operator import StubRouter, run_operator

from fairlead_operator.kube import discovery as optional

ENGINE = {"tensorParallel": 16, "nodes": 2}


class Groups(Cluster):
    """One namespace, and the sets in it."""

    @property
    def place(self) -> str:
        return f"/apis/leaderworkerset.x-k8s.io/v1/namespaces/{self.namespace}/leaderworkersets/qwen-worker"

    def the_set(self) -> Any:
        return self.server.get(self.place) or None

    def secret(self, the_set: Any) -> Any:
        """The one that the pods of the set refer to."""
        (container,) = the_set["spec"]["leaderWorkerTemplate"]["leaderTemplate"]["spec"]["containers"]
        (name,) = [one["valueFrom"]["secretKeyRef"]["name"] for one in container["env"] if one["name"] == "NODES_SECRET"]
        return self.get("secrets", name)

    def play_group(self, number: int, *, ready: bool = True) -> None:
        """Leader and follower of one group, as LeaderWorkerSet's controller makes and names them."""
        templates = eventually(self.the_set)["spec"]["leaderWorkerTemplate"]
        for name, template in ((f"qwen-worker-{number}", "leaderTemplate"), (f"qwen-worker-{number}-1", "workerTemplate")):
            if self.get("pods", name) is None:
                labels = templates[template]["metadata"]["labels"] | {"leaderworkerset.sigs.k8s.io/name": "qwen-worker"}
                body = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "labels": labels}}
                self.server.create(self.path("pods"), body | {"spec": templates[template]["spec"]}, strict=False)
            said = "True" if ready or template == "workerTemplate" else "False"
            status = {
                "phase": "Running",
                "podIP": "10.0.0.9",
                "podIPs": [{"ip": "10.0.0.9"}],
                "conditions": [{"type": "Ready", "status": said}],
            }
            self.patch("pods", name, {"status": status}, "status")

    def play_routers(self) -> None:
        deployment = eventually(lambda: self.get("deployments", "qwen-router"))
        count, generation = deployment["spec"]["replicas"], deployment["metadata"]["generation"]
        counts = {"replicas": count, "updatedReplicas": count, "readyReplicas": count, "availableReplicas": count}
        self.patch("deployments", "qwen-router", {"status": {"observedGeneration": generation, **counts}}, "status")


@pytest.fixture
def cluster(server: apiserver.ApiServer, namespace: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Groups]:
    monkeypatch.setattr(optional, "PERIOD", 0.3)
    crd = foreign_crds.crd(*foreign_crds.LEADER_WORKER_SET)
    yield Groups(server, namespace)
    server.request("DELETE", f"{CRDS}/{crd['metadata']['name']}")


def test_without_the_crd_it_says_so_and_with_it_groups_are_made_counted_and_kept(cluster: Groups, router: StubRouter) -> None:
    server = cluster.server
    with run_operator(server.kubeconfig, cluster.namespace, router.url):
        cluster.create(engine=ENGINE, replicas=2)
        eventually(lambda: cluster.ready().get("reason") == "LeaderWorkerSetMissing")
        assert "leaderworkerset.x-k8s.io/v1" in cluster.ready()["message"] and "install" in cluster.ready()["message"]
        assert cluster.get("deployments", "qwen-router") is None, "nothing is made by half"

        server.create(CRDS, foreign_crds.crd(*foreign_crds.LEADER_WORKER_SET))
        made = eventually(cluster.the_set)
        assert made["spec"]["leaderWorkerTemplate"]["size"] == 2 and cluster.get("deployments", "qwen-worker") is None
        secret = cluster.secret(made)
        assert secret["immutable"] and len(b64decode(secret["data"]["secret"])) > 40
        assert {entry["manager"] for entry in secret["metadata"]["managedFields"]} == {"fairlead-operator"}
        cluster.play_group(0)
        cluster.play_group(1, ready=False)
        cluster.play_routers()

        def counts() -> Any:
            said = cluster.get("inferenceservices", "qwen").get("status") or {}
            return said.get("readyReplicas"), said.get("replicas"), said.get("updatedReplicas")

        eventually(lambda: counts() == (1, 2, 2))  # followers are no workers
        eventually(lambda: cluster.ready().get("status") == "True")
        assert cluster.condition("Available")["reason"] == "Reduced" and cluster.condition("Progressing")["status"] == "True"
        cluster.play_group(1)
        eventually(lambda: cluster.condition("Progressing").get("reason") == "Complete")

        code, _ = server.request("PATCH", cluster.place, {"spec": {"replicas": 7}}, MERGE)
        assert code == 200
        eventually(lambda: cluster.the_set()["spec"]["replicas"] == 2)
        cluster.patch("inferenceservices", "qwen", {"spec": {"replicas": 3}}, "scale")
        eventually(lambda: cluster.the_set()["spec"]["replicas"] == 3)
        code, answer = server.request("PATCH", cluster.path("inferenceservices", "qwen"), {"spec": {"engine": {"nodes": 4}}}, MERGE)
        assert code == 422 and "spec.engine.nodes cannot be changed" in answer["message"]
    left = cluster.the_set()["metadata"]["resourceVersion"]

    with run_operator(server.kubeconfig, cluster.namespace, router.url):
        cluster.play_group(2)
        eventually(lambda: cluster.ready().get("status") == "True")
        assert cluster.the_set()["metadata"]["resourceVersion"] == left, "a restart writes nothing to what is as it was left"
        assert cluster.secret(cluster.the_set()) == secret, "nor another value to the Secret, which it cannot read"
        server.request("DELETE", f"{CRDS}/leaderworkersets.leaderworkerset.x-k8s.io")
        eventually(lambda: cluster.condition("Degraded").get("reason") == "LeaderWorkerSetMissing")
