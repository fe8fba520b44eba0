"""Routing request and worker headers of a prompt, the same for the proxy, redirects and the endpoint picker."""

from fairlead_router.errors import Headers
from fairlead_router.request.prompts import Prompt
from fairlead_router.routing.policies import RoutingRequest
from fairlead_router.service_classes import ServiceClass
from fairlead_router.tenancy.class_selection import priority_of
from fairlead_router.tenancy.tenants import Caller


def build_routing_request(prompt: Prompt, caller: Caller, session: str) -> RoutingRequest:
    """Return what the routing policy may depend on. `session`: the client's X-Session-Id."""
    return RoutingRequest(
        prompt.length,
        prompt.hashes,
        caller.session(session or prompt.params.user),
        prompt.model,
        prompt.format_tag,
        prompt.params.conversation,
        prompt.adapter,
        prompt.other_hashes,
    )


def worker_headers(prompt: Prompt, caller: Caller, service_class: ServiceClass | None = None) -> Headers:
    """Return the router's own headers for the worker. Clients' headers of these names are not forwarded."""
    headers: Headers = []
    if prompt.salt:
        headers.append((b"x-fairlead-cache-salt", prompt.salt.encode()))
    tenant = caller.tenant.name
    if tenant:
        headers.append((b"x-fairlead-tenant", tenant.encode()))
        if prompt.params.stream:
            headers.append((b"x-fairlead-usage", b"1"))
    if tenant or service_class is not None:
        headers.append((b"x-fairlead-priority", b"%d" % priority_of(service_class, caller, prompt.params.priority)))
    return headers
