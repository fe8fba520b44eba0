"""The ASGI side of a request: its context, its bounded body, and the middleware in front of every route."""

import asyncio
import logging
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextlib import suppress
from typing import Any, TypeVar

import msgspec
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fairlead_common.fair_slots import FairSlots
from fairlead_common.http.response import Headers
from fairlead_common.protocols.paths import COMPUTED, COUNT_TOKENS, INVOCATIONS, MESSAGES, RESPONSES, TOKENIZED
from fairlead_common.telemetry.spans import NO_SPAN, Span
from fairlead_common.truncate import quote
from fairlead_worker.api.engine.client import EngineGone, EngineNotReady
from fairlead_worker.api.engine.generation import ClientTooSlow
from fairlead_worker.api.errors import ApiError, lost, too_large, unavailable
from fairlead_worker.api.request_cpu import RequestCpu, UnreportedCpu
from fairlead_worker.api.request_warnings import HEADER, begin_request, format_header
from fairlead_worker.api.worker import Worker

logger = logging.getLogger(__name__)

LINGER_SECONDS, LINGER_BYTES = 5.0, 256 << 20
"""Time (seconds) and size (bytes) limits for reading and discarding a refused body; the router has the same limits.

A close on unread data sends a TCP reset, and the reset overtakes the answer. Clients send the whole body before they read: the openai
client reports a reset as a connection error and retries.
"""
TENANT = b"x-fairlead-tenant"
INFERENCE = (*COMPUTED, INVOCATIONS, *TOKENIZED)

LARGE_BODY = 1 << 20
"""Bytes from which a body waits for its turn. Longer ones than this are rare: it holds a prompt of 250,000 tokens."""
SECONDS_PER_BYTE = 20e-9
"""Pause before a large body is decoded. Decoding takes up to 7 ns a byte and holds Python's lock, so other requests get at least two
thirds of this process's time."""

Result = TypeVar("Result")
Handler = Callable[[Worker, "RequestContext"], Awaitable[None]]
"""Answers a request through its context."""


class ClientGone(Exception):
    """The client closed the connection."""


def tenant_of(headers: Headers) -> str:
    """Return the tenant that the router names; "" without one."""
    return dict(headers).get(TENANT, b"").decode("latin-1")


