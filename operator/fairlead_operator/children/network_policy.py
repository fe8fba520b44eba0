"""NetworkPolicies of a service's pods. They restrict ingress only: connections of the pods to DNS, the hub, Redis and each other stay open.

Policies do not affect the kubelet's probes, which come from the node of the pod. Without a policy engine in the cluster these objects have
no effect. In a namespace that denies everything by default, the service needs them to work.

Some service meshes send all traffic to one port of a pod, and the policy sees that port. A caller of one port is let into it, so the mesh's
own policies must separate the ports (docs/guides/mesh.md).
"""

from collections.abc import Iterable

from fairlead_operator import names
from fairlead_operator.api import InferenceService
from fairlead_operator.children import groups, router_tls
from fairlead_operator.kube.kinds import NETWORK_POLICIES, make_child
from fairlead_operator.objects import Object
from fairlead_operator.observed import Observed
from fairlead_operator.settings import Mesh, Settings

_NAMESPACE = "kubernetes.io/metadata.name"  # the API server sets this label on every namespace and refuses changes
_ANY_POD: Object = {"namespaceSelector": {}}
_TUNNEL_PORTS: dict[Mesh, int] = {"istio-ambient": 15008, "linkerd": 4143}
_AMBIENT_PROBES = ("169.254.7.127/32", "fd16:9254:7127:1337:ffff:ffff:ffff:ffff/128")
"""Addresses to which Istio's ambient mode changes the source of the kubelet's probes."""


def objects(service: InferenceService, settings: Settings, observed: Observed) -> list[Object]:
    if service.spec.exposure.network_policy == "None":
        return []
    # Only pods of the groups of this service can connect to followers.
    followers = [_policy(service, names.FOLLOWER, [_group(service)])] if groups.is_grouped(service) else []
    return [_workers(service, settings), *followers, _routers(service, settings, observed), *_batch(service, settings)]


def _workers(service: InferenceService, settings: Settings) -> Object:
    """Return the policy of workers.

    Inference port: the routers of the service, and with forwardingMode Redirect or a gateway its clients or proxies. Admin port: routers
    poll it, new workers read prefixes from it, the operator reads load progress, and monitoring reads metrics.
    """
    routers, workers = _pods(service, names.ROUTER), _pods(service, names.WORKER)
    inference = [routers]
    if service.spec.routing.forwarding_mode == "Redirect":
        inference += _clients(service)
    if service.spec.exposure.picks_endpoints:
        inference += _proxies(service)
    admin = [routers, workers, *_operator_and_monitoring(settings)]
    ingress = [_from(inference, names.WORKER_PORT, settings), _from(admin, names.WORKER_ADMIN_PORT, settings)]
    ingress += _probes(names.WORKER_ADMIN_PORT, settings)
    return _policy(service, names.WORKER, [*ingress, *([_group(service)] if groups.is_grouped(service) else [])])


def _group(service: InferenceService) -> Object:
    """Return the rule for pods of groups, on all ports: NCCL and gloo use ephemeral ports.

    A policy cannot distinguish the groups of a service. The pods of a group share a secret for that.
    """
    return {"from": [_pods(service, component) for component in groups.components(service)]}


def _routers(service: InferenceService, settings: Settings, observed: Observed) -> Object:
    clients = _clients(service)
    if clients != [_ANY_POD]:
        clients += [*_proxies(service), _operator(settings)]  # the operator probes the service with a completion
    ingress = [_from(clients, port, settings) for port in router_tls.served_ports(service, observed)]
    ingress.append(_from(_operator_and_monitoring(settings), names.ROUTER_ADMIN_PORT, settings))
    ingress += _probes(names.ROUTER_ADMIN_PORT, settings)
    if service.spec.exposure.picks_endpoints:
        ingress.append(_from(_proxies(service), names.PICKER_PORT, settings))
    return _policy(service, names.ROUTER, ingress)


def _batch(service: InferenceService, settings: Settings) -> list[Object]:
    """Return the policy of the batch server: routers forward requests to it, and monitoring reads metrics."""
    if service.spec.batch is None:
        return []
    allowed = [_pods(service, names.ROUTER), *_operator_and_monitoring(settings)]
    ingress = [_from(allowed, names.BATCH_PORT, settings), *_probes(names.BATCH_PORT, settings)]
    return [_policy(service, names.BATCH, ingress)]


def _pods(service: InferenceService, component: str) -> Object:
    return {"podSelector": {"matchLabels": names.selector(service, component)}}


def _clients(service: InferenceService) -> list[Object]:
    chosen = service.spec.exposure.from_namespaces
    return [_ANY_POD] if chosen is None else _namespaces(sorted({service.namespace, *chosen}))


def _proxies(service: InferenceService) -> list[Object]:
    """Return the peers of the gateway's proxies; empty without a gateway."""
    gateway = service.spec.exposure.gateway
    return [] if gateway is None else _namespaces([gateway.proxy_namespace or gateway.parent_ref.namespace or service.namespace])


def _operator_and_monitoring(settings: Settings) -> list[Object]:
    """Return the peers of the operator and of monitoring."""
    return [_operator(settings), *_namespaces(settings.monitoring_namespaces)]


def _operator(settings: Settings) -> Object:
    home = {"matchLabels": {_NAMESPACE: settings.operator_namespace}} if settings.operator_namespace else {}
    return {"namespaceSelector": home, "podSelector": {"matchLabels": names.OPERATOR_PODS}}


def _namespaces(chosen: Iterable[str]) -> list[Object]:
    return [{"namespaceSelector": {"matchLabels": {_NAMESPACE: name}}} for name in chosen]


def _probes(port: int, settings: Settings) -> list[Object]:
    """Return the rule for the kubelet's probes where a mesh changes their source; none elsewhere."""
    if settings.mesh != "istio-ambient":
        return []
    return [{"from": [{"ipBlock": {"cidr": cidr}} for cidr in _AMBIENT_PROBES], "ports": [{"protocol": "TCP", "port": port}]}]


def _from(allowed: list[Object], port: int, settings: Settings) -> Object:
    # Without `from`, all sources are allowed. A namespaceSelector would exclude sources outside the cluster, such as a load balancer.
    tunnel = _TUNNEL_PORTS.get(settings.mesh)
    ports = [{"protocol": "TCP", "port": one} for one in (port, tunnel) if one is not None]
    return {"ports": ports} if _ANY_POD in allowed else {"from": allowed, "ports": ports}


def _policy(service: InferenceService, component: str, ingress: list[Object]) -> Object:
    spec = {**_pods(service, component), "policyTypes": ["Ingress"], "ingress": ingress}
    return make_child(service, NETWORK_POLICIES, names.deployment(service, component), component, spec=spec)
