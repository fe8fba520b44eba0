"""Client request: its headers, its bounded body, and the fields of its access log line."""

import asyncio
import random
import re
from collections.abc import Collection, Sequence
from time import monotonic
from typing import Final

import msgspec

from fairlead_common.http.client_connection import Request
from fairlead_common.telemetry.spans import NO_SPAN, Span
from fairlead_index.score import StartEstimate
from fairlead_router.config import NOT_FORWARDED
from fairlead_router.errors import ApiError, Headers
from fairlead_router.request.price import price_of_cpu, price_of_pieces
from fairlead_router.service_classes import ServiceClass
from fairlead_router.tenancy.body_budget import InflightBodyBudget
from fairlead_router.tenancy.charge import UsageMeter
from fairlead_router.tenancy.quota import Account
from fairlead_router.tenancy.shared_secret import TENANT_HEADER
from fairlead_router.tenancy.tenants import ANONYMOUS, Caller
from fairlead_router.wire.held_stream import HeldStream

FREE_PIECES: Final = 256
"""Pieces of a body that cost nothing beside its bytes: the largest one comes in 32 reads."""
_ID = re.compile(r"[\x21-\x7e]{1,128}")
SESSION: Final = b"x-session-id"
_TENANT = TENANT_HEADER.encode()
OPT_OUT: Final = b"x-fairlead-forwarding-mode"
"""Header with which a client that cannot follow redirects requests `proxy`."""
LINGER_BYTES, LINGER_SECONDS = 256 << 20, 5.0
"""Limits for discarding a refused body: a client that still sends would see a reset instead of the answer (nginx: lingering_close)."""


class RequestHead(msgspec.Struct, frozen=True):
    """What the client sent before the body, without its credential."""

    method: str
    path: str
    id: str
    forwarded_headers: Headers
    """The client's headers for the worker, without hop-by-hop headers, credentials, and names that the router sets itself."""
    length: int | None = None
    session: str = ""
    encoding: bytes = b""
    """The client's Content-Encoding."""
    acts_for: str | None = None
    """Tenant that the client names in a header. Only the batch server may."""
    requested_class: str = ""
    """Service class that the client names in X-SLO-Class."""
    started_at: float = msgspec.field(default_factory=monotonic)

    @classmethod
    def read(cls, request: Request, session_header: bytes = SESSION, kept: Collection[bytes] = ()) -> "RequestHead":
        """Read a request. `session_header`: in lower case; the header that names the session. `kept`: further headers that end here."""
        forwarded: Headers = []
        client_id, session, length, encoding, requested_class = "", "", None, b"", ""
        hop_by_hop: set[bytes] = set(kept)
        acts_for: str | None = None
        for header in request.headers:
            name, value = header
            if name not in NOT_FORWARDED:
                if name == session_header:
                    session = value.decode("latin-1")
                elif name == b"content-encoding":
                    encoding = value.strip().lower()
                if not name.startswith(b"x-fairlead-"):
                    forwarded.append(header)
                elif name == _TENANT:
                    acts_for = value.decode("latin-1")
            elif name == b"content-length":
                length = int(value) if value.isdigit() else None
            elif name == b"x-request-id":
                client_id = value.decode("latin-1")
            elif name == b"x-slo-class":
                requested_class = value.decode("latin-1").strip()
            elif name == b"connection":
                hop_by_hop.update(word.strip().lower() for word in value.split(b","))
        if hop_by_hop:  # headers that `connection` names are hop-by-hop (RFC 9110, 7.6.1)
            forwarded = [(name, value) for name, value in forwarded if name not in hop_by_hop]
        # The query is left out: no path here takes one, and some clients put their key there.
        id = choose_request_id(client_id)
        return cls(request.method, request.path, id, forwarded, length, session, encoding, acts_for, requested_class, request.started_at)


class Outcome(msgspec.Struct):
    """What became of a request, for the access log, metrics and the web console."""

    status: int = 0
    ending: str = "ok"
    """`ok`, `client_gone` or `broken`."""
    attempts: int = 0
    worker: str = ""
    is_reported: bool = False
    """The worker reports what it has computed if the client leaves before an answer. An agent does not."""
    other_service: str = ""
    """Service that the request was forwarded to; empty: this one's."""
    model: str = ""
    """Model name that the worker must serve; empty where every worker does."""
    prompt_tokens: int | None = None
    predicted_tokens: int | None = None
    cached_tokens: int | None = None
    candidates: Sequence[StartEstimate] = ()
    """The workers that the last choice compared, best first; empty unless the web console shows them."""
    hashes: Sequence[int] = ()
    """Block hashes of the prompt that was sent to a worker."""
    chosen_at: float = 0.0
    first_byte_at: float | None = None
    bytes_out: int = 0