class RequestContext:
    """One request and its response."""

    def __init__(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
        pod: str,
        unreported: UnreportedCpu | None = None,
        large_bodies: FairSlots | None = None,
    ) -> None:
        """`unreported`: where the CPU time of requests without an answer is kept; None: the CPU time is not reported.

        `large_bodies`: turns to have a large body decoded; None: at once.
        """
        self.path: str = scope["path"]
        self.headers = dict(scope["headers"])
        self.tenant = self.headers.get(TENANT, b"").decode("latin-1")
        self.cpu = RequestCpu(self.tenant, unreported)
        self.span: Span = scope.get("fairlead.span", NO_SPAN)
        self.key_digest: str = scope.get("fairlead.key", "")
        """SHA-256 of the API key that `--api-key-file` accepted; empty without one."""
        self.request_id = choose_request_id(self.headers.get(b"x-request-id", b""))
        self.response_started = False
        self.body_received = False
        """True once the whole request body was received."""
        self.close_connection = False
        """True to tell the client to open a new connection for its next request."""
        self._common_headers = [(b"x-request-id", self.request_id.encode()), (b"x-fairlead-pod", pod.encode())]
        if self.path in (MESSAGES, COUNT_TOKENS):
            self._common_headers.append((b"request-id", self.request_id.encode()))  # Anthropic's name of the header
        self._warnings = begin_request()
        self._replayed: bytes | None = None
        self._large_bodies = large_bodies
        self._receive = receive
        self._send = send

    async def receive(self) -> Message:
        message = await self._receive()
        if body := message.get("body"):
            self.cpu.add_received(len(body))
        if message["type"] == "http.disconnect" or not message.get("more_body", False):
            self.body_received = True
        return message

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.response_started = True
            message["headers"] = [*message.get("headers", ()), *self._common_headers]
            message["headers"] += self.cpu.report()
            if self._warnings:
                message["headers"].append((HEADER, format_header(self._warnings)))
            if self.close_connection:
                message["headers"].append((b"connection", b"close"))
        await self._send(message)

    async def read_body(self, limit: int) -> bytes:
        """Return the request's body. Raise ApiError 413 as soon as it is larger than `limit` bytes."""
        if self._replayed is not None:
            return self._replayed
        parts, size = [], 0
        while True:
            message = await self.receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            part = message.get("body", b"")
            size += len(part)
            if size > limit:
                raise too_large(limit)
            parts.append(part)
            if not message.get("more_body", False):
                if self.path in TOKENIZED:
                    self.cpu.tokens = size // 4  # what the router takes for these paths
                await self._wait_for_turn(size)
                return parts[0] if len(parts) == 1 else b"".join(parts)

    async def _wait_for_turn(self, size: int) -> None:
        """Delay a large body, so that decoding many of them leaves time for other requests."""
        if size >= LARGE_BODY and self._large_bodies is not None:
            await self._large_bodies.run(self.tenant, lambda _: asyncio.ensure_future(asyncio.sleep(size * SECONDS_PER_BYTE)))

    def replay_body(self, body: bytes) -> None:
        """Let `read_body` return a body that was read already."""
        self._replayed = body

    async def start_response(self, status: int, headers: dict[str, str]) -> None:
        raw = [(name.encode("latin-1"), value.encode("latin-1", "replace")) for name, value in headers.items()]
        await self.send({"type": "http.response.start", "status": status, "headers": raw})

    async def write(self, data: bytes, more: bool = True) -> None:
        await self.send({"type": "http.response.body", "body": data, "more_body": more})

    async def respond_json(self, value: Any, headers: dict[str, str] | None = None, status: int = 200) -> None:
        await self.respond(status, msgspec.json.encode(value), headers)

    async def respond(self, status: int, data: bytes, headers: dict[str, str] | None = None, type: str = "application/json") -> None:
        await self.start_response(status, {"content-type": type, "content-length": str(len(data)), **(headers or {})})
        if not self.body_received:
            await self.write(data)
            await self._discard_body()
            data = b""
        await self.write(data, more=False)

    async def respond_error(self, error: ApiError) -> None:
        """Answer with an error. Do not wait for a body that was not read."""
        if not self.body_received:
            self.close_connection = True
        await self.respond(error.status, error.body(self.path), error.headers)

    async def while_connected(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Run `work` and return its result. If the client disconnects first, cancel it and raise ClientGone."""
        task, gone = asyncio.ensure_future(work), asyncio.ensure_future(self._wait_for_disconnect())
        try:
            await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise ClientGone
            return task.result()
        finally:
            gone.cancel()
            task.cancel()
            await asyncio.gather(task, gone, return_exceptions=True)

    async def _wait_for_disconnect(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def _discard_body(self) -> None:
        discarded = 0
        with suppress(TimeoutError):
            async with asyncio.timeout(LINGER_SECONDS):
                while not self.body_received and discarded < LINGER_BYTES:
                    discarded += len((await self.receive()).get("body", b""))


class RequestMiddleware:
    """Checks admission and body size, counts running requests for the drain, and formats every error in the shape of its API."""

    def __init__(self, app: ASGIApp, worker: Worker, handlers: Mapping[str, Handler]) -> None:
        """`handlers`: those of the paths whose POST skips FastAPI's routing and dependencies, which take a seventh of a chat's CPU time."""
        self._app, self._worker, self._handlers = app, worker, handlers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise RuntimeError(f"only HTTP is supported, not {scope['type']}")
        is_inference = scope["path"] in INFERENCE
        worker = self._worker
        unreported = worker.unreported_cpu if is_inference or scope["path"].startswith(f"{RESPONSES}/") else None
        context = RequestContext(scope, receive, send, worker.config.pod, unreported, worker.large_bodies)
        context.close_connection = worker.draining
        scope["fairlead.context"] = context
        try:
            if is_inference:
                worker.check_serving()
                worker.unreported_cpu.check(context.tenant)
                if scope["path"] not in TOKENIZED:
                    worker.check_queue_limit(1, context.tenant)  # before the body is read and tokenized
                with worker.track_request():
                    self._check_head(context)
                    handler = self._handlers.get(scope["path"]) if scope["method"] == "POST" else None
                    work = handler(worker, context) if handler is not None else self._app(scope, context.receive, context.send)
                    await context.cpu.count(work, context.headers)
            else:
                self._check_head(context)
                await self._app(scope, context.receive, context.send)
        except ClientGone:
            logger.debug("client gone: request %s", context.request_id)
        except Exception as error:
            await _send_error(context, error)
        finally:
            context.cpu.close()

    def _check_head(self, context: RequestContext) -> None:
        encoding = context.headers.get(b"content-encoding", b"").strip().lower()
        if encoding not in (b"", b"identity"):
            message = f"the body has Content-Encoding {quote(encoding.decode('latin-1'))}; send it without one"
            raise ApiError(415, message, code="unsupported_encoding", headers={"accept-encoding": "identity"})
        length = context.headers.get(b"content-length", b"0")
        if not length.isdigit() or int(length) > self._worker.config.limits.max_body_bytes:
            raise too_large(self._worker.config.limits.max_body_bytes)


async def _send_error(context: RequestContext, error: Exception) -> None:
    if not isinstance(error, ApiError | EngineGone | HTTPException):
        logger.error("request %s failed", context.request_id, exc_info=error)
    if not context.response_started:
        await context.respond_error(to_api_error(error))


def to_api_error(error: Exception) -> ApiError:
    """Return the error response for an exception."""
    match error:
        case ApiError():
            return error
        case EngineNotReady():
            return unavailable(f"the engine has ended: {error}")
        case EngineGone():
            return lost(f"the engine has ended: {error}")
        case ClientTooSlow():
            return ApiError(408, str(error), code="client_too_slow")
        case HTTPException(status_code=404):
            return ApiError(404, "there is no such path; GET /openapi.json on the inference port lists the paths", code="not_found")
        case HTTPException(status_code=405, headers=headers):
            allowed = dict(headers or {})
            message = f"this path does not allow the method; use {allowed.get('Allow', 'another one')}"
            return ApiError(405, message, code="method_not_allowed", headers=allowed)
        case HTTPException(status_code=status, detail=detail, headers=headers):
            return ApiError(status, detail, code=str(detail).lower().replace(" ", "_"), headers=dict(headers or {}))
        case _:
            return ApiError(500, "internal error; the worker's log has the details", type="server_error", code="internal_error")


def choose_request_id(given: bytes) -> str:
    """Return the client's request id if it fits a header and a log line, else a new one."""
    text = given.decode("latin-1")
    return text if 0 < len(text) <= 128 and text.isascii() and text.isprintable() else uuid.uuid4().hex
