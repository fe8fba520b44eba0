"""Kubernetes' own controllers (HPA, Deployment, ReplicaSet, Job) beside the operator: which one decides, and which pod goes."""

import ssl
import subprocess
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from tests.operator.scaling.test_scaling import page, worker
from tests.operator.support import apiserver
from tests.operator.support.cluster import Cluster, eventually, install_crds
from tests.operator.support.running_operator import StubRouter, run_operator
from tests.operator.support.stub_server import StubServer
from tests.servers.redis_server import free_port

from fairlead_operator.polling import pod_events
from fairlead_operator.scaling.costs import ANNOTATION

GROUP = "external.metrics.k8s.io"
RUNNING = {"phase": "Running", "podIP": "10.0.0.9", "podIPs": [{"ip": "10.0.0.9"}], "conditions": [{"type": "Ready", "status": "True"}]}
CONTROLLERS = "horizontal-pod-autoscaler-controller,deployment-controller,replicaset-controller,job-controller,resourcequota-controller"


class Metrics:
    """An external metrics API with one figure, as an adapter of Prometheus or KEDA serves it."""

    def __init__(self, folder: Path) -> None:
        self.value = 0
        self.asked = 0
        key, certificate = folder / "metrics.key", folder / "metrics.crt"
        request = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
        subprocess.run([*request, "-keyout", str(key), "-out", str(certificate)], check=True, capture_output=True)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate, key)
        self._server = StubServer(self._answer, context)
        self.port = self._server.port

    def _answer(self, method: str, path: str, body: bytes) -> tuple[int, Any]:
        path = path.partition("?")[0].rstrip("/")
        if path.endswith("/queued"):
            self.asked += 1
            item = {"metricName": "queued", "metricLabels": {}, "value": str(self.value)}
            item["timestamp"] = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
            return 200, {"kind": "ExternalMetricValueList", "apiVersion": f"{GROUP}/v1beta1", "metadata": {}, "items": [item]}
        if path == f"/apis/{GROUP}/v1beta1":
            one = {"name": "queued", "singularName": "", "namespaced": True, "kind": "ExternalMetricValueList", "verbs": ["get"]}
            return 200, {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": f"{GROUP}/v1beta1", "resources": [one]}
        return 404, {"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": 404}

    def register(self, server: apiserver.ApiServer) -> None:
        """With the API server's aggregation layer, by a Service that is another name of this machine."""
        namespace = "/api/v1/namespaces/default/services"
        service = {"type": "ExternalName", "externalName": "localhost", "ports": [{"port": self.port}]}
        server.create(namespace, {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "metrics"}, "spec": service})
        spec = {"group": GROUP, "version": "v1beta1", "insecureSkipTLSVerify": True, "groupPriorityMinimum": 100, "versionPriority": 100}
        spec["service"] = {"namespace": "default", "name": "metrics", "port": self.port}
        body = {"apiVersion": "apiregistration.k8s.io/v1", "kind": "APIService", "metadata": {"name": f"v1beta1.{GROUP}"}, "spec": spec}
        server.create("/apis/apiregistration.k8s.io/v1/apiservices", body)

    def close(self) -> None:
        self._server.close()


@pytest.fixture(scope="module")
def metrics(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Metrics]:
    made = Metrics(tmp_path_factory.mktemp("metrics"))
    yield made
    made.close()


@pytest.fixture(scope="module")
def controlled(metrics: Metrics, tmp_path_factory: pytest.TempPathFactory) -> Iterator[apiserver.ApiServer]:
    """An API server of these tests' own, since controllers act on all that there is."""
    manager = apiserver.program("kube-controller-manager")
    problem = apiserver.missing() or ("" if manager else "kube-controller-manager not found: run `make kubernetes` once")
    if problem:
        pytest.skip(problem)
    folder = tmp_path_factory.mktemp("manager")
    with apiserver.start() as server:
        install_crds(server)
        metrics.register(server)
        flags = [f"--kubeconfig={server.kubeconfig}", f"--controllers={CONTROLLERS}", "--leader-elect=false", "--bind-address=127.0.0.1"]
        flags += [f"--secure-port={free_port()}", f"--cert-dir={folder}", "--horizontal-pod-autoscaler-sync-period=300ms"]
        with (folder / "log").open("wb") as log:
            process = subprocess.Popen([str(manager), *flags], stdout=log, stderr=log)
        try:
            yield server
        finally:
            process.kill()
            process.wait()


def make_namespace(server: apiserver.ApiServer, name: str) -> Cluster:
    server.create("/api/v1/namespaces", {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})
    return Cluster(server, name)


def autoscaler() -> dict[str, Any]:
    """As `kubectl autoscale` makes it, on a figure of the service's routers."""
    metric = {"type": "External", "external": {"metric": {"name": "queued"}, "target": {"type": "AverageValue", "averageValue": "10"}}}
    spec = {
        "scaleTargetRef": {"apiVersion": "fairlead.dev/v1alpha1", "kind": "InferenceService", "name": "qwen"},
        "minReplicas": 1,
        "maxReplicas": 6,
        "metrics": [metric],
        "behavior": {"scaleDown": {"stabilizationWindowSeconds": 0}},
    }
    return {"apiVersion": "autoscaling/v2", "kind": "HorizontalPodAutoscaler", "metadata": {"name": "qwen"}, "spec": spec}


