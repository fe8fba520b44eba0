"""A client's request: its headers, its body within bounds, and what the access log will say of it."""

import asyncio
import random
import re
from dataclasses import dataclass, field
from time import monotonic

from fairlead_router.client import Request
from fairlead_router.errors import ApiError, Headers

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
    def of(cls, request: Request) -> "Call":
        passed: Headers = []
        request_id, session, length = "", "", None
        of_the_hop: set[bytes] = set()
        for name, value in request.headers:
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
            request_id = f"{random.getrandbits(128):032x}"
        return cls(request.method, request.path, request.target, request_id, passed, length, session)

    async def read_body(self, request: Request, limit: int) -> None:
        """The whole body. Raises ApiError 413: before reading if the announced length is over `limit`, or once what came is."""
        if self.length is not None and self.length > limit:
            raise self._too_large(limit)
        while not request.whole and request.size <= limit:
            await request.more()
        if request.size > limit:
            raise self._too_large(limit)
        self.body = request.take()

    def _too_large(self, limit: int) -> ApiError:
        size = f"is {self.length} bytes" if self.length is not None else "has no announced length and"
        message = f"The request body {size} exceeds the limit of {limit} bytes (--max-body-bytes)."
        return ApiError(
            413, message.replace("bytes exceeds", "bytes: it exceeds"), code="request_too_large", headers=[(b"connection", b"close")]
        )


async def linger(request: Request) -> None:
    """Read away a bounded part of a body that was refused."""
    try:
        async with asyncio.timeout(LINGER_SECONDS):
            while not request.whole and request.size < LINGER_BYTES:
                request.take()
                await request.more()
    except TimeoutError:
        return
