"""`status.externalURL`: the base URL for clients outside the cluster, from the listeners of the service's Gateway. Pure."""

from collections.abc import Iterable, Mapping
from typing import Any

from fairlead_operator.api import InferenceService
from fairlead_operator.observed import Observed

_PORTS = {"https": 443, "http": 80}
Listener = Mapping[str, Any]


def build_url(service: InferenceService, observed: Observed) -> str:
    """Return the URL; empty where the Gateway is unknown, or no listener serves a name or address of it."""
    gateway = service.spec.exposure.gateway
    if gateway is None or not observed.gateway:
        return ""
    chosen = [one for one in listeners(observed) if gateway.parent_ref.section_name in (None, one.get("name"))]
    for scheme in _PORTS:  # https first
        for listener in chosen:
            if str(listener.get("protocol", "")).lower() == scheme:
                host = _choose_host(gateway.hostnames, str(listener.get("hostname") or ""), _addresses(observed))
                if host:
                    port = int(listener["port"])
                    return f"{scheme}://{host}{'' if port == _PORTS[scheme] else f':{port}'}/v1"
    return ""


def listeners(observed: Observed) -> list[Listener]:
    return list(((observed.gateway or {}).get("spec") or {}).get("listeners") or [])


def _addresses(observed: Observed) -> Iterable[str]:
    for address in ((observed.gateway or {}).get("status") or {}).get("addresses") or []:
        value = str(address.get("value", ""))
        yield f"[{value}]" if ":" in value else value


def _choose_host(route: Iterable[str], listener: str, addresses: Iterable[str]) -> str:
    """Return the host: a name of the route that the listener serves, the listener's own name, or the Gateway's address.

    A wildcard is no host. Without any name a route answers every host, the address too.
    """
    names = list(route)
    if names:
        served = [name for name in names if not listener or _matches(name, listener)]
        narrower = [listener] if listener and any(_matches(listener, name) for name in names) else []
        return next((name for name in [*served, *narrower] if not name.startswith("*")), "")
    if listener:
        return "" if listener.startswith("*") else listener
    return next(iter(addresses), "")


def _matches(name: str, pattern: str) -> bool:
    """Return whether `pattern`, a name or `*.SUFFIX` of any depth as in the Gateway API, covers `name`."""
    return name == pattern or (pattern.startswith("*.") and name.removeprefix("*").endswith(pattern[1:]) and name != pattern[2:])