def test_an_hpa_decides_alone_and_the_replica_set_deletes_the_cheapest_pods(
    controlled: apiserver.ApiServer, metrics: Metrics, router: StubRouter
) -> None:
    namespace = "hpa"
    cluster = make_namespace(controlled, namespace)

    def pods(component: str) -> list[Any]:
        found = controlled.get(cluster.path("pods") + f"?labelSelector=app.kubernetes.io/component={component}")["items"]
        return [pod for pod in found if not pod["metadata"].get("deletionTimestamp")]

    def asked_for() -> int:
        return int(cluster.get("inferenceservices", "qwen")["spec"]["replicas"])

    metrics.value = 20
    with run_operator(controlled.kubeconfig, namespace, router.url):
        cluster.create(replicas=2, scaling={"minReplicas": 1, "maxReplicas": 5})
        eventually(lambda: len(pods("worker")) == 2 and len(pods("router")) == 2)
        controlled.create(f"/apis/autoscaling/v2/namespaces/{namespace}/horizontalpodautoscalers", autoscaler())
        eventually(lambda: metrics.asked > 2)
        assert asked_for() == 2 and cluster.get("inferenceservices", "qwen")["metadata"]["generation"] == 1
        metrics.value = 50
        eventually(lambda: asked_for() == 5)
        eventually(lambda: len(pods("worker")) == 5)
        for number, pod in enumerate([*pods("worker"), *pods("router")]):
            ip = f"10.0.0.{number + 1}"
            cluster.patch("pods", pod["metadata"]["name"], {"status": {**RUNNING, "podIP": ip, "podIPs": [{"ip": ip}]}}, "status")
        names = sorted(pod["metadata"]["name"] for pod in pods("worker"))
        worth = {name: 1000 * (number * 3 % 5) for number, name in enumerate(names)}
        router.demand = page([worker(name, hit_tokens=tokens) for name, tokens in worth.items()])
        eventually(lambda: cluster.ready().get("status") == "True")
        metrics.value = 20
        eventually(lambda: asked_for() == 2)
        eventually(lambda: len(pods("worker")) == 2)
        left = {pod["metadata"]["name"] for pod in pods("worker")}
        assert left == {name for name, tokens in worth.items() if tokens >= 3000}, worth
        assert {pod["metadata"]["annotations"][ANNOTATION] for pod in pods("worker")} == {str(2 * worth[name]) for name in left}
        rounds = metrics.asked
        eventually(lambda: metrics.asked > rounds + 3)
        time.sleep(0.5)  # the absence of a write can only be waited for
        service = cluster.get("inferenceservices", "qwen")
        assert (asked_for(), service["metadata"]["generation"]) == (2, 3), "two changes, both the HPA's"
        path = f"/apis/autoscaling/v2/namespaces/{namespace}/horizontalpodautoscalers/qwen"
        said = {one["type"]: one["status"] for one in controlled.get(path)["status"]["conditions"]}
        assert said["AbleToScale"] == said["ScalingActive"] == "True"


def test_a_quota_that_keeps_a_download_away_is_a_fault_until_the_pod_template_gives_what_it_wants(
    controlled: apiserver.ApiServer, router: StubRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pod_events, "STUCK_AFTER", 0.5)
    monkeypatch.setattr(pod_events, "PERIOD", 0.5)
    cluster = make_namespace(controlled, "quota")

    def pods() -> list[str]:
        return [one["metadata"]["name"] for one in controlled.get(cluster.path("pods"))["items"] if "-prefetch-" in one["metadata"]["name"]]

    quota = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "team"}, "spec": {"hard": {"limits.cpu": "2"}}}
    controlled.create(cluster.path("resourcequotas"), quota)  # the Job's own limit is 4
    eventually(lambda: (cluster.get("resourcequotas", "team").get("status") or {}).get("hard"))
    with run_operator(controlled.kubeconfig, cluster.namespace, router.url):
        cluster.create(replicas=0, model={"cache": {"persistentVolumeClaim": {"claimName": "models"}, "prefetch": "Enabled"}})
        eventually(lambda: cluster.condition("ModelCached").get("reason") == "QuotaExceeded")
        words = "lower resources.limits.cpu of container worker in spec.podTemplate"
        assert words in cluster.condition("ModelCached")["message"] and not pods()
        own = {"name": "worker", "resources": {"limits": {"cpu": "2"}}}
        cluster.patch("inferenceservices", "qwen", {"spec": {"podTemplate": {"spec": {"containers": [own]}}}})
        eventually(lambda: len(pods()) == 1 and cluster.condition("ModelCached")["reason"] in ("Starting", "Downloading"))
