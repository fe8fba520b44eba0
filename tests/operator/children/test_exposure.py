"""Access to a service: its NetworkPolicies, flow by flow, and the objects of the Gateway API. Pure."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.operator.children.test_desired import NOW
from tests.operator.support.manifests import SETTINGS, service

from fairlead_common.http.inference_paths import INFERENCE
from fairlead_operator.api import InferenceService
from fairlead_operator.desired import desired
from fairlead_operator.observed import Observed
from fairlead_operator.revisions import router_revision, worker_revision

NAMESPACE = "kubernetes.io/metadata.name"
ALL = frozenset({"HTTPRoute", "InferencePool"})
ROUTER = {"app.kubernetes.io/managed-by": "fairlead", "app.kubernetes.io/instance": "qwen", "app.kubernetes.io/component": "router"}
WORKER = ROUTER | {"app.kubernetes.io/component": "worker"}
OPERATOR = {"app.kubernetes.io/name": "fairlead", "app.kubernetes.io/component": "operator"}


def made(one: InferenceService, served: frozenset[str] = frozenset(), **more: Any) -> dict[tuple[str, str], Any]:
    settings = SETTINGS.__class__(
        **{**SETTINGS.__dict__, "operator_namespace": "fairlead-system", "monitoring_namespaces": ("monitoring",)}
    )
    return {(body["kind"], body["metadata"]["name"]): body for body in desired(one, Observed(served=served, **more), settings, NOW).objects}


def lets_in(policy: Any, port: int, namespace: str, labels: dict[str, str], *, home: str = "default") -> bool:
    """As a policy engine would decide for a connection from a pod, or with no labels and namespace from outside the cluster."""
    for rule in policy["spec"]["ingress"]:
        if not any(one["port"] == port for one in rule["ports"]):
            continue
        if "from" not in rule:
            return True
        for peer in rule["from"]:
            chosen = peer.get("namespaceSelector")
            if chosen is None:
                inside = namespace == home
            else:
                inside = bool(namespace) and chosen.get("matchLabels", {}).get(NAMESPACE, namespace) == namespace
            if inside and peer.get("podSelector", {}).get("matchLabels", {}).items() <= labels.items():
                return True
    return False


FLOWS = [
    # port, from namespace, with labels: open by default, with forwardingMode Redirect, with fromNamespaces [apps]
    ("worker", 8000, "default", ROUTER, (True, True, True)),
    ("worker", 8000, "default", WORKER, (False, True, True)),
    ("worker", 8000, "default", WORKER | {"app.kubernetes.io/instance": "other"}, (False, True, True)),
    ("worker", 8000, "fairlead-system", OPERATOR, (False, True, False)),
    ("worker", 8000, "monitoring", {"app": "prometheus"}, (False, True, False)),
    ("worker", 8000, "apps", {"app": "client"}, (False, True, True)),
    ("worker", 8000, "", {}, (False, True, False)),
    ("worker", 8002, "default", ROUTER, (True, True, True)),  # polls
    ("worker", 8002, "default", WORKER, (True, True, True)),  # warming
    ("worker", 8002, "default", WORKER | {"app.kubernetes.io/instance": "other"}, (False, False, False)),
    ("worker", 8002, "fairlead-system", OPERATOR, (True, True, True)),
    ("worker", 8002, "elsewhere", OPERATOR, (False, False, False)),
    ("worker", 8002, "monitoring", {"app": "prometheus"}, (True, True, True)),
    ("worker", 8002, "apps", {"app": "client"}, (False, False, False)),
    ("worker", 8002, "default", {}, (False, False, False)),
    ("worker", 8002, "", {}, (False, False, False)),
    ("router", 8080, "fairlead-system", OPERATOR, (True, True, True)),  # the proof that a service serves
    ("router", 8080, "monitoring", {}, (True, True, False)),
    ("router", 8082, "fairlead-system", OPERATOR, (True, True, True)),
    ("router", 8082, "monitoring", {}, (True, True, True)),
    ("router", 8082, "apps", {}, (False, False, False)),
    ("router", 8082, "default", {}, (False, False, False)),
    ("router", 8082, "", {}, (False, False, False)),
    ("router", 8080, "apps", {}, (True, True, True)),
    ("router", 8080, "default", {}, (True, True, True)),
    ("router", 8080, "strangers", {}, (True, True, False)),
    ("router", 8080, "", {}, (True, True, False)),  # a load balancer
    ("router", 9002, "apps", {}, (False, False, False)),
]


@pytest.mark.parametrize(("component", "port", "namespace", "labels", "opened"), FLOWS)
def test_each_flow(component: str, port: int, namespace: str, labels: dict[str, str], opened: tuple[bool, bool, bool]) -> None:
    redirected = {"routing": {"forwardingMode": "Redirect"}}
    chosen = (
        {"exposure": {"fromNamespaces": ["apps"]}, **redirected} if component == "worker" else {"exposure": {"fromNamespaces": ["apps"]}}
    )
    for spec, expected in zip(({}, redirected, chosen), opened, strict=True):
        policy = made(service(**json.loads(json.dumps(spec))))["NetworkPolicy", f"qwen-{component}"]
        assert lets_in(policy, port, namespace, labels) == expected, (spec, policy)


def test_policies_are_of_the_service_s_pods_and_of_ingress_alone() -> None:
    objects = made(service())
    for component in ("worker", "router"):
        spec = objects["NetworkPolicy", f"qwen-{component}"]["spec"]
        pod = objects["Deployment", f"qwen-{component}"]["spec"]["template"]
        assert spec["policyTypes"] == ["Ingress"], "DNS, the hub, Redis and peers are called freely"
        assert spec["podSelector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
        ports = {one["containerPort"] for one in pod["spec"]["containers"][0]["ports"]}
        assert {one["port"] for rule in spec["ingress"] for one in rule["ports"]} == ports
    assert not [key for key in made(service(exposure={"networkPolicy": "None"})) if key[0] == "NetworkPolicy"]


def test_admin_ports_are_in_no_service_and_the_two_sides_agree_on_them() -> None:
    objects = made(service())
    ports = {name: body["spec"]["ports"] for (kind, name), body in objects.items() if kind == "Service"}
    assert {name: [one["targetPort"] for one in each] for name, each in ports.items()} == {"qwen": ["http"], "qwen-workers": ["http"]}
    containers = {name: objects["Deployment", f"qwen-{name}"]["spec"]["template"]["spec"]["containers"][0] for name in ("worker", "router")}
    numbers = {name: {one["name"]: one["containerPort"] for one in each["ports"]} for name, each in containers.items()}
    assert {"name": "FAIRLEAD_ADMIN_PORT", "value": str(numbers["worker"]["admin"])} in containers["worker"]["env"]
    assert f"--admin-port={numbers['router']['admin']}" in containers["router"]["args"]
    assert f"--worker-admin-port={numbers['worker']['admin']}" in containers["router"]["args"]
    probes = [each[probe]["httpGet"]["port"] for each in containers.values() for probe in each if probe.endswith("Probe")]
    assert len(probes) == 6 and set(probes) == {"admin"}


def test_exposure_restarts_nothing_but_routers_that_become_pickers() -> None:
    plain, gateway = service(), service(exposure={"gateway": {"parentRef": {"name": "g"}}})
    picked = service(exposure={"gateway": {"parentRef": {"name": "g"}, "backend": "EndpointPicker"}})
    assert len({worker_revision(one) for one in (plain, gateway, picked)}) == 1
    assert router_revision(plain) == router_revision(gateway) != router_revision(picked)


def test_a_route_to_the_routers_has_no_timeout_that_cuts_streams() -> None:
    asked = {"parentRef": {"name": "web", "namespace": "gateways", "sectionName": "https"}, "hostnames": ["qwen.example.com"]}
    one = service(exposure={"gateway": asked})
    route = made(one, ALL)["HTTPRoute", "qwen"]["spec"]
    assert route["parentRefs"] == [{"name": "web", "namespace": "gateways", "sectionName": "https"}]
    for rule in route["rules"]:
        assert rule["backendRefs"] == [{"name": "qwen", "port": 80}] and rule["timeouts"] == {"request": "0s", "backendRequest": "0s"}
        assert 1 <= len(rule["matches"]) <= 8, "Gateway API before 1.2 refuses more"
    matches = [(match["path"]["type"], match["path"]["value"]) for rule in route["rules"] for match in rule["matches"]]
    matched = set(matches)
    assert ("Exact", "/v1/chat/completions") in matched and ("PathPrefix", "/v1/models") in matched
    assert all(kind == "Exact" or path == "/v1/models" for kind, path in matched) and len(matched) == len(matches)
    assert not {path for _, path in matched} - set(INFERENCE), "no admin path, however a gateway reads it"
    assert route["hostnames"] == ["qwen.example.com"] and ("InferencePool", "qwen") not in made(one, ALL)


def test_an_endpoint_picker_is_a_port_of_the_routers_and_opens_workers_to_the_proxies() -> None:
    asked = {"parentRef": {"name": "web"}, "backend": "EndpointPicker", "proxyNamespace": "envoy-gateway-system"}
    objects = made(service(exposure={"gateway": asked}), ALL)
    pool, route = objects["InferencePool", "qwen"]["spec"], objects["HTTPRoute", "qwen"]["spec"]
    assert route["rules"][0]["backendRefs"] == [{"group": "inference.networking.k8s.io", "kind": "InferencePool", "name": "qwen"}]
    picker = pool["endpointPickerRef"]
    ports = {port["port"]: port["targetPort"] for port in objects["Service", picker["name"]]["spec"]["ports"]}
    (container,) = objects["Deployment", "qwen-router"]["spec"]["template"]["spec"]["containers"]
    assert (
        ports[picker["port"]["number"]] == "picker" and {"name": "picker", "containerPort": 9002, "protocol": "TCP"} in container["ports"]
    )
    assert "--picker-port=9002" in container["args"]
    pods = objects["Deployment", "qwen-worker"]["spec"]["template"]["metadata"]["labels"]
    assert pool["selector"]["matchLabels"].items() <= pods.items() and pool["targetPorts"] == [{"number": 8000}]
    assert lets_in(objects["NetworkPolicy", "qwen-worker"], 8000, "envoy-gateway-system", {})
    assert not lets_in(objects["NetworkPolicy", "qwen-worker"], 8000, "apps", {})
    assert not lets_in(objects["NetworkPolicy", "qwen-worker"], 8002, "envoy-gateway-system", {}), "nor the proxies to admin paths"
    assert not lets_in(objects["NetworkPolicy", "qwen-router"], 8082, "envoy-gateway-system", {})
    assert lets_in(objects["NetworkPolicy", "qwen-router"], 9002, "envoy-gateway-system", {})


@pytest.mark.parametrize(
    ("backend", "served", "reason"),
    [
        ("Router", frozenset(), "GatewayApiMissing"),
        ("EndpointPicker", frozenset({"HTTPRoute"}), "InferencePoolMissing"),
        ("EndpointPicker", frozenset({"InferencePool"}), "GatewayApiMissing"),
    ],
)
def test_missing_kinds_are_reported_and_no_object_is_created(backend: str, served: frozenset[str], reason: str) -> None:
    one = service(exposure={"gateway": {"parentRef": {"name": "web"}, "backend": backend}})
    plan = desired(one, Observed(served=served), SETTINGS, NOW)
    conditions = {condition.type: condition for condition in plan.status.conditions}
    assert conditions["GatewayReady"].status == "False" and conditions["GatewayReady"].reason == reason
    assert conditions["Degraded"].status == "True" and conditions["Degraded"].reason == reason
    assert not [body for body in plan.objects if body["kind"] in ALL]
    assert not [one for one in desired(service(), Observed(), SETTINGS, NOW).status.conditions if one.type == "GatewayReady"]


@pytest.mark.parametrize(
    ("parents", "status", "reason"),
    [
        ([], "False", "Waiting"),
        ([{"conditions": [{"type": "Accepted", "status": "True"}, {"type": "ResolvedRefs", "status": "True"}]}], "True", "Accepted"),
        (
            [{"conditions": [{"type": "Accepted", "status": "False", "reason": "NotAllowedByListeners", "message": "no"}]}],
            "False",
            "NotAllowedByListeners",
        ),
        ([{"conditions": [{"type": "ResolvedRefs", "status": "False", "reason": "BackendNotFound"}]}], "False", "BackendNotFound"),
    ],
)
def test_the_gateways_answer_is_reported(parents: list[Any], status: str, reason: str) -> None:
    one = service(exposure={"gateway": {"parentRef": {"name": "web"}}})
    plan = desired(one, Observed(served=ALL, optional_objects={"HTTPRoute": {"status": {"parents": parents}}}), SETTINGS, NOW)
    (said,) = [condition for condition in plan.status.conditions if condition.type == "GatewayReady"]
    assert (said.status, said.reason) == (status, reason)


def test_a_refused_pool_is_reported() -> None:
    one = service(exposure={"gateway": {"parentRef": {"name": "web"}, "backend": "EndpointPicker"}})
    taken = {"status": {"parents": [{"conditions": [{"type": "Accepted", "status": "True"}]}]}}
    wrong = {"status": {"parents": [{"conditions": [{"type": "ResolvedRefs", "status": "False", "reason": "InvalidExtensionRef"}]}]}}
    plan = desired(one, Observed(served=ALL, optional_objects={"HTTPRoute": taken, "InferencePool": wrong}), SETTINGS, NOW)
    (said,) = [condition for condition in plan.status.conditions if condition.type == "GatewayReady"]
    assert (said.status, said.reason) == ("False", "InvalidExtensionRef")


def test_the_example_makes_what_its_page_says() -> None:
    body = yaml.safe_load((Path(__file__).parents[3] / "examples" / "gateway.yaml").read_text())
    objects = made(InferenceService.parse(body), ALL)
    assert objects["HTTPRoute", "qwen"]["spec"]["parentRefs"] == [{"name": "web", "namespace": "gateways"}]
    assert lets_in(objects["NetworkPolicy", "qwen-router"], 8080, "gateways", {}), "the gateway's proxies"
    assert not lets_in(objects["NetworkPolicy", "qwen-router"], 8080, "strangers", {})
