"""`--allowed-origins`: the web pages that may call (CORS), the same for worker and router."""

import json
import re
from ipaddress import ip_address
from urllib.parse import urlsplit

EXPOSED_HEADERS = ("x-request-id", "retry-after")
"""Response headers that a page's script may read besides the default ones."""
MAX_AGE_SECONDS = 600
"""Time for which a browser keeps the answer of a preflight."""
FOREIGN = "only same-origin web pages at an IP address or localhost may call admin paths; programs should send no Origin header"
"""The message of a refused request for an admin path."""
FOREIGN_CHANGE = "a web page of another origin may not change what this server stores: allow it with --allowed-origins"
_ORIGIN = re.compile(r"\*|[a-z][a-z0-9+.-]*://[^/\s,]+")


def parse_origins(text: str) -> tuple[str, ...]:
    """Return the origins of a list with commas, or of a JSON list as vLLM takes it; none for an empty text. Raises ValueError."""
    try:
        given = json.loads(text) if text.lstrip().startswith("[") else text.split(",")
    except ValueError as error:
        raise ValueError(f"is no JSON list ({error}); give origins with commas, as in https://chat.example.com") from None
    origins = tuple(origin.strip() for origin in map(str, given) if origin.strip())
    for origin in origins:
        if not _ORIGIN.fullmatch(origin):
            raise ValueError(f"{origin!r} is no origin; give SCHEME://HOST[:PORT] without a path, as in https://chat.example.com, or *")
    return origins


def is_foreign(origin: bytes | None, host: bytes) -> bool:
    """Return whether a web page of another origin sent a request with these `Origin` and `Host` headers.

    Browsers send `Origin` with every POST, also with a form's, which needs no preflight. Programs send none.
    """
    authority = None if origin is None else origin.partition(b"://")[2]
    return authority is not None and (not authority or authority.lower() != host.lower())


def is_foreign_to_admin(origin: bytes | None, host: bytes) -> bool:
    """Return whether an admin path refuses these `Origin` and `Host` headers: as `is_foreign`, and every page that a DNS name serves.

    The owner of a name can point it at this machine after a browser has loaded the page (DNS rebinding). Then the origin is the same.
    """
    return origin is not None and (is_foreign(origin, host) or not _is_address(host))


def _is_address(host: bytes) -> bool:
    try:
        name = urlsplit("//" + host.decode("latin-1")).hostname or ""
        return name == "localhost" or bool(ip_address(name.partition("%")[0]))
    except ValueError:
        return False
