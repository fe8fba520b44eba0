"""TLS of the routers' port for clients: the port, the mounted Secret, and the Certificate that cert-manager is to issue.

Plain and TLS ports have different numbers and names. So a Service never sends a client of one to a router of the other during a rollout.
"""

from pathlib import PurePosixPath

from fairlead_operator import names
from fairlead_operator.api import InferenceService
from fairlead_operator.objects import Object
from fairlead_operator.settings import Settings

CERTIFICATE, BACKEND_POLICY = "Certificate", "BackendTLSPolicy"
FOLDER = PurePosixPath("/etc/fairlead/tls")


def port_number(service: InferenceService) -> int:
    """Return the port on which routers listen for clients."""
    return names.ROUTER_PORT if service.spec.router.tls is None else names.ROUTER_TLS_PORT


def service_port(service: InferenceService) -> Object:
    """Return the port of the Service that clients use."""
    name = names.scheme(service)
    return {"name": name, "port": names.service_port(service), "targetPort": name, "protocol": "TCP", "appProtocol": name}


def flags(service: InferenceService) -> dict[str, object]:
    """Return the router's flags; none without TLS: routers of older images do not have them."""
    if service.spec.router.tls is None:
        return {}
    return {"ssl-certfile": FOLDER / "tls.crt", "ssl-keyfile": FOLDER / "tls.key"}


def volumes(service: InferenceService) -> list[Object]:
    """Return the volume. It is a folder, because the kubelet does not update files that are mounted with subPath."""
    if service.spec.router.tls is None:
        return []
    items = [{"key": key, "path": key} for key in ("tls.crt", "tls.key")]
    return [{"name": "tls", "secret": {"secretName": names.router_tls_secret(service), "items": items, "defaultMode": 0o440}}]


def mounts(service: InferenceService) -> list[Object]:
    return [{"name": "tls", "mountPath": str(FOLDER), "readOnly": True}] if volumes(service) else []


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
    return [
        {
            "apiVersion": "cert-manager.io/v1",
            "kind": CERTIFICATE,
            "metadata": names.metadata(service, names.deployment(service, names.ROUTER), names.ROUTER),
            "spec": {
                "secretName": names.router_tls_secret(service),
                "dnsNames": host_names(service, settings),
                "issuerRef": tls.issuer_ref.model_dump(mode="json", by_alias=True),
                "usages": ["digital signature", "server auth"],
                "privateKey": {"algorithm": "ECDSA", "size": 256, "rotationPolicy": "Always"},
            },
        }
    ]


def backend_policy(service: InferenceService) -> list[Object]:
    """Return the policy with which a gateway opens TLS connections to the routers; nothing where it sends requests to workers itself."""
    tls, exposure = service.spec.router.tls, service.spec.exposure
    if tls is None or exposure.gateway is None or exposure.picks_endpoints:
        return []
    authorities: Object = {"wellKnownCACertificates": "System"}
    if tls.ca_config_map is not None:
        authorities = {"caCertificateRefs": [{"group": "", "kind": "ConfigMap", "name": tls.ca_config_map}]}
    named = exposure.gateway.hostnames if tls.issuer_ref is None else tls.dns_names or []
    hostname = next((one for one in named if not one.startswith("*")), f"{service.name}.{service.namespace}.svc")
    return [
        {
            "apiVersion": "gateway.networking.k8s.io/v1",
            "kind": BACKEND_POLICY,
            "metadata": names.metadata(service, service.name, names.ROUTER),
            "spec": {
                "targetRefs": [{"group": "", "kind": "Service", "name": service.name, "sectionName": names.scheme(service)}],
                "validation": {"hostname": hostname, **authorities},
            },
        }
    ]
