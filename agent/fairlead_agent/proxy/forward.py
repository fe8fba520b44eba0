"""Forwarding of one request to the engine and of its answer back, piece by piece, with backpressure."""

import asyncio
import logging
from collections.abc import Mapping

import aiohttp
from aiohttp import web

from fairlead_agent.engine.client import EngineClient
from fairlead_agent.proxy.body import TOKENS, EngineBody, Refused, build_body, decode_fields, split_tokens
from fairlead_agent.proxy.body_budget import BodyBudget, HeldBody
from fairlead_agent.proxy.request_body import read_body
from fairlead_agent.proxy.usage import EventStream, Usage, decode_event
from fairlead_agent.remotes import AllowedRemotes, RemoteRefused
from fairlead_agent.state import Agent, Pending
from fairlead_common.http.inference_paths import INFERENCE
from fairlead_common.protocols import errors as protocol_errors
from fairlead_common.protocols.paths import COMPUTED, POOLED

log = logging.getLogger(__name__)

RETRY, OTHER, LOST, PATH = "x-fairlead-retry", "other", "lost", "path"
"""Header of a refusal, and its values: another worker may answer; the engine ended while it had the request; the engine does not serve
the path."""
_HEADERS_OF = {501: {RETRY: OTHER}, 429: {RETRY: OTHER, "retry-after": "1"}}
"""Headers of the refusal of a body, by its status."""
VLLM_PRIORITY = "x-vllm-priority"
"""Header that counts more than the body's `priority` in vLLM: a client must not be more urgent than its key by it."""
_HOP_BY_HOP = frozenset(
    (
        "connection",
        "keep-alive",
        "proxy-authenticate",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
        "content-length",
        "expect",  # answered here
    )
)
MAX_TOKENS = 1 << 20
"""Longest prompt of an engine whose context length is not known."""
LARGE = 1 << 20
"""Bytes of a body from which other requests may run between the steps of its work."""
_LORA = frozenset(("/v1/load_lora_adapter", "/v1/unload_lora_adapter"))
_UNKNOWN_PATH = (b'{"detail":"Not Found"}', b'{"detail":"Method Not Allowed"}')
"""FastAPI's answers for a path that an engine does not have. A model that it does not have gets another document."""

_ENGINE_DEAD = b"EngineCore encountered an issue"
"""In vLLM's error for requests that it had when its engine process ended: a 500, or an event of a stream. Its API process ends soon
after."""


