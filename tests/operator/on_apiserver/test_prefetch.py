"""The Job of `spec.model.cache.prefetch` on a real API server: the test writes its status."""

from tests.operator.support import apiserver
from tests.operator.support.cluster import Cluster, eventually
from tests.operator.support.running_operator import StubRouter, run_operator

CLAIM = {"persistentVolumeClaim": {"claimName": "models"}}


def test_a_claim_is_filled_before_there_are_workers(server: apiserver.ApiServer, namespace: str, router: StubRouter) -> None:
    cluster, path = Cluster(server, namespace), f"/apis/batch/v1/namespaces/{namespace}/jobs"

    def cached() -> str:
        return str(cluster.condition("ModelCached").get("reason", ""))

    def jobs() -> dict[str, str]:
        return {one["metadata"]["name"]: one["metadata"]["uid"] for one in server.get(path)["items"]}

    with run_operator(server.kubeconfig, namespace, router.url):
        cluster.create(replicas=0, model={"cache": {**CLAIM, "prefetch": "Enabled"}})
        (name,) = eventually(jobs)
        eventually(lambda: cached() == "Starting")
        template = eventually(lambda: cluster.get("deployments", "qwen-worker"))["spec"]["template"]
        at = "2026-01-01T00:00:00Z"
        done = [{"type": kind, "status": "True", "lastTransitionTime": at} for kind in ("SuccessCriteriaMet", "Complete")]
        status = {"startTime": at, "completionTime": at, "succeeded": 1, "conditions": done}
        code, answer = server.request("PATCH", f"{path}/{name}/status", {"status": status}, "application/merge-patch+json")
        assert code == 200, answer
        eventually(lambda: cached() == "Cached")
        cluster.patch("inferenceservices", "qwen", {"spec": {"replicas": 2, "engine": {"maxNumSeqs": 3}}})
        eventually(lambda: cluster.get("deployments", "qwen-worker")["spec"]["replicas"] == 2)
        assert list(jobs()) == [name] and cached() == "Cached", "an edit of something else downloads nothing again"
    before = jobs()
    with run_operator(server.kubeconfig, namespace, router.url, worker_image="worker:2", image_pull_policy="Always"):
        cluster.patch("inferenceservices", "qwen", {"spec": {"replicas": 3}})
        eventually(lambda: cluster.get("deployments", "qwen-worker")["spec"]["replicas"] == 3)
        eventually(lambda: cached() == "Cached")
        assert jobs() == before, "another image of the operator downloads nothing again"
        assert "Job" not in cluster.condition("Degraded")["message"], "and no write of the Job is refused"
        cluster.patch("inferenceservices", "qwen", {"spec": {"model": {"uri": "hf://Qwen/Qwen3-4B"}}})
        eventually(lambda: len(jobs()) == 1 and name not in jobs())
        eventually(lambda: cached() == "Starting")
        before = cluster.get("deployments", "qwen-worker")["spec"]["template"]
        assert before != template
        cluster.patch("inferenceservices", "qwen", {"spec": {"model": {"cache": {"prefetch": "Disabled"}}}})
        eventually(lambda: not jobs() and cached() == "")
        assert cluster.get("deployments", "qwen-worker")["spec"]["template"] == before, "no worker is replaced for it"
