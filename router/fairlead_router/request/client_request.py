"""A client's request: its headers, its body within bounds, and what the access log will say of it."""

import asyncio
import random
import re
from dataclasses import dataclass, field
from time import monotonic

from fairlead_router.errors import ApiError, Headers
from fairlead_router.tenancy.body_budget import Bodies
from fairlead_router.tenancy.quota import Account
from fairlead_router.tenancy.tenants import ANYONE, Caller, credential
from fairlead_router.tenancy.usage import Meter
from fairlead_router.wire.client_connection import Request
from fairlead_router.wire.held_stream import HeldStream

_ID = re.compile(r"[\x21-\x7e]{1,128}")
_NOT_PASSED = frozenset(
    b"connection keep-alive proxy-connection proxy-authenticate proxy-authorization te trailer transfer-encoding upgrade expect host "
    b"content-length accept-encoding authorization x-api-key cookie x-request-id".split()
)
LINGER_BYTES, LINGER_SECONDS = 256 << 20, 5.0
"""How much of a refused body is read away: a client still sending would see a reset, not the answer (nginx: lingering_close)."""


@dataclass(slots=True)
class Call:
    """One request and what became of it."""

    method: str
    path: str
    id: str
    passed: Headers
    """Headers for the worker: none of the hop, of the client's credentials, or of ours."""
    length: int | None
    session: str
    credential: bytes = field(default=b"", repr=False)
    """The client's API key, until it was looked at."""
    encoding: bytes = b""
    """Of the body, as the client said."""
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
    refused: bool = False
    caller: Caller = ANYONE
    account: Account | None = None
    instructions: Headers = field(default_factory=list)
    """Headers of ours for the worker."""
    meter: Meter | None = None
    """Reads what the answer used; None where nobody counts."""
    held: HeldStream | None = None
    """Of a stream: what it is told while it waits."""
    bodies: Bodies | None = None
    kept: int = 0
    """Bytes of the body, counted in `bodies`."""

    @classmethod
    def of(cls, request: Request) -> "Call":
        passed: Headers = []
        given, session, length, encoding, authorization, key = "", "", None, b"", b"", b""
        of_the_hop: set[bytes] = set()
        for header in request.headers:
            name, value = header
            if name not in _NOT_PASSED:
                if name == b"x-session-id":
                    session = value.decode("latin-1")
                elif name == b"content-encoding":
                    encoding = value.strip().lower()
                if not name.startswith(b"x-fairlead-"):
                    passed.append(header)
            elif name == b"content-length":
                length = int(value) if value.isdigit() else None
            elif name == b"x-request-id":
                given = value.decode("latin-1")
            elif name == b"authorization":
                authorization = value
            elif name == b"x-api-key":
                key = value
            elif name == b"connection":
                of_the_hop.update(word.strip().lower() for word in value.split(b","))
        if of_the_hop:  # the client names headers that are for us alone (RFC 9110, 7.6.1)
            passed = [(name, value) for name, value in passed if name not in of_the_hop]
        # The query is left out: no path here takes one, and some clients put their key there.
        return cls(request.method, request.path, request_id(given), passed, length, session, credential(authorization, key), encoding)

    @property
    def waits(self) -> bool:
        """Its client has been told that it is held, and nothing of a worker's answer yet."""
        return self.held is not None and self.held.begun and self.first_byte is None

    @property
    def sender(self) -> str:
        """Tenant and key by name, for the log."""
        return f"{self.caller.tenant.name}/{self.caller.key}" if self.caller.tenant.name else "-"

    def keep(self, size: int) -> None:
        """Count `size` bytes of the body in all. Raises ApiError where the router keeps too many."""
        if self.bodies is not None and size > self.kept:
            self.bodies.take(self.caller.tenant.name, size - self.kept)
            self.kept = size

    def let_go(self) -> None:
        """The body is not needed any more."""
        self.body = b""
        if self.bodies is not None and self.kept:
            self.bodies.give_back(self.caller.tenant.name, self.kept)
            self.kept = 0

    async def read_body(self, request: Request, limit: int) -> None:
        """The whole body.

        Raises ApiError: 413 before reading if the announced length is over `limit`, or once what came is; 415 for a packed one, which would
        get round that bound.
        """
        if self.encoding not in (b"", b"identity"):
            message = f"The request body has Content-Encoding {self.encoding.decode('latin-1')[:100]!r}; send it without one."
            raise ApiError(
                415, message, code="unsupported_encoding", headers=[(b"accept-encoding", b"identity"), (b"connection", b"close")]
            )
        if self.length is not None and self.length > limit:
            raise self._too_large(limit)
        while not request.whole and request.size <= limit:
            self.keep(request.size)
            await request.more()
        if request.size > limit:
            raise self._too_large(limit)
        self.keep(request.size)
        self.body = request.take()

    def _too_large(self, limit: int) -> ApiError:
        size = f"is {self.length} bytes" if self.length is not None else "has no announced length and"
        message = f"The request body {size} exceeds the limit of {limit} bytes (--max-body-bytes)."
        return ApiError(
            413, message.replace("bytes exceeds", "bytes: it exceeds"), code="request_too_large", headers=[(b"connection", b"close")]
        )


def request_id(given: str) -> str:
    """What the client gave, if it may stand in a header and a log; else one of our own."""
    return given if _ID.fullmatch(given) else f"{random.getrandbits(128):032x}"


async def linger(request: Request) -> None:
    """Read away a bounded part of a body that was refused."""
    try:
        async with asyncio.timeout(LINGER_SECONDS):
            while not request.whole and request.size < LINGER_BYTES:
                request.take()
                await request.more()
    except TimeoutError:
        return
