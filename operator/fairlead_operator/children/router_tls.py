"""TLS of the routers' port for clients: the port, the mounted Secret, and the Certificate that cert-manager is to issue.

Plain and TLS ports have different numbers and names. So a Service never sends a client of one to a router of the other during a rollout.
"""

from collections.abc import Iterable
from pathlib import PurePosixPath
from typing import Any

from fairlead_operator import names
from fairlead_operator.api import InferenceService
from fairlead_operator.children import pods
from fairlead_operator.kube.kinds import CERTIFICATES, TLS_POLICIES, make_child
from fairlead_operator.objects import Body, Object, component_of, has_ended, ready_at
from fairlead_operator.observed import Observed
from fairlead_operator.revisions import find_revision
from fairlead_operator.rollout.strategy import revision_of
from fairlead_operator.settings import Settings

FOLDER = PurePosixPath("/etc/fairlead/tls")
_PORTS = {"http": (names.SERVICE_PORT, names.ROUTER_PORT), "https": (names.SERVICE_TLS_PORT, names.ROUTER_TLS_PORT)}
"""Ports of the Service and of the router."""


def port_number(service: InferenceService) -> int:
    """Return the port on which routers listen for clients."""
    return _PORTS[names.scheme(service)][1]


def service_port(service: InferenceService) -> int:
    """Return the port of the Service that leads to routers of this spec."""
    return _PORTS[names.scheme(service)][0]


def served_ports(service: InferenceService, observed: Observed) -> list[int]:
    """Return the ports on which routers listen for clients: during a change of TLS those of both revisions."""
    return [_PORTS[scheme][1] for scheme in _served_schemes(service, observed)]


def service_ports(service: InferenceService, observed: Observed) -> list[Object]:
    """Return the ports of the Service that clients use. That of the scheme before stays as long as a router serves it."""
    return [
        {"name": scheme, "port": _PORTS[scheme][0], "targetPort": scheme, "protocol": "TCP", "appProtocol": scheme}
        for scheme in _served_schemes(service, observed)
    ]


def gateway_port(service: InferenceService, observed: Observed) -> int:
    """Return the port of the Service to which a gateway connects."""
    return _PORTS[_gateway_scheme(service, observed)][0]


def _gateway_scheme(service: InferenceService, observed: Observed) -> str:
    """Return the scheme before until a router of the new one is ready: the new port would have no endpoint."""
    wanted = names.scheme(service)
    ready = _schemes_of(service, observed, (pod for pod in _routers(observed) if ready_at(pod) is not None))
    return wanted if wanted in ready or not ready else next(iter(ready))


def _served_schemes(service: InferenceService, observed: Observed) -> list[str]:
    found = {names.scheme(service)} | _schemes_of(service, observed, _routers(observed))
    return sorted(found, key=lambda scheme: scheme != names.scheme(service))


def _routers(observed: Observed) -> list[Body]:
    return [pod for pod in observed.pods if component_of(pod) == names.ROUTER and not has_ended(pod)]


def _schemes_of(service: InferenceService, observed: Observed, routers: Iterable[Body]) -> set[str]:
    """Return the schemes of these routers, by the ports in their revisions."""
    found: set[str] = set()
    for revision in {revision_of(pod) for pod in routers}:
        stored: Any = find_revision(service, names.ROUTER, revision, observed.revisions) or {"data": {"template": {}}}
        for container in (stored["data"]["template"].get("spec") or {}).get("containers") or []:
            found |= _PORTS.keys() & {port.get("name") for port in container.get("ports") or []}
    return found


def flags(service: InferenceService) -> dict[str, object]:
    """Return the router's flags; none without TLS: routers of older images do not have them."""
    if service.spec.router.tls is None:
        return {}
    return {"ssl-certfile": FOLDER / "tls.crt", "ssl-keyfile": FOLDER / "tls.key"}


def mounted(service: InferenceService, *keys: str) -> list[pods.Mounted]:
    """Return the routers' volume with the certificate and its key, or with some `keys` of the Secret; none without TLS."""
    if service.spec.router.tls is None:
        return []
    files = {key: key for key in keys or ("tls.crt", "tls.key")}
    return [pods.Mounted("tls", FOLDER, pods.secret_source(names.router_tls_secret(service), files))]


def certificate_flags(service: InferenceService) -> dict[str, object]:
    """Return the batch server's flag; none without TLS."""
    return {} if service.spec.router.tls is None else {"router-certfile": FOLDER / "tls.crt"}


def mounted_certificate(service: InferenceService) -> list[pods.Mounted]:
    """Return the volume with the certificate alone, for pods that connect to routers."""
    return mounted(service, "tls.crt")


def host_names(service: InferenceService, settings: Settings) -> list[str]:
    """Return the names of the certificate: the user's, which a public issuer needs, or those of the Service and the gateway."""
    tls, gateway = service.spec.router.tls, service.spec.exposure.gateway
    if tls is not None and tls.dns_names:
        return list(tls.dns_names)
    home = f"{service.name}.{service.namespace}"
    own = [f"{home}.svc", home, service.name, f"{home}.svc.{settings.cluster_domain}"]
    return [*own, *(gateway.hostnames if gateway is not None else [])]


def objects(service: InferenceService, settings: Settings) -> list[Object]:
    """Return cert-manager's Certificate; nothing for a given Secret. Its issuer may be of another group than cert-manager's."""
    tls = service.spec.router.tls
    if tls is None or tls.issuer_ref is None:
        return []
    spec = {
        "secretName": names.router_tls_secret(service),
        "dnsNames": host_names(service, settings),
        "issuerRef": tls.issuer_ref.model_dump(mode="json", by_alias=True),
        "usages": ["digital signature", "server auth"],
        "privateKey": {"algorithm": "ECDSA", "size": 256, "rotationPolicy": "Always"},
    }
    return [make_child(service, CERTIFICATES, names.deployment(service, names.ROUTER), names.ROUTER, spec=spec)]


def backend_policy(service: InferenceService, observed: Observed) -> list[Object]:
    """Return the policy with which a gateway opens TLS connections to the routers; nothing where it sends requests to workers itself.

    After TLS was removed from the spec, the live policy stays while the gateway still uses TLS.
    """
    tls, exposure = service.spec.router.tls, service.spec.exposure
    if exposure.gateway is None or exposure.picks_endpoints:
        return []
    if tls is None:
        live = observed.optional_objects.get(TLS_POLICIES.kind)
        if live is None or _gateway_scheme(service, observed) != "https":
            return []
        return [make_child(service, TLS_POLICIES, service.name, names.ROUTER, spec=live["spec"])]
    authorities: Object = {"wellKnownCACertificates": "System"}
    if tls.ca_config_map is not None:
        authorities = {"caCertificateRefs": [{"group": "", "kind": "ConfigMap", "name": tls.ca_config_map}]}
    named = exposure.gateway.hostnames if tls.issuer_ref is None else tls.dns_names or []
    hostname = next((one for one in named if not one.startswith("*")), f"{service.name}.{service.namespace}.svc")
    target = {"group": "", "kind": "Service", "name": service.name, "sectionName": names.scheme(service)}
    spec = {"targetRefs": [target], "validation": {"hostname": hostname, **authorities}}
    return [make_child(service, TLS_POLICIES, service.name, names.ROUTER, spec=spec)]
