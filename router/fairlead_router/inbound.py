"""A client's request: its headers, its body within bounds, and what the access log will say of it."""

import asyncio
import os
import re
from collections.abc import MutableMapping
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

from fairlead_router.errors import ApiError, Headers, Receive

_ID = re.compile(r"[\x21-\x7e]{1,128}")
_NOT_PASSED = frozenset(
    b"connection keep-alive proxy-connection proxy-authenticate proxy-authorization te trailer transfer-encoding upgrade expect host "
    b"content-length accept-encoding authorization cookie x-request-id".split()
)
LINGER_BYTES, LINGER_SECONDS = 256 << 20, 5.0
"""How much of a refused body is read away: a client still sending would see a reset, not the answer (nginx: lingering_close)."""


@dataclass(slots=True)
class Call:
    """One request and what became of it."""

    method: str
    path: str
    target: bytes
    """Path and query as the client wrote them."""
    id: str
    passed: Headers
    """Headers for the worker: none of the hop, of the client's credentials, or of ours."""
    length: int | None
    session: str
    began: float = field(default_factory=monotonic)
    body: bytes = b""
    status: int = 0
    attempts: int = 0
    prompt_tokens: int | None = None
    predicted: int | None = None
    cached: int | None = None
    worker: str = ""
    first_byte: float | None = None
    bytes_out: int = 0
    ending: str = "ok"
    """`ok`, `client_gone` or `broken`."""

    @classmethod
    def of(cls, scope: MutableMapping[str, Any]) -> "Call":
        passed: Headers = []
        request_id, session, length = "", "", None
        of_the_hop: set[bytes] = set()
        for name, value in scope["headers"]:
            if name == b"x-request-id":
                request_id = value.decode("latin-1")
            elif name == b"content-length":
                length = int(value) if value.isdigit() else None
            elif name == b"x-session-id":
                session = value.decode("latin-1")
            elif name == b"connection":
                of_the_hop.update(word.strip().lower() for word in value.split(b","))
            if name not in _NOT_PASSED and not name.startswith(b"x-fairlead-"):
                passed.append((name, value))
        if of_the_hop:  # the client names headers that are for us alone (RFC 9110, 7.6.1)
            passed = [(name, value) for name, value in passed if name not in of_the_hop]
        if not _ID.fullmatch(request_id):
            request_id = os.urandom(16).hex()
        query = scope["query_string"]
        target = scope["raw_path"] + (b"?" + query if query else b"")
        return cls(scope["method"], scope["path"], target, request_id, passed, length, session)

    async def read_body(self, receive: Receive, limit: int) -> None:
        """The whole body. Raises ClientGone; ApiError 413 before reading if the announced length is over `limit`, or once what came is."""
        if self.length is not None and self.length > limit:
            raise self._too_large(limit)
        message = await receive()
        if message["type"] == "http.request" and not message.get("more_body"):
            self.body = message.get("body", b"")
            if len(self.body) > limit:
                raise self._too_large(limit)
            return
        body = bytearray()
        while message["type"] == "http.request":
            body += message.get("body", b"")
            if len(body) > limit:
                raise self._too_large(limit)
            if not message.get("more_body"):
                self.body = bytes(body)
                return
            message = await receive()
        raise ClientGone

    def _too_large(self, limit: int) -> ApiError:
        size = f"is {self.length} bytes" if self.length is not None else "has no announced length and"
        message = f"The request body {size} exceeds the limit of {limit} bytes (--max-body-bytes)."
        return ApiError(
            413, message.replace("bytes exceeds", "bytes: it exceeds"), code="request_too_large", headers=[(b"connection", b"close")]
        )


class ClientGone(Exception):
    """The client closed its connection."""


async def linger(receive: Receive) -> None:
    """Read away a bounded part of a body that was refused."""
    left = LINGER_BYTES
    try:
        async with asyncio.timeout(LINGER_SECONDS):
            while left > 0:
                message = await receive()
                left -= len(message.get("body", b"")) + 1
                if message["type"] != "http.request" or not message.get("more_body"):
                    return
    except TimeoutError:
        return
