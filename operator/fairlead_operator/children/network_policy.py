"""Who may open connections to a service's pods. Ingress only: what the pods themselves call (DNS, the hub, Redis, each other) stays open.

A policy takes nothing from the kubelet's probes, which come from the pod's own node. Where the cluster has no policy engine these objects
do nothing; where a namespace denies everything by default they are what lets the service work.
"""

from fairlead_operator import names
from fairlead_operator.api import InferenceService
from fairlead_operator.children import groups
from fairlead_operator.objects import Object
from fairlead_operator.settings import Settings

_NAMESPACE = "kubernetes.io/metadata.name"  # the API server puts it on every namespace, and lets nobody change it
_ANYONE: Object = {"namespaceSelector": {}}


def objects(service: InferenceService, settings: Settings) -> list[Object]:
    if service.spec.exposure.network_policy == "None":
        return []
    followers = [_followers(service)] if groups.grouped(service) else []
    return [_workers(service, settings), *followers, _routers(service, settings)]


def _workers(service: InferenceService, settings: Settings) -> Object:
    """Inference: the service's own routers, and whom they send to workers. Admin: its routers poll, its new workers are warmed from others,
    the operator looks at pods that load, monitoring reads metrics."""
    routers, workers = ({"podSelector": {"matchLabels": names.selector(service, component)}} for component in (names.ROUTER, names.WORKER))
    inference = [routers]
    if service.spec.routing.forwarding_mode == "Redirect":
        inference += _clients(service)
    if service.spec.exposure.picks_endpoints:
        inference += _proxies(service)
    admin = [routers, workers, *_overseers(settings)]
    ingress = [_from(inference, names.WORKER_PORT), _from(admin, names.WORKER_ADMIN_PORT)]
    return _policy(service, names.WORKER, [*ingress, *([_group(service)] if groups.grouped(service) else [])])


def _followers(service: InferenceService) -> Object:
    """Nobody but the pods of such groups."""
    return _policy(service, names.FOLLOWER, [_group(service)])


def _group(service: InferenceService) -> Object:
    """On any port: NCCL and gloo take free ones. A policy cannot tell a service's groups apart; each knows its own by a secret."""
    return {"from": [{"podSelector": {"matchLabels": names.selector(service, component)}} for component in groups.components(service)]}


def _routers(service: InferenceService, settings: Settings) -> Object:
    clients = _clients(service)
    if clients != [_ANYONE]:
        clients += [*_proxies(service), _operator(settings)]  # the operator proves that the service serves
    ingress = [_from(clients, names.ROUTER_PORT), _from(_overseers(settings), names.ROUTER_ADMIN_PORT)]
    if service.spec.exposure.picks_endpoints:
        ingress.append(_from(_proxies(service), names.PICKER_PORT))
    return _policy(service, names.ROUTER, ingress)


def _clients(service: InferenceService) -> list[Object]:
    chosen = service.spec.exposure.from_namespaces
    return [_ANYONE] if chosen is None else _namespaces(sorted({service.namespace, *chosen}))


def _proxies(service: InferenceService) -> list[Object]:
    """Of the gateway, if there is one."""
    gateway = service.spec.exposure.gateway
    return [] if gateway is None else _namespaces([gateway.proxy_namespace or gateway.parent_ref.namespace or service.namespace])


def _overseers(settings: Settings) -> list[Object]:
    """The operator and monitoring."""
    return [_operator(settings), *_namespaces(settings.monitoring_namespaces)]


def _operator(settings: Settings) -> Object:
    home = {"matchLabels": {_NAMESPACE: settings.operator_namespace}} if settings.operator_namespace else {}
    return {"namespaceSelector": home, "podSelector": {"matchLabels": names.OPERATOR_PODS}}


def _namespaces(chosen: "list[str] | tuple[str, ...]") -> list[Object]:
    return [{"namespaceSelector": {"matchLabels": {_NAMESPACE: name}}} for name in chosen]


def _from(allowed: list[Object], port: int) -> Object:
    # From everyone is said without `from`: a namespaceSelector would leave out what comes from outside the cluster (a load balancer).
    ports = [{"protocol": "TCP", "port": port}]
    return {"ports": ports} if _ANYONE in allowed else {"from": allowed, "ports": ports}


def _policy(service: InferenceService, component: str, ingress: list[Object]) -> Object:
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": names.metadata(service, names.deployment(service, component), component),
        "spec": {
            "podSelector": {"matchLabels": names.selector(service, component)},
            "policyTypes": ["Ingress"],
            "ingress": ingress,
        },
    }
