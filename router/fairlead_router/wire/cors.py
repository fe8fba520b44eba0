"""CORS for `--allowed-origins`: a browser lets a page of another origin call only if the answers allow it (Fetch standard, 3.2).

The worker uses starlette's middleware. The router has no ASGI, and this is what it needs of it: no cookies, every method and header.
"""

from fairlead_common.http.client_connection import Request
from fairlead_common.http.origins import EXPOSED_HEADERS, MAX_AGE_SECONDS
from fairlead_common.http.response import Reply
from fairlead_router.errors import Headers

_EXPOSED = (b"access-control-expose-headers", ", ".join(EXPOSED_HEADERS).encode())


class Cors:
    """Adds the headers, and answers preflight requests, which carry no API key."""

    def __init__(self, origins: tuple[str, ...]) -> None:
        self._allows_all = "*" in origins
        self._origins = frozenset(origin.encode() for origin in origins)

    def answer(self, request: Request, reply: Reply) -> bool:
        """Add headers to the reply for a request of a web page. Return True if it was a preflight, which is then answered."""
        headers = dict(request.headers)
        origin = headers.get(b"origin")
        if origin is None:
            return False
        allowed = self._allows_all or origin in self._origins
        if allowed:
            value = b"*" if self._allows_all else origin
            reply.extra_headers = [(b"access-control-allow-origin", value), (b"vary", b"Origin"), _EXPOSED]
        method = headers.get(b"access-control-request-method")
        if request.method != "OPTIONS" or method is None:
            return False
        granted: Headers = [(b"content-length", b"0")]
        if allowed:
            granted += [
                (b"access-control-allow-methods", method),
                (b"access-control-allow-headers", headers.get(b"access-control-request-headers", b"*")),
                (b"access-control-max-age", b"%d" % MAX_AGE_SECONDS),
            ]
        reply.start(200 if allowed else 403, granted)
        reply.end()
        return True
