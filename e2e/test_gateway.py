"""A gateway that asks the endpoint picker, with all NetworkPolicies enforced: what is allowed works, and nothing else does."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from e2e import gateway
from e2e.policies import PolicyEngine
from e2e.service import Load, Service
from e2e.system import HERE, System, client_pod, eventually, read_result

MONITORING, ELSEWHERE = "monitoring", "elsewhere"
PROMPT = "A gateway sends each conversation to the worker that has its prefix. " * 30

WORKER, WORKER_ADMIN, ROUTER, ROUTER_ADMIN, PICKER = "worker", "worker admin", "router", "router admin", "picker"
OPERATOR, REDIS = "operator", "redis"
ALLOWED = {
    "a client of the service's namespace": {ROUTER},
    "the gateway": {ROUTER, WORKER, PICKER},
    "monitoring": {WORKER_ADMIN, ROUTER_ADMIN, OPERATOR},
    "another namespace": set(),
}
"""What each pod may reach, as docs/operate/security.md says."""


@dataclass(frozen=True)
class Guarded:
    """A service behind a gateway, under enforced policies."""

    service: Service
    url: str
    engine: PolicyEngine


@pytest.fixture(scope="module")
def guarded(installed: System) -> Iterator[Guarded]:
    if not installed.cluster.reaches_pods:
        pytest.skip("the test enforces policies with nftables, which needs the node's network")
    service, namespaces = Service(installed, "guarded-pool"), (gateway.NAMESPACE, MONITORING, ELSEWHERE)
    try:
        gateway.install_crds(installed)
        for namespace in namespaces:
            installed.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}})
        with PolicyEngine(installed.cluster) as engine:
            backend = {"parentRef": {"name": "web", "namespace": gateway.NAMESPACE}, "backend": "EndpointPicker"}
            installed.apply(service.manifest(replicas=2, exposure={"gateway": backend, "fromNamespaces": []}))
            installed.apply(*(client_pod(namespace, installed.images.client) for namespace in (MONITORING, ELSEWHERE)))
            service.wait_ready(replicas=2, seconds=300)
            yield Guarded(service, gateway.start(service), engine)
    finally:
        try:
            service.delete()
        finally:
            installed.cluster.kubectl("delete", "namespace", *namespaces, "--ignore-not-found", "--wait=false")
            gateway.remove_crds(installed)


def test_the_route_is_accepted_and_leads_only_to_inference(guarded: Guarded) -> None:
    service = guarded.service
    eventually(lambda: service.condition("GatewayReady").get("reason") == "Accepted", 60, "GatewayReady")
    root = guarded.url.removesuffix("/v1")
    for path in ("/metrics", "/fairlead/workers", "/v1/%63ompletions"):
        code = ["curl", "-s", "-o", "/dev/null", "-w", "%{http_code}", f"{root}{path}"]
        assert service.system.in_client(*code).stdout == "404", path


def test_conversations_return_to_their_worker_through_the_gateway(guarded: Guarded) -> None:
    service = guarded.service

    def chat(prompt: str) -> dict[str, Any]:
        return read_result(service.system.client("chat.py", guarded.url, service.name, prompt, "16"))

    prompts = [f"Conversation {number}. {PROMPT}" for number in range(4)]
    firsts = [chat(prompt) for prompt in prompts]
    for prompt, first in zip(prompts, firsts, strict=True):
        again = chat(prompt)
        assert again["pod"] == first["pod"] and again["cached"] > 0.8 * again["prompt_tokens"]
        assert again["predicted"] > 0.8 * again["prompt_tokens"], "the picker predicted it"


def test_load_through_the_gateway_fails_no_request(guarded: Guarded) -> None:
    with Load(guarded.service, concurrency=4, url=guarded.url) as load:
        for number in range(4):
            assert guarded.service.chat(f"Question {number} past the gateway, to a router")["finish"] == "length"
    load.assert_answered()


def targets(guarded: Guarded) -> dict[str, str]:
    """Return name → IP:PORT of a pod's port."""
    system, service = guarded.service.system, guarded.service

    def address(namespace: str, selector: str) -> str:
        return system.get("pods", "-l", selector, namespace=namespace)["items"][0]["status"]["podIP"]

    worker, router = (service.pods(component)[0]["status"]["podIP"] for component in ("worker", "router"))
    operator, redis = (address(system.namespace, f"app.kubernetes.io/component={name}") for name in ("operator", "redis"))
    return {
        WORKER: f"{worker}:8000",
        WORKER_ADMIN: f"{worker}:8002",
        ROUTER: f"{router}:8080",
        ROUTER_ADMIN: f"{router}:8082",
        PICKER: f"{router}:9002",
        OPERATOR: f"{operator}:8081",
        REDIS: f"{redis}:6379",
    }


def reach(guarded: Guarded, namespace: str) -> dict[str, str]:
    """Return how a connection from the namespace's client pod to each target ends."""
    system, ports = guarded.service.system, targets(guarded)
    script = (HERE / "client" / "reach.py").read_text()
    done = system.cluster.kubectl("exec", "-i", "-n", namespace, "client", "--", "python", "-", *ports.values(), input=script)
    outcomes = json.loads(done.stdout)
    return {name: outcomes[address] for name, address in ports.items()}


def test_policies_allow_what_is_documented_and_nothing_else(guarded: Guarded) -> None:
    namespaces = dict(zip(ALLOWED, (guarded.service.system.models, gateway.NAMESPACE, MONITORING, ELSEWHERE), strict=True))
    for source, namespace in namespaces.items():
        wanted = {name: "open" if name in ALLOWED[source] else "prohibited" for name in targets(guarded)}
        assert reach(guarded, namespace) == wanted, f"from {source}"
    with guarded.engine.suspended():
        for source, namespace in namespaces.items():
            assert set(reach(guarded, namespace).values()) == {"open"}, f"without policies, from {source}"
    service = guarded.service
    eventually(lambda: service.status().get("index", {}).get("state") == "Available", 45, "workers and routers reach Redis")
    refused = service.system.cluster.kubectl(
        "exec", "-n", ELSEWHERE, "client", "--", "curl", "-sS", "--max-time", "10", f"{service.url}/models", check=False
    )
    assert refused.returncode != 0, "fromNamespaces applies to the Service as well"
