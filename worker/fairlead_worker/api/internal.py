"""What the router says of a request in headers that no client can set, since it strips `X-Fairlead-*` from what they send.

They stand above the body's own fields: a body is the client's word.
"""

import re
from dataclasses import replace

from fairlead_index.salts import cache_salt
from fairlead_worker.api.errors import invalid
from fairlead_worker.api.http import Exchange
from fairlead_worker.api.sampling import Wanted
from fairlead_worker.api.schema import CommonRequest

SALT, TENANT, PRIORITY, USAGE = b"x-fairlead-cache-salt", b"x-fairlead-tenant", b"x-fairlead-priority", b"x-fairlead-usage"
"""USAGE: the stream ends with a comment that says its usage, for the tenant's account (and no parsing of every chunk)."""


def instructed(exchange: Exchange, request: CommonRequest, wanted: Wanted) -> Wanted:
    """`wanted` with the router's salt, tenant and priority; without a router's salt that of the client. Raises ApiError 400."""
    headers = exchange.headers
    salt = headers.get(SALT, b"").decode("latin-1")
    if not re.fullmatch(r"[0-9a-f]{0,64}", salt):
        raise invalid("X-Fairlead-Cache-Salt: must be hexadecimal digits, at most 64")
    priority = headers.get(PRIORITY)
    if priority is not None and not re.fullmatch(rb"-?[0-9]{1,9}", priority):
        raise invalid("X-Fairlead-Priority: must be a whole number")
    return replace(
        wanted,
        salt=salt or cache_salt(b"", "", request.cache_salt or ""),
        tenant=headers[TENANT].decode("latin-1") if TENANT in headers else wanted.tenant,
        priority=wanted.priority if priority is None else int(priority),
    )
