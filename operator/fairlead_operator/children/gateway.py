"""Objects for a Gateway: an HTTPRoute to the routers, or to an InferencePool with the routers as its endpoint picker.

They are created only if the cluster serves these kinds (`Observed.served`). The route's status says whether the gateway accepted it.
"""

from fairlead_common.http.inference_paths import INFERENCE, MODELS
from fairlead_operator import names
from fairlead_operator.api import InferenceService
from fairlead_operator.api.exposure import Gateway
from fairlead_operator.children import router_tls
from fairlead_operator.kube.kinds import POOLS, ROUTES, TLS_POLICIES, Kind, make_child
from fairlead_operator.objects import Object
from fairlead_operator.observed import Observed

_EXACT = [{"path": {"type": "Exact", "value": path}} for path in INFERENCE if path.startswith("/v1/") and path != MODELS]
_MATCHES = [*_EXACT, {"path": {"type": "PathPrefix", "value": MODELS}}]  # paths below it name a model
MOST_MATCHES = 8  # matches of one rule; Gateway API 1.2 and later allow 64


def kinds(service: InferenceService) -> tuple[Kind, ...]:
    """Return the kinds that the gateway of this service needs; empty without a gateway."""
    exposure = service.spec.exposure
    if exposure.gateway is None:
        return ()
    if exposure.picks_endpoints:
        return (ROUTES, POOLS)
    return (ROUTES,) if service.spec.router.tls is None else (ROUTES, TLS_POLICIES)


def objects(service: InferenceService, observed: Observed) -> list[Object]:
    """Return all objects, or none if a kind is missing: a route to a pool that cannot be created would fail requests."""
    gateway = service.spec.exposure.gateway
    if gateway is None or not all(kind.kind in observed.served for kind in kinds(service)):
        return []
    pool = [_pool(service)] if service.spec.exposure.picks_endpoints else []
    return [*pool, *router_tls.backend_policy(service, observed), _route(service, gateway, observed)]


def _route(service: InferenceService, gateway: Gateway, observed: Observed) -> Object:
    reference = gateway.parent_ref
    parent = {"name": reference.name, "namespace": reference.namespace, "sectionName": reference.section_name}
    timeout = f"{gateway.timeout_seconds or 0}s"
    spec: Object = {
        "parentRefs": [{key: value for key, value in parent.items() if value is not None}],
        "rules": [
            {
                "matches": _MATCHES[first : first + MOST_MATCHES],
                "backendRefs": [_backend(service, observed)],
                # Always set: a gateway's own default (Envoy: 15 s) would cut most streams. 0s disables the timeout.
                "timeouts": {"request": timeout, "backendRequest": timeout},
            }
            for first in range(0, len(_MATCHES), MOST_MATCHES)
        ],
    }
    if gateway.hostnames:
        spec["hostnames"] = list(gateway.hostnames)
    return make_child(service, ROUTES, service.name, names.ROUTER, spec=spec)


def _backend(service: InferenceService, observed: Observed) -> Object:
    if service.spec.exposure.picks_endpoints:
        return {"group": POOLS.group, "kind": POOLS.kind, "name": service.name}
    return {"name": service.name, "port": router_tls.gateway_port(service, observed)}


def _pool(service: InferenceService) -> Object:
    spec = {
        "selector": {"matchLabels": names.selector(service, names.WORKER)},
        "targetPorts": [{"number": names.WORKER_PORT}],
        # With FailOpen the gateway would select endpoints itself and bypass keys and quotas.
        "endpointPickerRef": {"name": service.name, "port": {"number": names.PICKER_PORT}, "failureMode": "FailClose"},
    }
    return make_child(service, POOLS, service.name, names.ROUTER, spec=spec)
