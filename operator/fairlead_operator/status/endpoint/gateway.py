"""Condition `GatewayReady`: whether the cluster serves what the spec needs, and whether the gateway accepts the route. Pure."""

from collections.abc import Iterator, Mapping
from typing import Any

from fairlead_operator.api import InferenceService
from fairlead_operator.causes import Cause
from fairlead_operator.children import gateway
from fairlead_operator.kube.kinds import POOLS, ROUTES, TLS_POLICIES, Kind
from fairlead_operator.observed import Observed
from fairlead_operator.status.conditions import Verdict

_MISSING = {
    ROUTES: ("GatewayApiMissing", "the Gateway API (HTTPRoute of gateway.networking.k8s.io/v1)"),
    TLS_POLICIES: (
        "GatewayApiMissing",
        "the Gateway API 1.4 or newer (BackendTLSPolicy of gateway.networking.k8s.io/v1) for spec.router.tls",
    ),
    POOLS: (
        "InferencePoolMissing",
        "the Gateway API inference extension (InferencePool of inference.networking.k8s.io/v1)",
    ),
}


def build_condition(service: InferenceService, observed: Observed) -> Verdict | None:
    """Return (truth, reason, message) of GatewayReady; None for a service without a gateway."""
    gateway_ref = service.spec.exposure.gateway
    if gateway_ref is None:
        return None
    missing = next((kind for kind in gateway.kinds(service) if kind.kind not in observed.served), None)
    if missing is not None:
        reason, what = _MISSING[missing]
        words = f"spec.exposure.gateway needs {what}, which this cluster does not serve: install its CRDs, or remove the field"
        return False, reason, words
    reference = gateway_ref.parent_ref
    name, home = reference.name, reference.namespace or service.namespace
    answer = _condition_from_parents(observed, name, home)
    if answer[1] == "Waiting" and observed.gateway is not None and not observed.gateway:
        return False, "GatewayNotFound", f"Gateway {home}/{name} does not exist: create it, or correct spec.exposure.gateway.parentRef"
    refused = _find_unprogrammed(observed, reference.section_name) if answer[0] else None
    if refused is None:
        return answer
    return False, refused.get("reason", "NotProgrammed"), f"Gateway {name}: {refused['type']}: {refused.get('message', '')}"


def build_live_route_condition(observed: Observed) -> Verdict | None:
    """Return the same for the existing route, where the spec cannot be followed; None where there is no route."""
    route = observed.optional_objects.get(ROUTES.kind)
    parent = next(iter(((route or {}).get("spec") or {}).get("parentRefs") or []), None)
    if route is None or parent is None:
        return None
    return _condition_from_parents(observed, parent.get("name", ""), parent.get("namespace") or route["metadata"].get("namespace", ""))


def _condition_from_parents(observed: Observed, name: str, home: str) -> Verdict:
    """Return what the gateway of that name reports."""
    parents = _parents(observed, ROUTES)
    for parent in [*parents, *_parents(observed, POOLS)]:
        for refused in _refused_conditions(parent):
            return False, refused["reason"], f"Gateway {name}: {refused['type']}: {refused.get('message', '')}"
    if not parents:
        message = f"no controller has answered for Gateway {home}/{name} yet: does it exist, and does its class have a controller?"
        return False, "Waiting", message
    pool = observed.optional_objects.get(POOLS.kind)
    silent = " and has not reported on the InferencePool" if pool is not None and not _parents(observed, POOLS) else ""
    return True, "Accepted", f"Gateway {name} has accepted the route{silent}"


def _find_unprogrammed(observed: Observed, section: str | None) -> Mapping[str, Any] | None:
    """Return the condition by which the Gateway, or the listener of this name, reports that its proxies do not serve it."""
    status: Any = (observed.gateway or {}).get("status") or {}
    named = [one for one in status.get("listeners") or [] if section is not None and one.get("name") == section]
    for part in (status, *named):
        for condition in part.get("conditions") or []:
            if condition.get("type") in ("Accepted", "Programmed", "ResolvedRefs") and condition.get("status") == "False":
                return dict(condition)
    return None


def find_fault(verdict: Verdict | None) -> Cause | None:
    """Return a cause where something is missing or was refused; None where the condition is True, or still waits for a controller."""
    if verdict is None or verdict[0] or verdict[1] == "Waiting":
        return None
    return Cause(verdict[1], verdict[2], fault=True)


def _parents(observed: Observed, kind: Kind) -> list[Mapping[str, Any]]:
    """Return what each gateway reports about the object of this kind."""
    status = (observed.optional_objects.get(kind.kind) or {}).get("status") or {}
    return list(status.get("parents") or [])


def _refused_conditions(parent: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    for condition in parent.get("conditions") or []:
        if condition.get("type") in ("Accepted", "ResolvedRefs") and condition.get("status") == "False":
            yield condition
