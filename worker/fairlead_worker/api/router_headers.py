"""Request properties that the router sends in headers. Clients cannot set them, because the router strips `X-Fairlead-*` from requests.

They take precedence over fields of the body, which the client controls.
"""

import re

from fairlead_index.salts import cache_salt as derive_salt
from fairlead_worker.api.errors import invalid
from fairlead_worker.api.http import TENANT, RequestContext

SALT, PRIORITY, USAGE = b"x-fairlead-cache-salt", b"x-fairlead-priority", b"x-fairlead-usage"
"""USAGE: the stream ends with a comment that reports its usage. The router bills the tenant with it and does not parse every chunk."""


def read_origin(
    context: RequestContext, cache_salt: str | None, priority: int | None = None, user: str | None = None
) -> tuple[str, str, int]:
    """Return salt, tenant and priority of a request whose body has these fields. Raise ApiError 400 for an invalid header."""
    headers = context.headers
    salt = headers.get(SALT, b"").decode("latin-1")
    if not re.fullmatch(r"[0-9a-f]{0,64}", salt):
        raise invalid("X-Fairlead-Cache-Salt: must be hexadecimal digits, at most 64")
    sent = headers.get(PRIORITY)
    if sent is not None and not re.fullmatch(rb"-?[0-9]{1,9}", sent):
        raise invalid("X-Fairlead-Priority: must be a whole number")
    tenant = headers[TENANT].decode("latin-1") if TENANT in headers else user or ""
    return salt or derive_salt(b"", "", cache_salt or ""), tenant, (priority or 0) if sent is None else int(sent)
