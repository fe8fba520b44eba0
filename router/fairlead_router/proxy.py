"""The way of one request: choose a worker, send, pass the answer's bytes on; another worker if nothing came back."""

import asyncio
import logging
from time import monotonic

from fairlead_router.config import RouterConfig
from fairlead_router.errors import ApiError, Headers, Send, error_body, unavailable
from fairlead_router.inbound import Call
from fairlead_router.metrics import Metrics
from fairlead_router.policies import Choice, Policy, Wanted
from fairlead_router.prompts import Prompt
from fairlead_router.upstream import ConnectFailed, Connection, GoneSilent, Head, LostAfterHead, LostBeforeHead, TooSilent
from fairlead_router.workers import Worker, WorkerTable

logger = logging.getLogger(__name__)

MOST_LOST = 3
"""Workers that may die under one request before it is taken for the cause."""
RECHECK_SECONDS = 1.0
"""How often a held request asks again unasked: the index may know of a worker, or a breaker have closed, without anybody saying so here."""
_HOP = frozenset((b"connection", b"keep-alive", b"transfer-encoding", b"te", b"trailer", b"upgrade", b"proxy-connection"))


class Proxy:
    """Forwards calls to workers."""

    def __init__(self, config: RouterConfig, table: WorkerTable, policy: Policy, metrics: Metrics) -> None:
        self._config, self._table, self._policy, self._metrics = config, table, policy, metrics
        self.draining = False

    async def forward(self, call: Call, prompt: Prompt, send: Send) -> None:
        """Answer the call. Raises ApiError where nothing has been sent yet. When cancelled, the worker's connection is closed at once."""
        wanted = Wanted(prompt.length, prompt.hashes, call.session or prompt.user, prompt.adapter)
        tried: set[tuple[str, int]] = set()
        lost = 0
        while True:
            choice = self._note(call, await self._choose(wanted, tried))
            tried.add((choice.worker.address, choice.worker.life))
            try:
                connection, head = await self._attempt(call, prompt, choice)
            except ConnectFailed as error:
                self._failed(choice, "connect", error)
                continue
            except LostBeforeHead as error:
                self._failed(choice, "lost", error)
                lost += not isinstance(error, GoneSilent)
                if lost >= MOST_LOST:
                    raise ApiError(
                        502, f"{lost} workers ended the connection without an answer.", kind="server_error", code="bad_gateway"
                    ) from error
                continue
            except TooSilent as error:
                raise ApiError(504, f"The worker gave no answer: {error}.", kind="server_error", code="timeout") from error
            worker = choice.worker
            try:
                if head.status in (502, 503) and head.get(b"x-fairlead-retry") is not None:
                    self._metrics.retries.labels("refused").inc()
                    worker.suspect()
                    continue
                worker.breaker.succeeded()
                if (cached := _cached(head)) is not None:
                    self._policy.answered(wanted, choice, cached)
                await self._pass_on(call, worker, connection, head, send)
                return
            finally:
                worker.in_flight -= 1
                worker.pool.give_back(connection)

    async def _choose(self, wanted: Wanted, tried: set[tuple[str, int]]) -> Choice:
        """A worker; waits for one while there is none. Raises ApiError 503 when the wait is over."""
        choice = await self._policy.choose(wanted, tried)
        if choice is not None:
            return choice
        deadline = monotonic() + self._config.hold_timeout
        with self._metrics.held.track_inprogress():
            while (left := deadline - monotonic()) > 0:
                await self._table.changed(min(left, RECHECK_SECONDS))
                choice = await self._policy.choose(wanted, tried)
                if choice is not None:
                    return choice
        raise unavailable(f"No worker became ready within {self._config.hold_timeout:g} s. Try again later.", retry_after=5)

    async def _attempt(self, call: Call, prompt: Prompt, choice: Choice) -> tuple[Connection, Head]:
        """Send to one worker and wait for its answer's head. Counts the request as in flight there; on failure takes that back."""
        worker = choice.worker
        pending = max(0, prompt.length - (choice.predicted or 0))
        worker.in_flight += 1
        worker.pending_tokens += pending
        answered = False
        try:
            request = self._request(call, prompt, choice)
            began = await worker.pool.begin(request, self._config.request_timeout)
            answered = True
            return began
        finally:
            worker.pending_tokens -= pending
            self._policy.release(choice)
            if not answered:
                worker.in_flight -= 1

    def _request(self, call: Call, prompt: Prompt, choice: Choice) -> list[bytes]:
        """The request's bytes: tokenized for a worker of the format that the prompt was tokenized with, else as the client sent it."""
        worker = choice.worker
        tokens = prompt.tokens if prompt.tokens is not None and worker.format_tag == prompt.format_tag else None
        if tokens is not None and len(call.body) + 4 * len(tokens) > self._config.max_body_bytes:
            tokens = None  # the worker's bound is the same, and counts both
        length = len(call.body) + (4 * len(tokens) if tokens is not None else 0)
        lines = [
            call.method.encode() + b" " + call.target + b" HTTP/1.1",
            b"host: " + worker.address.encode(),
            b"x-request-id: " + call.id.encode(),
            b"content-length: %d" % length,
        ]
        if tokens is not None:
            lines.append(b"x-fairlead-prompt-tokens: %d" % len(tokens))
        lines += [name + b": " + value for name, value in call.passed]
        head = b"\r\n".join(lines) + b"\r\n\r\n"
        return [head, tokens.tobytes(), call.body] if tokens is not None else [head, call.body]

    async def _pass_on(self, call: Call, worker: Worker, connection: Connection, head: Head, send: Send) -> None:
        """The worker's answer, piece by piece as it comes; a slow client slows the worker's socket."""
        self._began(call, head)
        await send({"type": "http.response.start", "status": head.status, "headers": self._headers(call, head)})
        tail = b"\n\n"
        try:
            while True:
                piece = await connection.read()
                call.bytes_out += len(piece)
                more = not connection.drained
                await send({"type": "http.response.body", "body": piece, "more_body": more})
                if not more:
                    return
                tail = piece[-2:]
        except LostAfterHead as error:
            call.ending = "broken"
            worker.suspect()
            self._metrics.broken_streams.inc()
            logger.warning("request %s: the answer of %s broke off: %s", call.id, call.worker, error)
            await self._cut(head, tail, "The worker was lost while it was answering.", send)
        except asyncio.CancelledError:  # the client has gone, and this goes nowhere; or the drain is over
            await self._cut(head, tail, "The router is shutting down.", send)
            raise

    async def _cut(self, head: Head, tail: bytes, message: str, send: Send) -> None:
        """Tell the client of a stream that it is not whole. For other answers the server closes the connection, which says the same."""
        if (head.get(b"content-type") or b"").startswith(b"text/event-stream"):
            lead = b"" if tail == b"\n\n" else b"\n\n"  # an event cut in two would swallow ours
            event = error_body(message, "server_error", code="stream_cut")
            await send({"type": "http.response.body", "body": lead + b"data: " + event + b"\n\n"})

    def _began(self, call: Call, head: Head) -> None:
        call.status = head.status
        call.first_byte = monotonic()
        self._metrics.ttfb.observe(call.first_byte - call.began)
        call.cached = _cached(head)
        if call.cached is None:
            return
        self._metrics.actual.inc(call.cached)
        if call.predicted is not None:
            self._metrics.predicted.inc(call.predicted)
            self._metrics.prediction_error.observe(abs(call.predicted - call.cached))

    def _headers(self, call: Call, head: Head) -> Headers:
        headers = [(name, value) for name, value in head.headers if name not in _HOP and name != b"x-fairlead-predicted-tokens"]
        if head.get(b"x-request-id") is None:
            headers.append((b"x-request-id", call.id.encode()))
        if call.predicted is not None:
            headers.append((b"x-fairlead-predicted-tokens", b"%d" % call.predicted))
        if self.draining:
            headers.append((b"connection", b"close"))
        return headers

    def _note(self, call: Call, choice: Choice) -> Choice:
        call.attempts += 1
        call.worker, call.predicted = choice.worker.address, choice.predicted
        return choice

    def _failed(self, choice: Choice, reason: str, error: Exception) -> None:
        self._metrics.retries.labels(reason).inc()
        choice.worker.breaker.failed()
        choice.worker.suspect()
        logger.info("worker %s failed a request before its first byte (%s), another is asked", choice.worker.address, error)


def _cached(head: Head) -> int | None:
    said = head.get(b"x-fairlead-cached-tokens")
    return int(said) if said is not None and said.isdigit() else None
