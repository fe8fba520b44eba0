"""What the router says of a request in headers that no client can set, since it strips `X-Fairlead-*` from what they send.

They stand above the body's own fields: a body is the client's word.
"""

import re
from dataclasses import dataclass, replace

from fairlead_index.salts import cache_salt
from fairlead_worker.api.errors import invalid
from fairlead_worker.api.generation.sampling import SamplingRequest
from fairlead_worker.api.http import RequestContext
from fairlead_worker.api.schema import CommonRequest

SALT, TENANT, PRIORITY, USAGE = b"x-fairlead-cache-salt", b"x-fairlead-tenant", b"x-fairlead-priority", b"x-fairlead-usage"
"""USAGE: the stream ends with a comment that says its usage, for the tenant's account (and no parsing of every chunk)."""


@dataclass(frozen=True, slots=True)
class RequestOrigin:
    """Who asks. `tenant` and `priority`: None where no router says."""

    salt: str
    """The router's; without one that of the client."""
    tenant: str | None
    priority: int | None


def read_origin(context: RequestContext, given_salt: str | None) -> RequestOrigin:
    """`given_salt`: the body's `cache_salt`. Raises ApiError 400."""
    headers = context.headers
    salt = headers.get(SALT, b"").decode("latin-1")
    if not re.fullmatch(r"[0-9a-f]{0,64}", salt):
        raise invalid("X-Fairlead-Cache-Salt: must be hexadecimal digits, at most 64")
    priority = headers.get(PRIORITY)
    if priority is not None and not re.fullmatch(rb"-?[0-9]{1,9}", priority):
        raise invalid("X-Fairlead-Priority: must be a whole number")
    return RequestOrigin(
        salt=salt or cache_salt(b"", "", given_salt or ""),
        tenant=headers[TENANT].decode("latin-1") if TENANT in headers else None,
        priority=None if priority is None else int(priority),
    )


def apply_router_headers(context: RequestContext, request: CommonRequest, sampling_request: SamplingRequest) -> SamplingRequest:
    """`wanted` with what is known of who asks. Raises ApiError 400."""
    origin = read_origin(context, request.cache_salt)
    return replace(
        sampling_request,
        salt=origin.salt,
        tenant=sampling_request.tenant if origin.tenant is None else origin.tenant,
        priority=sampling_request.priority if origin.priority is None else origin.priority,
    )
