"""Request properties that the router sends in headers. Clients cannot set them, because the router strips `X-Fairlead-*` from requests.

They take precedence over fields of the body, which the client controls.
"""

import re
import time
from dataclasses import dataclass, replace

from fairlead_index.salts import cache_salt
from fairlead_worker.api.errors import invalid
from fairlead_worker.api.generation.sampling import SamplingRequest
from fairlead_worker.api.http import RequestContext
from fairlead_worker.api.schema import CommonRequest

SALT, TENANT, PRIORITY, USAGE = b"x-fairlead-cache-salt", b"x-fairlead-tenant", b"x-fairlead-priority", b"x-fairlead-usage"
"""USAGE: the stream ends with a comment that reports its usage. The router bills the tenant with it and does not parse every chunk."""
DEADLINE = b"x-fairlead-deadline-ms"
"""Milliseconds from now until the first token is due."""
ATTEMPT = b"x-fairlead-attempt"
"""Name by which the router can withdraw the request (`api/admin/withdraw.py`): random, because client's request ids may be equal."""


@dataclass(frozen=True, slots=True)
class RequestOrigin:
    """The origin of a request. `tenant` and `priority` are None if no router sent them, and `due_at` is 0 without a deadline."""

    salt: str
    """The router's salt, or the client's if the router sent none."""
    tenant: str | None
    priority: int | None
    due_at: float
    """When the first token is due, in `time.monotonic` seconds."""
    attempt: str


def read_origin(context: RequestContext, given_salt: str | None) -> RequestOrigin:
    """Return the origin of a request. `given_salt`: the body's `cache_salt`. Raise ApiError 400 for an invalid header."""
    headers = context.headers
    salt = headers.get(SALT, b"").decode("latin-1")
    if not re.fullmatch(r"[0-9a-f]{0,64}", salt):
        raise invalid("X-Fairlead-Cache-Salt: must be hexadecimal digits, at most 64")
    priority = headers.get(PRIORITY)
    if priority is not None and not re.fullmatch(rb"-?[0-9]{1,9}", priority):
        raise invalid("X-Fairlead-Priority: must be a whole number")
    deadline = headers.get(DEADLINE)
    if deadline is not None and not re.fullmatch(rb"[0-9]{1,9}", deadline):
        raise invalid("X-Fairlead-Deadline-Ms: must be a whole number of milliseconds, 0 to 999999999")
    attempt = headers.get(ATTEMPT, b"").decode("latin-1")
    if not re.fullmatch(r"[0-9a-f]{0,64}", attempt):
        raise invalid("X-Fairlead-Attempt: must be hexadecimal digits, at most 64")
    return RequestOrigin(
        salt=salt or cache_salt(b"", "", given_salt or ""),
        tenant=headers[TENANT].decode("latin-1") if TENANT in headers else None,
        priority=None if priority is None else int(priority),
        due_at=0.0 if deadline is None else time.monotonic() + int(deadline) / 1000,
        attempt=attempt,
    )


def apply_router_headers(context: RequestContext, request: CommonRequest, sampling_request: SamplingRequest) -> SamplingRequest:
    """Return `sampling_request` with what the router's headers say. Raise ApiError 400 for an invalid header."""
    origin = read_origin(context, request.cache_salt)
    return replace(
        sampling_request,
        salt=origin.salt,
        tenant=sampling_request.tenant if origin.tenant is None else origin.tenant,
        priority=sampling_request.priority if origin.priority is None else origin.priority,
        due_at=origin.due_at,
        attempt=origin.attempt,
    )
