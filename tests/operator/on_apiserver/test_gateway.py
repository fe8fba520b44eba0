"""The Gateway API's CRDs are installed and removed while the operator runs: it makes its objects, or reports what is missing."""

from typing import Any

import pytest
from tests.operator.support import apiserver, foreign_crds
from tests.operator.support.cluster import CRDS, Cluster, eventually
from tests.operator.support.running_operator import StubRouter, run_operator

from fairlead_operator.kube import discovery as optional

ROUTES, POOLS = "/apis/gateway.networking.k8s.io/v1", "/apis/inference.networking.k8s.io/v1"


def test_route_and_pool_are_made_when_their_crds_come_kept_over_a_restart_and_forgotten_when_they_go(
    server: apiserver.ApiServer, namespace: str, router: StubRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(optional, "PERIOD", 0.3)
    crds = [foreign_crds.crd(*foreign_crds.GATEWAY_API), foreign_crds.crd(*foreign_crds.INFERENCE)]
    cluster = Cluster(server, namespace)
    route, pool = f"{ROUTES}/namespaces/{namespace}/httproutes/qwen", f"{POOLS}/namespaces/{namespace}/inferencepools/qwen"
    try:
        with run_operator(server.kubeconfig, namespace, router.url):
            cluster.create(
                exposure={"gateway": {"parentRef": {"name": "web"}, "backend": "EndpointPicker", "hostnames": ["*.example.com"]}}
            )
            eventually(lambda: cluster.condition("GatewayReady").get("reason") == "GatewayApiMissing")
            server.create(CRDS, crds[0])
            eventually(lambda: cluster.condition("GatewayReady").get("reason") == "InferencePoolMissing")
            server.create(CRDS, crds[1])
            made = eventually(lambda: server.get(route))
            assert made["spec"]["rules"][0]["backendRefs"][0]["kind"] == "InferencePool" and eventually(lambda: server.get(pool))["spec"]
            eventually(lambda: cluster.condition("GatewayReady").get("reason") == "GatewayNotFound")

            parents = [{"parentRef": {"name": "web"}, "controllerName": "example.com/gateway", "conditions": [accepted()]}]
            code, answer = server.request("PATCH", f"{route}/status", {"status": {"parents": parents}}, "application/merge-patch+json")
            assert code == 200, answer
            eventually(lambda: cluster.condition("GatewayReady").get("status") == "True")

            code, _ = server.request("PATCH", route, {"spec": {"hostnames": ["other.example.com"]}}, "application/merge-patch+json")
            assert code == 200
            assert eventually(lambda: server.get(route)["spec"]["hostnames"] == ["*.example.com"]), "what others change is put back"

            left = [server.get(one)["metadata"]["resourceVersion"] for one in (route, pool)]
        with run_operator(server.kubeconfig, namespace, router.url):
            cluster.patch("inferenceservices", "qwen", {"spec": {"replicas": 2}})
            eventually(lambda: cluster.get("deployments", "qwen-worker")["spec"]["replicas"] == 2)
            assert [server.get(one)["metadata"]["resourceVersion"] for one in (route, pool)] == left, "a restart writes nothing"
            cluster.patch("inferenceservices", "qwen", {"spec": {"exposure": {"gateway": {"backend": "Router"}}}})
            eventually(lambda: server.get(pool) is None)
            assert eventually(lambda: server.get(route)["spec"]["rules"][0]["backendRefs"][0]["name"] == "qwen")

            server.request("DELETE", f"{CRDS}/{crds[0]['metadata']['name']}")
            eventually(lambda: cluster.condition("GatewayReady").get("reason") == "GatewayApiMissing")
            cluster.patch("inferenceservices", "qwen", {"spec": {"exposure": {"gateway": None}}})
            eventually(lambda: not cluster.condition("GatewayReady"))
    finally:
        for crd in crds:
            server.request("DELETE", f"{CRDS}/{crd['metadata']['name']}")


def accepted() -> dict[str, Any]:
    said = {"type": "Accepted", "status": "True", "reason": "Accepted", "message": "", "observedGeneration": 1}
    return {**said, "lastTransitionTime": "2026-01-01T00:00:00Z"}
