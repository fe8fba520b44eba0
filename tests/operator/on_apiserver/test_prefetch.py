"""The Job of `spec.model.cache.prefetch` on a real API server: the test writes its status, or the real Job controller under a quota."""

from pathlib import Path

import pytest
from tests.operator.support import apiserver, controllers
from tests.operator.support.cluster import Cluster, eventually
from tests.operator.support.running_operator import StubRouter, run_operator

from fairlead_operator.api.crd import custom_resource_definition
from fairlead_operator.polling import pod_events

CLAIM = {"persistentVolumeClaim": {"claimName": "models"}}


def test_a_claim_is_filled_before_there_are_workers(
    server: apiserver.ApiServer, namespace: str, router: StubRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(server.kubeconfig))
    cluster, path = Cluster(server, namespace), f"/apis/batch/v1/namespaces/{namespace}/jobs"

    def cached() -> str:
        conditions = (cluster.get("inferenceservices", "qwen").get("status") or {}).get("conditions") or []
        return next((one["reason"] for one in conditions if one["type"] == "ModelCached"), "")

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
        degraded = next(one for one in cluster.get("inferenceservices", "qwen")["status"]["conditions"] if one["type"] == "Degraded")
        assert "Job" not in degraded["message"], "and no write of the Job is refused"
        cluster.patch("inferenceservices", "qwen", {"spec": {"model": {"uri": "hf://Qwen/Qwen3-4B"}}})
        eventually(lambda: len(jobs()) == 1 and name not in jobs())
        eventually(lambda: cached() == "Starting")
        before = cluster.get("deployments", "qwen-worker")["spec"]["template"]
        assert before != template
        cluster.patch("inferenceservices", "qwen", {"spec": {"model": {"cache": {"prefetch": "Disabled"}}}})
        eventually(lambda: not jobs() and cached() == "")
        assert cluster.get("deployments", "qwen-worker")["spec"]["template"] == before, "no worker is replaced for it"


def test_a_quota_that_keeps_its_pod_away_is_a_fault_until_the_pod_template_gives_what_it_wants(
    router: StubRouter, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if problem := controllers.missing():
        pytest.skip(problem)
    monkeypatch.setattr(pod_events, "STUCK_AFTER", 0.5)
    monkeypatch.setattr(pod_events, "PERIOD", 0.5)
    with apiserver.start() as server:
        server.create("/apis/apiextensions.k8s.io/v1/customresourcedefinitions", custom_resource_definition())
        apiserver.wait_for_crd(server)
        monkeypatch.setenv("KUBECONFIG", str(server.kubeconfig))
        cluster = Cluster(server, controllers.NAMESPACE)
        hard = {"limits.cpu": "2"}  # the Job's own limit is 4
        quota = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "team"}, "spec": {"hard": hard}}

        def cached() -> tuple[str, str]:
            conditions = (cluster.get("inferenceservices", "qwen").get("status") or {}).get("conditions") or []
            return next(((one["reason"], one["message"]) for one in conditions if one["type"] == "ModelCached"), ("", ""))

        def pods() -> list[str]:
            return [one["metadata"]["name"] for one in server.get(controllers.PODS)["items"] if "-prefetch-" in one["metadata"]["name"]]

        with controllers.run_components(server, tmp_path, ("job-controller", "resourcequota-controller")):
            server.create(f"/api/v1/namespaces/{controllers.NAMESPACE}/resourcequotas", quota)
            path = f"/api/v1/namespaces/{controllers.NAMESPACE}/resourcequotas/team"
            eventually(lambda: (server.get(path).get("status") or {}).get("hard"))
            with run_operator(server.kubeconfig, controllers.NAMESPACE, router.url):
                cluster.create(replicas=0, model={"cache": {**CLAIM, "prefetch": "Enabled"}})
                _, message = eventually(lambda: cached() if cached()[0] == "QuotaExceeded" else ())
                assert "lower resources.limits.cpu of container worker in spec.podTemplate" in message and not pods()
                own = {"name": "worker", "resources": {"limits": {"cpu": "2"}}}
                cluster.patch("inferenceservices", "qwen", {"spec": {"podTemplate": {"spec": {"containers": [own]}}}})
                eventually(lambda: len(pods()) == 1 and cached()[0] == "FailedScheduling")  # this cluster has no node
