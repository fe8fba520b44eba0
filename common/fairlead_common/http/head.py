"""Checks of a request's head that the parsers leave out (RFC 9112, 2.3 and 3.2). Pure."""

import re
from collections.abc import Iterable
from typing import Final

SINGLE: Final = frozenset((b"host", b"authorization", b"x-api-key", b"content-encoding", b"content-type", b"origin"))
"""Headers that a request has at most once: of several, two servers may choose different ones."""
_VERSIONS: Final = ("1.1", "1.0")
_HOST: Final = re.compile(rb"[A-Za-z0-9._~!$&'()*+;=:%\[\]-]*")


def find_fault(version: str, headers: Iterable[tuple[bytes, bytes]]) -> str:
    """Return what is wrong with a request's head, as a sentence for its sender; empty if nothing is. Names are in lower case."""
    if version not in _VERSIONS:
        return f"HTTP/{version} is not supported here: use HTTP/1.1."
    seen: dict[bytes, bytes] = {}
    for name, value in headers:
        if name in SINGLE:
            if name in seen:
                return f"The request has two {name.decode()} headers: send one."
            seen[name] = value
    host = seen.get(b"host")
    if host is None:
        return "" if version == "1.0" else "An HTTP/1.1 request needs a Host header (RFC 9112, 3.2): send one."
    return "" if _HOST.fullmatch(host) else "The Host header is no HOST or HOST:PORT."
