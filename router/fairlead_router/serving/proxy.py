"""Proxying of one request: choose a worker, send, stream its answer back; retry at another worker if no answer began."""

import asyncio
import logging
from collections.abc import Collection, Sequence
from time import monotonic

import msgspec

from fairlead_common.http.response import Reply
from fairlead_common.protocols import errors as protocol_errors
from fairlead_router.config import RouterConfig
from fairlead_router.errors import ApiError, Headers, overloaded
from fairlead_router.fleet.pending_prompt import PendingPrompt
from fairlead_router.fleet.workers import Worker, WorkerTable
from fairlead_router.metrics import Metrics, RetryReason
from fairlead_router.request.client_request import Call
from fairlead_router.request.price import price_of_report
from fairlead_router.request.prompts import Prompt
from fairlead_router.routing.canary_split import CanaryPolicy
from fairlead_router.routing.policies import Choice, Policy, RoutingRequest
from fairlead_router.serving.admission import Admission, Ticket
from fairlead_router.serving.attempts import Attempts
from fairlead_router.tenancy.charge import UsageMeter
from fairlead_router.wire.upstream import ConnectFailed, Connection, Head, LostAfterHead, LostBeforeHead, ResponseTimeout, WorkerSilent

logger = logging.getLogger(__name__)

MAX_LOST = 3
"""Workers that may die during one request before the request is considered the cause."""
DYING_SECONDS = 0.05
"""A worker lost this soon after it got a request was already dying, as when all are killed together: it counts for half."""
_ERROR_EVENTS = (b'data: {"error"', protocol_errors.EVENT_NAME)
"""Markers of the event with which a worker ends a stream that it cannot continue."""
_NO_WORKERS: frozenset[tuple[str, int]] = frozenset()
_HOP_BY_HOP = frozenset((b"connection", b"keep-alive", b"transfer-encoding", b"te", b"trailer", b"upgrade", b"proxy-connection"))