class Call(msgspec.Struct):
    """One request, and what each phase finds out about it."""

    head: RequestHead
    outcome: Outcome = msgspec.field(default_factory=Outcome)
    span: Span = NO_SPAN
    trace_id: str = ""
    """Trace that the request belongs to, for the log."""

    # Set by RequestHandler.authenticate and select_class.
    caller: Caller = ANONYMOUS
    account: Account | None = None
    is_from_batch_server: bool = False
    """Authenticated with the secret that this service's routers and batch server share."""
    service_class: ServiceClass | None = None

    body: bytes = b""
    body_budget: InflightBodyBudget | None = None
    reserved_bytes: int = 0
    """Bytes of the body that are counted in `body_budget`."""

    is_counted: bool = False
    """Demand counts the request until it ends."""

    # Set by RequestHandler.forward.
    worker_headers: Headers = msgspec.field(default_factory=list)
    """The router's own headers for the worker."""
    meter: UsageMeter | None = None
    """Reads the answer's token usage; None where usage is not counted."""
    held_stream: HeldStream | None = None
    """Keep-alive side of a stream; None for other requests."""

    @property
    def is_held(self) -> bool:
        """Whether the client has got keep-alives, and no byte of a worker's answer yet."""
        return self.held_stream is not None and self.held_stream.has_started and self.outcome.first_byte_at is None

    @property
    def is_best_effort(self) -> bool:
        return self.service_class is not None and self.service_class.is_best_effort

    @property
    def log_name(self) -> str:
        """Names of tenant and key, for the log."""
        return f"{self.caller.tenant.name}/{self.caller.key}" if self.caller.tenant.name else "-"

    @property
    def class_name(self) -> str:
        """Name of the service class, for the log."""
        return self.service_class.name if self.service_class is not None else "-"

    def reserve_body(self, size: int) -> None:
        """Reserve `size` bytes in total for the body. Raises ApiError when the body budget is exhausted."""
        if self.body_budget is not None and size > self.reserved_bytes:
            self.body_budget.acquire(self.caller.tenant.name, size - self.reserved_bytes)
            self.reserved_bytes = size

    def release_body(self) -> None:
        """Drop the body and release its bytes."""
        self.body = b""
        if self.body_budget is not None and self.reserved_bytes:
            self.body_budget.release(self.caller.tenant.name, self.reserved_bytes)
            self.reserved_bytes = 0

    async def read_body(self, request: Request, limit: int, reason: str = "--max-body-bytes") -> None:
        """Read the whole body. `reason`: what sets the limit.

        Raises ApiError: 413 before reading if the announced length exceeds `limit`, or once the received bytes do; 415 for a compressed
        body, which would evade that limit.
        """
        if self.head.encoding not in (b"", b"identity"):
            message = f"The request body has Content-Encoding {self.head.encoding.decode('latin-1')[:100]!r}; send it without one."
            raise ApiError(
                415, message, code="unsupported_encoding", headers=[(b"accept-encoding", b"identity"), (b"connection", b"close")]
            )
        if self.head.length is not None and self.head.length > limit:
            raise self.too_large(limit, reason)
        try:
            while not request.is_complete and request.received <= limit:
                self.reserve_body(request.received)
                await request.wait_for_body()
        finally:
            self.pay_for_pieces(request)
            if not request.is_complete and self.account is not None:  # its client has left, or it is refused
                self.account.use(price_of_cpu(request.received, 0.0))
        if request.received > limit:
            raise self.too_large(limit, reason)
        self.reserve_body(request.received)
        self.body = request.take()

    def pay_for_pieces(self, request: Request) -> None:
        """Charge a body that came in many pieces: each costs the event loop, however short it is."""
        if request.pieces > FREE_PIECES and self.account is not None:
            self.account.use(price_of_pieces(request.pieces))

    def too_large(self, limit: int, reason: str) -> ApiError:
        """Return the 413 for a body beyond `limit` bytes."""
        size = f"is {self.head.length} bytes" if self.head.length is not None else "has no announced length and"
        message = f"The request body {size} exceeds the limit of {limit} bytes ({reason})."
        return ApiError(
            413, message.replace("bytes exceeds", "bytes: it exceeds"), code="request_too_large", headers=[(b"connection", b"close")]
        )


def choose_request_id(client_id: str) -> str:
    """Return the client's request id if it is safe in a header and a log; else a random one."""
    return client_id if _ID.fullmatch(client_id) else f"{random.getrandbits(128):032x}"


async def linger(request: Request) -> None:
    """Discard a bounded part of a refused body."""
    try:
        async with asyncio.timeout(LINGER_SECONDS):
            while not request.is_complete and request.received < LINGER_BYTES:
                request.take()
                await request.wait_for_body()
    except TimeoutError:
        return
