"""What is asked of workers for a prompt: by the policy, and in the headers that only we may write. The same for every way in."""

from fairlead_router.errors import Headers
from fairlead_router.request.prompts import Prompt
from fairlead_router.routing.policies import RoutingRequest
from fairlead_router.tenancy.tenants import Caller


def build_routing_request(prompt: Prompt, caller: Caller, session: str) -> RoutingRequest:
    """What a choice may depend on. `session`: what the client gave as X-Session-Id."""
    return RoutingRequest(
        prompt.length,
        prompt.hashes,
        caller.session(session or prompt.user),
        prompt.model,
        prompt.format_tag,
        prompt.conversation,
        prompt.adapter,
    )


def worker_headers(prompt: Prompt, caller: Caller) -> Headers:
    """Headers for the worker, which no client can send through us."""
    headers: Headers = []
    if prompt.salt:
        headers.append((b"x-fairlead-cache-salt", prompt.salt.encode()))
    tenant = caller.tenant.name
    if tenant:
        headers.append((b"x-fairlead-tenant", tenant.encode()))
        headers.append((b"x-fairlead-priority", b"%d" % caller.effective_priority(prompt.params.priority)))
        if prompt.params.stream:
            headers.append((b"x-fairlead-usage", b"1"))
    return headers
