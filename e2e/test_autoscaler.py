"""A HorizontalPodAutoscaler scales an InferenceService by a metric of its workers, over the API that prometheus-adapter serves."""

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from e2e.cluster.cluster import LocalCluster
from e2e.service import Load, Service
from e2e.system import HERE, PATIENCE, System, client_pod, eventually

pytestmark = pytest.mark.long

ADAPTER = "metrics-adapter"
NAMESPACE = "metrics"
API = "v1beta2.custom.metrics.k8s.io"
METRIC, WORKERS_ADMIN_PORT = "fairlead_http_requests_in_flight", 8002
LABELS = {"app": ADAPTER}


@pytest.fixture(scope="module")
def metrics_api(installed: System, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Serve METRIC of pods at custom.metrics.k8s.io."""
    if not isinstance(installed.cluster, LocalCluster):
        pytest.skip("the test would replace the metrics API of a cluster that is not its own")
    folder = tmp_path_factory.mktemp("adapter")
    kubectl, timeout = installed.cluster.kubectl, f"--timeout={60 * PATIENCE:.0f}s"
    try:
        installed.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}})
        installed.apply(*adapter(installed, certificate(folder)))
        kubectl("wait", "-n", NAMESPACE, "pod/client", "--for=condition=Ready", timeout)
        kubectl("wait", f"apiservice/{API}", "--for=condition=Available", timeout)
        yield
    finally:  # no namespace can be deleted while an APIService without its server is left
        kubectl("delete", f"apiservice/{API}", f"clusterrolebinding/{ADAPTER}", "--ignore-not-found")
        kubectl("delete", "namespace", NAMESPACE, "--ignore-not-found", "--wait=false")


@pytest.fixture(scope="module")
def service(installed: System, metrics_api: None) -> Iterator[Service]:
    service = Service(installed, "elastic")
    with service.running(service.manifest(replicas=1, scaling={"minReplicas": 1, "maxReplicas": 3}), replicas=1):
        yield service
        installed.cluster.kubectl("delete", "hpa", service.name, "-n", installed.models, "--ignore-not-found")


def test_an_autoscaler_adds_a_worker_under_load_and_removes_it_afterwards(service: Service) -> None:
    service.system.apply(autoscaler(service))
    with Load(service, concurrency=6, max_tokens=200) as load:
        service.wait_ready(replicas=2)
        eventually(lambda: condition(service, "ScalingActive") == ("True", "ValidMetricFound"), 30, "an autoscaler that reads the metric")
    load.assert_answered()
    assert load.outcome["longest_gap"] < 60 * PATIENCE
    with Load(service, concurrency=1) as light:
        service.wait_ready(replicas=1)
        eventually(lambda: len(service.pods()) == 1, 120, "one worker pod left")
    light.assert_answered()
    (event, *_) = [one for one in events(service) if "New size: 2" in one["message"]]
    assert METRIC in event["message"], event


def autoscaler(service: Service) -> dict[str, Any]:
    """Return the manifest of docs/guides/scaling.md with a lower target and shorter delays.

    Between two requests of a slow client the metric is below its target: without a delay the new worker would go before it is ready.
    """
    delays = {"scaleUp": 0, "scaleDown": round(60 * PATIENCE)}
    metric = {"metric": {"name": METRIC}, "target": {"type": "AverageValue", "averageValue": "3"}}
    return {
        "apiVersion": "autoscaling/v2",
        "kind": "HorizontalPodAutoscaler",
        "metadata": {"name": service.name, "namespace": service.system.models},
        "spec": {
            "scaleTargetRef": {"apiVersion": "fairlead.dev/v1alpha1", "kind": "InferenceService", "name": service.name},
            "minReplicas": 1,
            "maxReplicas": 2,
            "metrics": [{"type": "Pods", "pods": metric}],
            "behavior": {side: {"stabilizationWindowSeconds": seconds} for side, seconds in delays.items()},
        },
    }


def condition(service: Service, kind: str) -> tuple[str, str]:
    status = service.system.get("hpa", service.name)["status"]
    found = [one for one in status.get("conditions", []) if one["type"] == kind]
    return (found[0]["status"], found[0]["reason"]) if found else ("", "")


def events(service: Service) -> list[dict[str, Any]]:
    selector = f"involvedObject.kind=HorizontalPodAutoscaler,involvedObject.name={service.name}"
    return list(service.system.get("events", "--field-selector", selector)["items"])


def certificate(folder: Path) -> dict[str, str]:
    """Return a certificate and its key in PEM."""
    make = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"]
    make += ["-subj", f"/CN={ADAPTER}", "-keyout", "tls.key", "-out", "tls.crt"]
    subprocess.run(make, cwd=folder, check=True, capture_output=True)
    return {name: (folder / name).read_text() for name in ("tls.key", "tls.crt")}


def adapter(system: System, pair: dict[str, str]) -> list[dict[str, Any]]:
    """Return the adapter's pod and what lets it read pods, and the API server find it."""

    def named(kind: str, version: str = "v1", **fields: Any) -> dict[str, Any]:
        return {"apiVersion": version, "kind": kind, "metadata": {"name": ADAPTER, "namespace": NAMESPACE}, **fields}

    rbac = "rbac.authorization.k8s.io"
    pod = client_pod(NAMESPACE, system.images.client)
    pod["metadata"]["labels"] = LABELS
    pod["spec"]["serviceAccountName"] = ADAPTER
    (container,) = pod["spec"]["containers"]
    container["command"] = ["python", "/script/metrics_adapter.py", METRIC, str(WORKERS_ADMIN_PORT), "/certificates"]
    container["readinessProbe"] = {"tcpSocket": {"port": 6443}, "periodSeconds": 1}
    container["volumeMounts"] += [{"name": name, "mountPath": f"/{name}"} for name in ("script", "certificates")]
    pod["spec"]["volumes"] += [
        {"name": "script", "configMap": {"name": ADAPTER}},
        {"name": "certificates", "secret": {"secretName": ADAPTER}},
    ]
    group = {"group": "custom.metrics.k8s.io", "version": "v1beta2", "groupPriorityMinimum": 100, "versionPriority": 100}
    reach = {"service": {"name": ADAPTER, "namespace": NAMESPACE, "port": 443}, "insecureSkipTLSVerify": True}
    return [
        named("ServiceAccount"),
        named("Secret", stringData=pair),
        named("ConfigMap", data={"metrics_adapter.py": (HERE / "client" / "metrics_adapter.py").read_text()}),
        named("Service", spec={"selector": LABELS, "ports": [{"port": 443, "targetPort": 6443}]}),
        named(
            "ClusterRoleBinding",
            f"{rbac}/v1",
            roleRef={"apiGroup": rbac, "kind": "ClusterRole", "name": "view"},
            subjects=[{"kind": "ServiceAccount", "name": ADAPTER, "namespace": NAMESPACE}],
        ),
        pod,
        {"apiVersion": "apiregistration.k8s.io/v1", "kind": "APIService", "metadata": {"name": API}, "spec": {**group, **reach}},
    ]
