"""A gateway: Envoy in a pod, configured from a service's HTTPRoute and InferencePool as a Gateway controller does it, but only once."""

import json
from typing import Any

from tests.operator.support import foreign_crds
from tests.router.interop.envoy import build_configuration

from e2e.service import Service
from e2e.system import HERE, PATIENCE, System, client_pod, eventually

NAMESPACE = "gateways"
PORT, ADMIN_PORT = 8888, 9901
CONTROLLER = "fairlead.dev/e2e"


def install_crds(system: System) -> None:
    """Create the kinds HTTPRoute and InferencePool. Skips the test where their Go modules cannot be fetched."""
    system.apply(*(foreign_crds.crd(*where) for where in (foreign_crds.GATEWAY_API, foreign_crds.INFERENCE)))


def remove_crds(system: System) -> None:
    names = ("httproutes.gateway.networking.k8s.io", "inferencepools.inference.networking.k8s.io")
    system.cluster.kubectl("delete", "crd", *names, "--ignore-not-found", "--timeout=60s")


def start(service: Service) -> str:
    """Accept the service's route, start Envoy for it, and return the base URL for clients. The service's workers must be ready."""
    system = service.system
    route = eventually(lambda: system.get("httproutes", service.name), 90, "the HTTPRoute")
    pool = system.get("inferencepools", service.name)
    image = system.cluster.add_image(
        "fairlead-envoy", HERE / "images" / "Containerfile.envoy", ["requirements/dev.txt"], base_image=system.images.client
    )
    configuration = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "envoy", "namespace": NAMESPACE}}
    pod = client_pod(NAMESPACE, image)
    (container,) = pod["spec"]["containers"]
    container["command"] = ["envoy", "-c", "/etc/envoy/envoy.json", "--concurrency", "1", "--log-level", "warning"]
    container["readinessProbe"] = {"httpGet": {"path": "/ready", "port": ADMIN_PORT}, "periodSeconds": 1}
    container["volumeMounts"].append({"name": "envoy", "mountPath": "/etc/envoy"})
    pod["spec"]["volumes"].append({"name": "envoy", "configMap": {"name": "envoy"}})
    system.apply({**configuration, "data": {"envoy.json": json.dumps(_configure(service, route, pool))}}, pod)
    _accept(service, route)
    system.cluster.kubectl("wait", "-n", NAMESPACE, "pod/client", "--for=condition=Ready", f"--timeout={60 * PATIENCE:.0f}s")
    return f"http://{system.get('pod', 'client', namespace=NAMESPACE)['status']['podIP']}:{PORT}/v1"


def _configure(service: Service, route: dict[str, Any], pool: dict[str, Any]) -> dict[str, Any]:
    """Return Envoy's configuration: the route's matches, the pool's pods, and its picker's Service."""
    matches = [_match(one["path"]) for rule in route["spec"]["rules"] for one in rule["matches"]]
    assert {backend["kind"] for rule in route["spec"]["rules"] for backend in rule["backendRefs"]} == {"InferencePool"}
    labels = ",".join(f"{name}={value}" for name, value in pool["spec"]["selector"]["matchLabels"].items())
    (port,) = pool["spec"]["targetPorts"]
    pods = service.system.get("pods", "-l", labels)["items"]
    picker = pool["spec"]["endpointPickerRef"]
    address = service.system.get("service", picker["name"])["spec"]["clusterIP"]
    return build_configuration(
        f"0.0.0.0:{PORT}",
        f"0.0.0.0:{ADMIN_PORT}",
        f"{address}:{picker['port']['number']}",
        [f"{pod['status']['podIP']}:{port['number']}" for pod in pods],
        matches=matches,
    )


def _match(path: dict[str, str]) -> dict[str, str]:
    return {{"Exact": "path", "PathPrefix": "path_separated_prefix"}[path["type"]]: path["value"]}


def _accept(service: Service, route: dict[str, Any]) -> None:
    """Report in the route's status that this gateway uses it."""
    generation, at = route["metadata"]["generation"], "2026-01-01T00:00:00Z"
    truth = {"status": "True", "message": "", "observedGeneration": generation, "lastTransitionTime": at}
    conditions = [{"type": type_, "reason": type_, **truth} for type_ in ("Accepted", "ResolvedRefs")]
    parents = [{"parentRef": route["spec"]["parentRefs"][0], "controllerName": CONTROLLER, "conditions": conditions}]
    patch = json.dumps({"status": {"parents": parents}})
    service.system.cluster.kubectl(
        "patch", "httproute", service.name, "-n", service.system.models, "--subresource=status", "--type=merge", "-p", patch
    )
