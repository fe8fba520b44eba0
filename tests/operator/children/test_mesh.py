"""Objects as a service mesh reads them: protocols of ports, tunnels in NetworkPolicies, and pods that must end (docs/guides/mesh.md)."""

from dataclasses import replace
from typing import Any

import pytest
from tests.operator.children.test_exposure import NOW
from tests.operator.support.manifests import SETTINGS, service

from fairlead_operator.desired import desired
from fairlead_operator.observed import Observed
from fairlead_operator.settings import Mesh

EVERYTHING: dict[str, Any] = {
    "batch": {"storageURI": "pvc://files"},
    "model": {"cache": {"persistentVolumeClaim": {"claimName": "models"}, "prefetch": "Enabled"}},
    "exposure": {"gateway": {"parentRef": {"name": "web"}, "backend": "EndpointPicker"}, "fromNamespaces": ["apps"]},
}
PROBES = {"169.254.7.127/32", "fd16:9254:7127:1337:ffff:ffff:ffff:ffff/128"}


def made(mesh: Mesh = "", **spec: Any) -> dict[tuple[str, str], Any]:
    settings = replace(SETTINGS, mesh=mesh, monitoring_namespaces=("monitoring",))
    return {(body["kind"], body["metadata"]["name"]): body for body in desired(service(**spec), Observed(), settings, NOW).objects}


def test_each_port_of_a_service_names_its_protocol() -> None:
    """Routers connect to addresses of pods, and Istio's sidecars send that with mTLS for tcp only (istio#34679)."""
    specs = {name: body["spec"] for (kind, name), body in made(**EVERYTHING).items() if kind == "Service"}
    protocols = {name: {port["name"]: port.get("appProtocol") for port in spec["ports"]} for name, spec in specs.items()}
    # Without appProtocol the name counts, and `grpc` is one for Istio.
    assert protocols == {"qwen": {"http": "http", "grpc": None}, "qwen-workers": {"http": "tcp"}, "qwen-batch": {"http": "http"}}
    assert specs["qwen-workers"]["clusterIP"] == "None", "a headless Service gives a listener for each pod"


@pytest.mark.parametrize(("mesh", "tunnel"), [("istio-ambient", 15008), ("linkerd", 4143)])
def test_callers_of_a_port_are_let_into_the_tunnel_and_no_others(mesh: Mesh, tunnel: int) -> None:
    plain, meshed = made(**EVERYTHING), made(mesh, **EVERYTHING)
    policies = [key for key in plain if key[0] == "NetworkPolicy"]
    assert len(policies) == 3
    for key in policies:
        before, after = plain[key]["spec"]["ingress"], meshed[key]["spec"]["ingress"]
        opened = [{**rule, "ports": [*rule["ports"], {"protocol": "TCP", "port": tunnel}]} for rule in before]
        kept = [rule for rule in after if rule not in opened]
        assert [rule for rule in after if rule in opened] == opened
        assert [{peer["ipBlock"]["cidr"] for peer in rule["from"]} for rule in kept] == ([PROBES] if mesh == "istio-ambient" else [])
        containers = meshed["Deployment", key[1]]["spec"]["template"]["spec"]["containers"]
        admin = next(port["containerPort"] for port in containers[0]["ports"] if port["name"] == "admin")
        assert all(rule["ports"] == [{"protocol": "TCP", "port": admin}] for rule in kept), "probes are of the admin port"


def test_a_mesh_restarts_no_pod() -> None:
    plain, meshed = made(**EVERYTHING), made("istio-ambient", **EVERYTHING)
    assert {key for key in plain if plain[key] != meshed[key]} == {key for key in plain if key[0] == "NetworkPolicy"}


def test_a_download_gets_no_sidecar_and_so_ends() -> None:
    (job,) = [body for (kind, _), body in made(**EVERYTHING).items() if kind == "Job"]
    metadata = job["spec"]["template"]["metadata"]
    assert metadata["labels"]["sidecar.istio.io/inject"] == "false" and metadata["annotations"] == {"linkerd.io/inject": "disabled"}


def test_labels_and_annotations_of_a_mesh_come_from_the_pod_templates() -> None:
    ports = {"traffic.sidecar.istio.io/excludeInboundPorts": "9002"}
    joined = {"metadata": {"labels": {"sidecar.istio.io/inject": "true"}, "annotations": ports}}
    objects = made(podTemplate=joined, router={"podTemplate": joined})
    for component in ("worker", "router"):
        metadata = objects["Deployment", f"qwen-{component}"]["spec"]["template"]["metadata"]
        assert metadata["labels"]["sidecar.istio.io/inject"] == "true" and metadata["annotations"] == ports
