"""`spec.router` and the Gateway on a real API server: who owns the number of routers, and objects that other projects' schemas accept."""

from typing import Any

import pytest
from tests.operator.support import apiserver, foreign_crds
from tests.operator.support.cluster import CRDS, MERGE, Cluster, eventually
from tests.operator.support.running_operator import StubRouter, run_operator

from fairlead_operator.kube import discovery, gateways

HPA = "/apis/autoscaling/v2/namespaces/{}/horizontalpodautoscalers/qwen-router"


def scale(cluster: Cluster, replicas: int) -> None:
    """Set the number of routers as the HorizontalPodAutoscaler's controller does."""
    path = cluster.path("deployments", "qwen-router", "scale") + "?fieldManager=kube-controller-manager"
    code, answer = cluster.server.request("PATCH", path, {"spec": {"replicas": replicas}}, MERGE)
    assert code == 200, answer


def routers(cluster: Cluster) -> int:
    return int(cluster.get("deployments", "qwen-router")["spec"]["replicas"])


def status(cluster: Cluster) -> Any:
    return cluster.get("inferenceservices", "qwen").get("status") or {}


def test_the_autoscaler_sets_the_number_of_routers_within_the_bounds(
    server: apiserver.ApiServer, namespace: str, router: StubRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(discovery, "PERIOD", 0.3)
    cluster = Cluster(server, namespace)
    with run_operator(server.kubeconfig, namespace, router.url):
        cluster.create(router={"autoscaling": {"maxReplicas": 6}})
        made = eventually(lambda: server.get(HPA.format(namespace)))
        assert (made["spec"]["minReplicas"], made["spec"]["maxReplicas"]) == (2, 6)
        assert routers(cluster) == 2
        scale(cluster, 5)
        eventually(lambda: status(cluster).get("routers", {}).get("desiredReplicas") == 5)
        for annotation in ("one", "two"):  # every edit applies the Deployment again
            template = {"metadata": {"annotations": {"edit": annotation}}}
            cluster.patch("inferenceservices", "qwen", {"spec": {"router": {"podTemplate": template}}})
            eventually(lambda text=annotation: f"'edit': '{text}'" in str(cluster.get("deployments", "qwen-router")["spec"]["template"]))
            assert routers(cluster) == 5
        for outside, corrected in ((9, 6), (0, 2)):
            scale(cluster, outside)
            eventually(lambda wanted=corrected: routers(cluster) == wanted)
        scale(cluster, 4)
        eventually(lambda: status(cluster).get("routers", {}).get("desiredReplicas") == 4)
        assert "ReplicasConflict" not in str(status(cluster)), "this autoscaler is ours"
    with run_operator(server.kubeconfig, namespace, router.url):
        cluster.patch("inferenceservices", "qwen", {"spec": {"routing": {"holdTimeoutSeconds": 31}}})
        eventually(lambda: "--hold-timeout=31.0" in str(cluster.get("deployments", "qwen-router")["spec"]["template"]))
        assert routers(cluster) == 4, "also after a restart of the operator"
        cluster.patch("inferenceservices", "qwen", {"spec": {"router": {"autoscaling": None}}})
        eventually(lambda: server.get(HPA.format(namespace)) is None)
        eventually(lambda: routers(cluster) == 2)


def test_disruption_budgets_are_accepted(cluster: Cluster) -> None:
    cluster.create()
    eventually(lambda: cluster.get("poddisruptionbudgets", "qwen-worker"))

    def bounds() -> dict[str, Any]:
        spec = cluster.get("poddisruptionbudgets", "qwen-worker")["spec"]
        return {key: spec[key] for key in ("minAvailable", "maxUnavailable") if key in spec}

    for budget in ({"maxUnavailable": "25%"}, {"minAvailable": 1}):
        absent = dict.fromkeys({"minAvailable", "maxUnavailable"} - budget.keys())
        cluster.patch("inferenceservices", "qwen", {"spec": {"podDisruptionBudget": absent | budget}})
        eventually(lambda wanted=budget: bounds() == wanted)


def test_certificate_backend_policy_and_gateway_follow_what_the_cluster_serves(
    server: apiserver.ApiServer, namespace: str, router: StubRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(discovery, "PERIOD", 0.3)
    monkeypatch.setattr(gateways, "PERIOD", 0.3)
    wanted = (foreign_crds.GATEWAY_API, foreign_crds.GATEWAYS, foreign_crds.BACKEND_POLICIES, foreign_crds.CERTIFICATES)
    crds = [foreign_crds.crd(*one) for one in wanted]
    cluster = Cluster(server, namespace)
    routes, certificates = f"/apis/gateway.networking.k8s.io/v1/namespaces/{namespace}", f"/apis/cert-manager.io/v1/namespaces/{namespace}"
    try:
        with run_operator(server.kubeconfig, namespace, router.url):
            cluster.create(
                router={"tls": {"issuerRef": {"name": "company"}, "caConfigMap": "company-ca"}},
                exposure={"gateway": {"parentRef": {"name": "web"}, "hostnames": ["llm.example.com"]}},
            )
            eventually(lambda: cluster.condition("Degraded").get("reason") in ("CertManagerMissing", "GatewayApiMissing"))
            for crd in crds:
                server.create(CRDS, crd)
            made = eventually(lambda: server.get(f"{certificates}/certificates/qwen-router"))
            assert made["spec"]["secretName"] == "qwen-router-tls" and "llm.example.com" in made["spec"]["dnsNames"]
            policy = eventually(lambda: server.get(f"{routes}/backendtlspolicies/qwen"))
            assert policy["spec"]["validation"]["hostname"] == f"qwen.{namespace}.svc"
            assert eventually(lambda: server.get(f"{routes}/httproutes/qwen"))["spec"]["rules"][0]["backendRefs"][0]["port"] == 443
            eventually(lambda: cluster.condition("GatewayReady").get("reason") == "GatewayNotFound")
            assert status(cluster)["url"] == f"https://qwen.{namespace}.svc/v1" and not status(cluster).get("externalURL")

            listener = {"name": "https", "protocol": "HTTPS", "port": 443, "hostname": "*.example.com"}
            listener["tls"] = {"certificateRefs": [{"name": "any"}]}
            gateway = {"apiVersion": "gateway.networking.k8s.io/v1", "kind": "Gateway", "metadata": {"name": "web", "namespace": namespace}}
            server.create(f"{routes}/gateways", gateway | {"spec": {"gatewayClassName": "any", "listeners": [listener]}})
            eventually(lambda: status(cluster).get("externalURL") == "https://llm.example.com/v1")
            accepted = condition("Accepted", "True", "Accepted")
            parents = [{"parentRef": {"name": "web"}, "controllerName": "example.com/gateway", "conditions": [accepted]}]
            patch_status(server, f"{routes}/httproutes/qwen", {"parents": parents})
            patch_status(server, f"{routes}/gateways/web", {"conditions": [condition("Programmed", "False", "AddressNotAssigned")]})
            eventually(lambda: cluster.condition("GatewayReady").get("reason") == "AddressNotAssigned")
            patch_status(server, f"{routes}/gateways/web", {"conditions": [condition("Programmed", "True", "Programmed")]})
            eventually(lambda: cluster.condition("GatewayReady").get("reason") == "Accepted")

            cluster.patch("inferenceservices", "qwen", {"spec": {"router": {"tls": None}}})
            eventually(lambda: server.get(f"{certificates}/certificates/qwen-router") is None)
            eventually(lambda: server.get(f"{routes}/backendtlspolicies/qwen") is None)
            assert [port["name"] for port in cluster.get("services", "qwen")["spec"]["ports"]] == ["http"]
    finally:
        for crd in crds:
            server.request("DELETE", f"{CRDS}/{crd['metadata']['name']}")


def condition(type_: str, truth: str, why: str) -> dict[str, Any]:
    fields = {"type": type_, "status": truth, "reason": why, "message": "", "observedGeneration": 1}
    return {**fields, "lastTransitionTime": "2026-01-01T00:00:00Z"}


def patch_status(server: apiserver.ApiServer, path: str, written: dict[str, Any]) -> None:
    code, answer = server.request("PATCH", f"{path}/status", {"status": written}, MERGE)
    assert code == 200, answer