class Forwarder:
    """Sends requests to the engine."""

    def __init__(self, agent: Agent, engine: EngineClient) -> None:
        self._agent, self._engine = agent, engine
        self._remotes = AllowedRemotes(agent.config.allowed_remotes)
        self.bodies = BodyBudget(agent.config.max_inflight_bytes)

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Answer a request with the engine's answer."""
        agent, path = self._agent, request.path
        if not agent.is_serving and (path in COMPUTED or agent.phase != "ready"):
            reason = "is shutting down" if agent.draining else f"is not ready: {agent.reason or agent.phase}"
            return self.refusal(path, 503, f"this worker {reason}", {RETRY: OTHER})
        with agent.track_request(), self.bodies.hold() as held:
            try:
                body = await self._read_body(request, held)
            except RemoteRefused as error:
                return self.refusal(path, 400, str(error))
            except Refused as error:
                return self.refusal(path, error.status, str(error), _HEADERS_OF.get(error.status))
            pending = None
            if path in COMPUTED:
                pending = agent.begin(body.tokens, body.model, body.salt, body.stream, path not in POOLED)
            body.tokens = ()
            try:
                return await self._send(request, body, held, pending)
            finally:
                if pending is not None and pending.tokens >= 0:
                    self._record_answer(pending, False)
                if path in _LORA:
                    agent.adapters_changed.set()

    async def _read_body(self, request: web.Request, held: HeldBody) -> EngineBody:
        """Return the engine's body of a request. Raises Refused, RemoteRefused."""
        agent, path = self._agent, request.path
        raw = await read_body(request, agent.config.max_body_bytes, held)
        longest = MAX_TOKENS if agent.format is None else agent.format.max_model_len
        if path in COMPUTED:
            tokens, raw = split_tokens(request.headers.get(TOKENS), raw, longest)
            await _let_others_run(raw)
            fields = decode_fields(raw, longest)
            await _let_others_run(raw)
            body = build_body(path, request.headers, raw, fields, agent.config.runtime, agent.takes)
            body.tokens = tokens
            del fields  # they refer to the whole body as it came
        else:
            body = EngineBody(raw)
            if raw and path in INFERENCE:
                decode_fields(raw, longest)
        del raw
        if body.data and path in INFERENCE:
            await _let_others_run(body.data)
            self._remotes.check(body.data, path)
        held.resize(len(body.data))
        return body

    async def _send(self, request: web.Request, body: EngineBody, held: HeldBody, pending: Pending | None) -> web.StreamResponse:
        """Send a request and relay its answer."""
        headers = {name: value for name, value in request.headers.items() if _is_forwarded(name.lower())}
        if body.priority is not None:
            headers = {name: value for name, value in headers.items() if name.lower() != VLLM_PRIORITY}
            headers[VLLM_PRIORITY] = str(body.priority)
        try:
            response = await self._engine.session.request(
                request.method, self._engine.url(request.raw_path), headers=headers, data=body.data or None, allow_redirects=False
            )
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError):
            return self.refusal(request.path, 503, f"{self._agent.config.runtime_name} refuses connections", {RETRY: OTHER})
        except (aiohttp.ClientError, ConnectionError) as error:
            log.warning("%s ended the connection before an answer to %s: %s", self._agent.config.runtime_name, request.path, error)
            message = f"{self._agent.config.runtime_name} ended the connection before its answer"
            return self.refusal(request.path, 503, message, {RETRY: LOST})
        body.data = b""
        held.release()
        async with response:
            is_stream = response.headers.get("content-type", "").startswith("text/event-stream")
            if is_stream:
                return await self._relay_stream(request, body, response, pending)
            return await self._relay_whole(request, body, response, pending)

    async def _relay_stream(
        self, request: web.Request, body: EngineBody, response: aiohttp.ClientResponse, pending: Pending | None
    ) -> web.StreamResponse:
        events = EventStream(adds_usage=body.adds_usage, hides_usage=body.hides_usage)
        answer = web.StreamResponse(status=response.status, headers=self._headers(response.headers))
        try:
            first = await response.content.readany()  # the head alone says nothing: engines send it before they compute
            if _reports_dead_engine(first):
                return self.refusal(request.path, 503, f"{self._agent.config.runtime_name} has ended", {RETRY: LOST})
            if pending is not None:
                self._record_answer(pending, True)
            await answer.prepare(request)
            piece = first
            while piece:
                if edited := events.feed(piece):
                    await answer.write(edited)
                piece = await response.content.readany()
            if last := events.end():
                await answer.write(last)
        except aiohttp.ClientPayloadError as error:
            log.warning("%s ended a stream of %s: %s", self._agent.config.runtime_name, request.path, error)
            message = f"{self._agent.config.runtime_name} was lost while it was answering"
            if not answer.prepared:
                return self.refusal(request.path, 503, message, {RETRY: LOST})
            document = protocol_errors.document(request.path, 503, message, "server_error", code="unavailable")
            await answer.write(protocol_errors.event(request.path, document))
        await answer.write_eof()
        return answer

    async def _relay_whole(
        self, request: web.Request, body: EngineBody, response: aiohttp.ClientResponse, pending: Pending | None
    ) -> web.StreamResponse:
        headers, path = self._headers(response.headers), request.path
        if path not in COMPUTED and path not in INFERENCE:  # of any kind and size, such as the pages of /docs
            answer = web.StreamResponse(status=response.status, headers=headers)
            await answer.prepare(request)
            async for piece in response.content.iter_any():
                await answer.write(piece)
            await answer.write_eof()
            return answer
        try:
            data = await response.read()
        except aiohttp.ClientPayloadError:
            return self.refusal(path, 503, f"{self._agent.config.runtime_name} ended within its answer", {RETRY: LOST})
        if pending is not None:
            self._record_answer(pending, response.status == 200)
        if response.status >= 500 and _ENGINE_DEAD in data:
            return self.refusal(path, 503, f"{self._agent.config.runtime_name} has ended", {RETRY: LOST})
        if response.status in (404, 405) and data in _UNKNOWN_PATH:
            message = f"{self._agent.config.runtime_name} does not serve {request.method} {path}"
            return self.refusal(path, 501, message, {RETRY: PATH}, code="not_implemented")
        if path in COMPUTED and response.status == 200:
            usage = Usage()
            usage.read_answer(data)
            if usage.text:
                headers["x-fairlead-usage"] = usage.text
            if usage.cached is not None:
                headers["x-fairlead-cached-tokens"] = str(usage.cached)
        return web.Response(status=response.status, headers=headers, body=data)

    def refusal(
        self, path: str, status: int, message: str, headers: Mapping[str, str] | None = None, code: str = "unavailable"
    ) -> web.Response:
        """Return an error in the form of the path's API."""
        kind = "server_error" if status >= 500 else "invalid_request_error"
        document = protocol_errors.document(path, status, message, kind, code=code if status >= 500 else None)
        own = {"x-fairlead-pod": self._agent.config.pod, "content-type": "application/json"}
        return web.Response(status=status, body=document, headers=own | dict(headers or {}))

    def _headers(self, theirs: Mapping[str, str]) -> dict[str, str]:
        headers = {name: value for name, value in theirs.items() if name.lower() not in _HOP_BY_HOP}
        return headers | {"x-fairlead-pod": self._agent.config.pod}

    def _record_answer(self, pending: Pending, is_computed: bool) -> None:
        if pending.tokens >= 0:
            self._agent.answered(pending, is_computed)
            pending.tokens = -1


async def _let_others_run(body: bytes) -> None:
    """Divide the work on a large body, which takes 1 to 10 ms a MiB, between passes of the event loop."""
    if len(body) > LARGE:
        await asyncio.sleep(0)


def _reports_dead_engine(first: bytes) -> bool:
    """Return whether a stream begins with the error event of an engine that has ended: nothing of the answer was sent."""
    if _ENGINE_DEAD not in first:
        return False
    document = decode_event(first.partition(b"\n\n")[0])
    return isinstance(document, dict) and bool(document.get("error"))


def _is_forwarded(name: str) -> bool:
    # The body was decompressed.
    return name not in _HOP_BY_HOP and name not in ("host", "accept-encoding", "content-encoding") and not name.startswith("x-fairlead-")