class Proxy:
    """Proxy that forwards requests to workers."""

    def __init__(self, config: RouterConfig, table: WorkerTable, policy: Policy, metrics: Metrics, admission: Admission) -> None:
        self._config, self._table, self._policy, self._metrics, self._admission = config, table, policy, metrics, admission
        self._canary = policy if isinstance(policy, CanaryPolicy) else None
        self.draining = False

    async def forward(self, call: Call, prompt: Prompt, reply: Reply, ticket: Ticket) -> None:
        """Answer an admitted request. Cancellation closes the worker's connection immediately.

        Raises ApiError if no worker's answer has begun.
        """
        attempts = Attempts()
        excluded = attempts.excluded
        busy: list[int] = []
        deadline = 0.0
        while True:
            if call.outcome.attempts and not ticket.request.is_retry:
                ticket.request = msgspec.structs.replace(ticket.request, is_retry=True)
            request = ticket.request
            if attempts.lost >= MAX_LOST:
                raise ApiError(
                    502,
                    f"{call.outcome.attempts} workers ended while they handled this request, so it is not sent to another one.",
                    kind="server_error",
                    code="bad_gateway",
                )
            with call.span.child("route") as route:
                chosen = await self.choose(ticket, attempts, busy, call.head.path)
                choice, began = self._record_choice(call, request, chosen), monotonic()
                route.set({"fairlead.worker": call.outcome.worker, "fairlead.predicted_cached_tokens": call.outcome.predicted_tokens})
            deadline = deadline or began + self._config.request_timeout
            fresh = attempts.begin(choice.worker)
            with call.span.child("attempt", "client") as span:
                span.set({"fairlead.worker": call.outcome.worker, "fairlead.attempt": call.outcome.attempts})
                try:
                    connection, head = await self._attempt(call, prompt, choice, ticket, span.propagate(), deadline, fresh)
                except ConnectFailed as error:
                    span.fail("connect")
                    self._record_failure(choice, "connect", error)
                    attempts.record_refused(choice.worker)
                    continue
                except LostBeforeHead as error:
                    span.fail("lost")
                    self._record_failure(choice, "lost", error)
                    if isinstance(error, WorkerSilent):
                        choice.worker.record_retried(call.caller.tenant.name, ticket.cost)
                    else:
                        attempts.record_lost(
                            choice.worker, 1.0 if monotonic() - began > DYING_SECONDS else 0.5, final=fresh or error.was_resent
                        )
                    continue
                except ResponseTimeout as error:
                    self._record_no_answer(choice.worker)
                    raise ApiError(
                        504, f"The worker gave no answer: {error} (--request-timeout).", kind="server_error", code="timeout"
                    ) from error
                worker, cached = choice.worker, _cached_tokens(head)
                span.set({"http.response.status_code": head.status, "fairlead.cached_tokens": cached})
                if call.account is not None and (cpu := head.get(b"x-fairlead-cpu-ms")) is not None:
                    call.account.use(worker.price_to_charge(call.caller.tenant.name, price_of_report(cpu)))
                try:
                    if head.status == 429 and head.get(b"x-fairlead-retry") is not None:
                        self._metrics.count_retry("busy")
                        busy.append(_retry_seconds(head.get(b"retry-after")))
                        continue
                    retry = head.get(b"x-fairlead-retry") if head.status in (502, 503) else None
                    if retry is not None:
                        self._metrics.count_retry("refused")
                        if retry == b"lost":  # the worker's engine died with the request
                            attempts.lost += 1
                            self._record_no_answer(worker)
                        worker.mark_unhealthy()
                        continue
                    refusal = head.get(b"x-fairlead-retry") if head.status == 501 else None
                    if refusal is not None:  # of the agent; an engine's own 501 is about the request
                        if refusal == b"path":
                            self._table.record_lacking(worker, call.head.path)
                        if self._serves_elsewhere(call, request, excluded, "" if refusal == b"path" else worker.runtime):
                            self._metrics.count_retry("refused")
                            continue
                    if self._canary is not None:
                        self._canary.record_head(worker, head.status, began)
                        if head.status >= 500 and self._canary.can_retry_on_stable(worker, request, excluded):
                            self._metrics.count_retry("canary")
                            continue
                    worker.breaker.record_success()
                    self._admission.record_answer(ticket)
                    call.release_body()
                    meter = self._observe_usage(call, worker, head, reply)
                    if cached is not None:
                        self._policy.record_answer(request, choice, cached)
                    await self._stream_answer(call, worker, connection, head, cached, reply)
                    if meter is not None and meter.cached is not None and cached is None:
                        self._record_cached(call, meter.cached)
                        self._policy.record_answer(request, choice, meter.cached)
                    return
                finally:
                    worker.in_flight -= 1
                    worker.pool.release(connection)

    async def choose(self, ticket: Ticket, attempts: Attempts, busy: Sequence[int], path: str) -> Choice:
        """Return a worker, waiting for one while there is none. `busy`: the Retry-After seconds of full workers.

        A worker whose engine does not serve `path` is the last resort: its 501 names the engine.

        Raises ApiError: 503 when the wait is too long, 429 when all workers are full, 502 when only workers that failed this request are
        left and one of them is ready.
        """
        while True:
            lacking, unsuitable = self._table.lacking(path), self._admission.unsuitable_workers(ticket)
            for avoided in dict.fromkeys((lacking | unsuitable, lacking, _NO_WORKERS)) if lacking or unsuitable else (_NO_WORKERS,):
                choice = await self._policy.choose(ticket.request, attempts.excluded | avoided)
                if choice is not None:
                    return choice
            if busy:
                raise overloaded("The service is overloaded: the queues of all workers are full.", min(busy))
            # A worker that died is not ready at its next health check, so the request waits for its successor.
            if any(worker.ready and (worker.address, worker.generation) in attempts.failed for worker in self._table):
                message = "The worker closed the connection twice without an answer, and no other worker is left."
                raise ApiError(502, message, kind="server_error", code="bad_gateway")
            attempts.allow_retries()
            await self._admission.requeue(ticket)

    async def _attempt(
        self, call: Call, prompt: Prompt, choice: Choice, ticket: Ticket, trace: Headers, deadline: float, fresh: bool
    ) -> tuple[Connection, Head]:
        """Send to one worker and wait for its answer's head. Count the request as in flight there, except after a failure.

        `trace`: headers that continue the trace. `deadline`: monotonic seconds by which an answer's head must arrive, over all attempts.
        `fresh`: use a new connection.
        """
        worker = choice.worker
        pending = max(0, prompt.prompt_tokens - (choice.predicted or 0))
        computed = PendingPrompt(worker, pending, prompt.params.stream, lambda: self._policy.release(choice))
        worker.in_flight += 1
        self._admission.record_sent(ticket)
        answered = False
        try:
            request = self._request(call, prompt, choice, trace)
            began = await worker.pool.send(request, self._config.request_timeout, deadline, fresh)
            answered = True
            return began
        finally:
            computed.end()
            if not answered:
                worker.in_flight -= 1

    def _request(self, call: Call, prompt: Prompt, choice: Choice, trace: Headers) -> list[bytes]:
        """Return the request's bytes: token ids for a worker with the prompt's format, else the text as the client sent it."""
        worker = choice.worker
        tokens = prompt.tokens_for(worker.format_tag)
        if tokens is not None and len(call.body) + 4 * len(tokens) > self._config.max_body_bytes:
            tokens = None  # the worker has the same limit and counts both
        length = len(call.body) + (4 * len(tokens) if tokens is not None else 0)
        lines = [
            call.head.method.encode() + b" " + call.head.path.encode() + b" HTTP/1.1",
            b"host: " + worker.address.encode(),
            b"x-request-id: " + call.head.id.encode(),
            b"content-length: %d" % length,
        ]
        if worker.runtime and prompt.params.stream and not call.caller.tenant.name:  # with a tenant it is among the headers below
            lines.append(b"x-fairlead-usage: 1")
        if tokens is not None:
            lines.append(b"x-fairlead-prompt-tokens: %d" % len(tokens))
            lines.append(b"x-fairlead-prompt-format: " + worker.format_tag.encode("latin-1"))
        lines += [name + b": " + value for name, value in (*call.worker_headers, *trace, *call.head.forwarded_headers)]
        head = b"\r\n".join(lines) + b"\r\n\r\n"
        return [head, tokens.tobytes(), call.body] if tokens is not None else [head, call.body]

    async def _stream_answer(
        self, call: Call, worker: Worker, connection: Connection, head: Head, cached: int | None, reply: Reply
    ) -> None:
        """Stream the worker's answer to the client, with backpressure from the client to the worker's socket.

        `cached`: the prompt's cached tokens, if the head has them.
        """
        call.outcome.status = head.status
        call.outcome.first_byte_at = monotonic()
        self._metrics.ttfb.observe(call.outcome.first_byte_at - call.head.started_at)
        if cached is not None:
            self._record_cached(call, cached)
        try:
            if call.held_stream is None or not call.held_stream.has_started:
                reply.start(head.status, self._headers(call, head))
            elif not _is_stream(head):
                call.held_stream.fail(await connection.read_error())
                return
            await connection.stream_to(reply)
            if self._canary is not None and _is_stream(head) and any(mark in reply.last_piece for mark in _ERROR_EVENTS):
                self._canary.record_truncated(worker)
        except LostAfterHead as error:
            call.outcome.ending = "broken"
            if self._canary is not None:
                self._canary.record_truncated(worker)
            worker.mark_unhealthy()
            self._metrics.broken_streams.inc()
            logger.warning("request %s: the answer of worker %s was truncated: %s", call.head.id, call.outcome.worker, error)
            self._end_truncated(call, head, reply, "The worker was lost while it was answering.")
        except asyncio.CancelledError:  # the client disconnected, and the write has no effect; or the drain timeout has passed
            self._end_truncated(call, head, reply, "The router is shutting down.")
            raise
        finally:
            call.outcome.bytes_out = reply.sent

    def _observe_usage(self, call: Call, worker: Worker, head: Head, reply: Reply) -> UsageMeter | None:
        """Read the answer's usage as it passes, and return the reader: for the tenant, and of another engine's streams for the audit."""
        meter = call.meter
        if meter is None and worker.runtime and _is_stream(head):
            meter = UsageMeter(call.outcome.prompt_tokens or 0)
        if meter is not None:
            meter.read_header(head.get(b"x-fairlead-usage"))
            reply.observer = meter.feed
        return meter

    def _serves_elsewhere(self, call: Call, request: RoutingRequest, excluded: Collection[tuple[str, int]], refused_by: str) -> bool:
        """Return whether an untried worker is left whose engine may serve the path. `refused_by`: runtime that cannot serve the request."""
        left_out = {*excluded, *self._table.lacking(call.head.path)}
        usable = self._table.usable((), request.model)
        return any((one.address, one.generation) not in left_out and (not refused_by or one.runtime != refused_by) for one in usable)

    def _end_truncated(self, call: Call, head: Head, reply: Reply, message: str) -> None:
        """End a truncated stream with an error event. For other answers, closing the connection tells the client."""
        if not _is_stream(head) or head.get(b"content-length") is not None:
            reply.flush()
            return
        lead = b"" if reply.last_piece.endswith(b"\n\n") or not reply.last_piece else b"\n\n"  # a half-sent event would swallow ours
        document = protocol_errors.document(call.head.path, 500, message, "server_error", code="stream_cut")
        reply.end(lead + protocol_errors.event(call.head.path, document))

    def _record_cached(self, call: Call, cached: int) -> None:
        call.outcome.cached_tokens = cached
        self._metrics.record_prediction(call.outcome.predicted_tokens, cached)

    def _headers(self, call: Call, head: Head) -> Headers:
        headers = [(name, value) for name, value in head.headers if name not in _HOP_BY_HOP and name != b"x-fairlead-predicted-tokens"]
        if head.get(b"x-request-id") is None:
            headers.append((b"x-request-id", call.head.id.encode()))
        if call.outcome.predicted_tokens is not None:
            headers.append((b"x-fairlead-predicted-tokens", b"%d" % call.outcome.predicted_tokens))
        if call.account is not None and call.account.is_limited:
            headers += call.account.headers()
        if self.draining:
            headers.append((b"connection", b"close"))
        return headers

    def _record_choice(self, call: Call, request: RoutingRequest, choice: Choice) -> Choice:
        outcome = call.outcome
        outcome.attempts += 1
        outcome.worker, outcome.predicted_tokens = choice.worker.address, choice.predicted
        outcome.is_reported = not choice.worker.runtime
        outcome.hashes, outcome.candidates, outcome.chosen_at = request.hashes_of(choice.worker), choice.candidates, monotonic()
        return choice

    def _record_failure(self, choice: Choice, reason: RetryReason, error: Exception) -> None:
        self._metrics.count_retry(reason)
        self._record_no_answer(choice.worker)
        choice.worker.breaker.record_failure()
        choice.worker.mark_unhealthy()
        logger.info("worker %s failed a request before its first byte (%s); retrying at another worker", choice.worker.address, error)

    def _record_no_answer(self, worker: Worker) -> None:
        """Count an attempt without an answer for the canary's comparison."""
        if self._canary is not None:
            self._canary.record_failure(worker)


def _is_stream(head: Head) -> bool:
    return (head.get(b"content-type") or b"").startswith(b"text/event-stream")


def _retry_seconds(retry_after: bytes | None) -> int:
    return int(retry_after) if retry_after is not None and retry_after.isdigit() and len(retry_after) < 5 else 1


def _cached_tokens(head: Head) -> int | None:
    count = head.get(b"x-fairlead-cached-tokens")
    return int(count) if count is not None and count.isdigit() else None
