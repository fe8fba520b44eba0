"""The way of one request: choose a worker, send, pass the answer's bytes on; another worker if nothing came back."""

import asyncio
import logging
from collections.abc import Sequence
from time import monotonic

import msgspec

from fairlead_common.protocols import errors as protocol_errors
from fairlead_router.config import RouterConfig
from fairlead_router.errors import ApiError, Headers, error_body, overloaded
from fairlead_router.fleet.workers import Worker, WorkerTable
from fairlead_router.metrics import Metrics
from fairlead_router.request.client_request import Call
from fairlead_router.request.prompts import Prompt
from fairlead_router.routing.canary_split import SplitPolicy
from fairlead_router.routing.policies import Choice, Policy, Wanted
from fairlead_router.serving.admission import Admission, Ticket
from fairlead_router.serving.attempts import Attempts
from fairlead_router.serving.upstream_request import wanted_for
from fairlead_router.wire.response import Reply
from fairlead_router.wire.upstream import ConnectFailed, Connection, GoneSilent, Head, LostAfterHead, LostBeforeHead, TooSilent

logger = logging.getLogger(__name__)

MOST_LOST = 3
"""Workers that may die under one request before it is taken for the cause."""
DYING_SECONDS = 0.05
"""A worker lost this soon after it got a request was dying anyway, as when all are killed at once: it counts for half."""
_ERROR_EVENTS = (b'data: {"error"', protocol_errors.EVENT_NAME)
"""How a worker ends a stream that it cannot go on with."""
_HOP = frozenset((b"connection", b"keep-alive", b"transfer-encoding", b"te", b"trailer", b"upgrade", b"proxy-connection"))


class Proxy:
    """Forwards calls to workers."""

    def __init__(self, config: RouterConfig, table: WorkerTable, policy: Policy, metrics: Metrics, admission: Admission) -> None:
        self._config, self._table, self._policy, self._metrics, self._admission = config, table, policy, metrics, admission
        self._split = policy if isinstance(policy, SplitPolicy) else None
        self.draining = False

    async def forward(self, call: Call, prompt: Prompt, reply: Reply, ticket: Ticket) -> None:
        """Answer the call, whose turn it is. When cancelled, the worker's connection is closed at once.

        Raises ApiError where no worker's answer has begun.
        """
        wanted = wanted_for(prompt, call.caller, call.session)
        attempts = Attempts()
        tried = attempts.tried
        busy: list[int] = []
        deadline = 0.0
        while True:
            if call.attempts and not wanted.again:
                wanted = msgspec.structs.replace(wanted, again=True)
            if attempts.lost >= MOST_LOST:
                raise ApiError(502, f"{call.attempts} workers ended under this request.", kind="server_error", code="bad_gateway")
            choice, began = self._note(call, await self.choose(wanted, attempts, busy, ticket)), monotonic()
            deadline = deadline or began + self._config.request_timeout
            fresh = attempts.begin(choice.worker)
            try:
                connection, head = await self._attempt(call, prompt, choice, ticket, deadline, fresh)
            except ConnectFailed as error:
                self._failed(choice, "connect", error)
                attempts.refuse(choice.worker)
                continue
            except LostBeforeHead as error:
                self._failed(choice, "lost", error)
                if not isinstance(error, GoneSilent):
                    attempts.lose(choice.worker, 1.0 if monotonic() - began > DYING_SECONDS else 0.5, final=fresh or error.sent_again)
                continue
            except TooSilent as error:
                self._missed(choice.worker)
                raise ApiError(504, f"The worker gave no answer: {error}.", kind="server_error", code="timeout") from error
            worker = choice.worker
            try:
                if head.status == 429 and head.get(b"x-fairlead-retry") is not None:
                    self._metrics.retries.labels("busy").inc()
                    busy.append(_seconds(head.get(b"retry-after")))
                    continue
                retry = head.get(b"x-fairlead-retry") if head.status in (502, 503) else None
                if retry is not None:
                    self._metrics.retries.labels("refused").inc()
                    if retry == b"lost":  # its engine ended while it had the request
                        attempts.lost += 1
                        self._missed(worker)
                    worker.suspect()
                    continue
                if self._split is not None:
                    self._split.began(worker, head.status, began)
                    if head.status >= 500 and self._split.may_go_elsewhere(worker, wanted, tried):
                        self._metrics.retries.labels("canary").inc()
                        continue
                worker.breaker.succeeded()
                self._admission.begun(ticket)
                call.let_go()
                if (cached := _cached(head)) is not None:
                    self._policy.answered(wanted, choice, cached)
                await self._pass_on(call, worker, connection, head, reply)
                return
            finally:
                worker.in_flight -= 1
                worker.pool.give_back(connection)

    async def choose(self, wanted: Wanted, attempts: Attempts, busy: Sequence[int], ticket: Ticket) -> Choice:
        """Return a worker; wait for one while there is none. `busy`: seconds that full workers asked to be left alone.

        Raises ApiError: 503 when the wait took too long, 429 when all are full, 502 when no worker is left that has not failed, and one of
        these lives.
        """
        while True:
            choice = await self._policy.choose(wanted, attempts.tried)
            if choice is not None:
                return choice
            if busy:
                raise overloaded("The service is overloaded: the queues of all workers are full.", min(busy))
            # One that died, and not only closed connections, is not ready at its next look: its successor is waited for.
            if any(worker.ready and (worker.address, worker.life) in attempts.failed for worker in self._table):
                message = "The worker closed the connection twice without an answer, and no other worker is left to ask."
                raise ApiError(502, message, kind="server_error", code="bad_gateway")
            attempts.allow_again()
            await self._admission.again(ticket)

    async def _attempt(
        self, call: Call, prompt: Prompt, choice: Choice, ticket: Ticket, deadline: float, fresh: bool
    ) -> tuple[Connection, Head]:
        """Send to one worker and wait for its answer's head. Counts the request as in flight there; on failure takes that back.

        `deadline`: monotonic seconds by which the head of any attempt must have come. `fresh`: use a new connection.
        """
        worker = choice.worker
        pending = max(0, prompt.length - (choice.predicted or 0))
        worker.in_flight += 1
        worker.unanswered += 1
        worker.pending_tokens += pending
        self._admission.sent(ticket)
        answered = False
        try:
            request = self._request(call, prompt, choice)
            began = await worker.pool.begin(request, self._config.request_timeout, deadline, fresh)
            answered = True
            return began
        finally:
            worker.unanswered -= 1
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
            call.method.encode() + b" " + call.path.encode() + b" HTTP/1.1",
            b"host: " + worker.address.encode(),
            b"x-request-id: " + call.id.encode(),
            b"content-length: %d" % length,
        ]
        if tokens is not None:
            lines.append(b"x-fairlead-prompt-tokens: %d" % len(tokens))
            lines.append(b"x-fairlead-prompt-format: " + prompt.format_tag.encode("latin-1"))
        lines += [name + b": " + value for name, value in (*call.instructions, *call.passed)]
        head = b"\r\n".join(lines) + b"\r\n\r\n"
        return [head, tokens.tobytes(), call.body] if tokens is not None else [head, call.body]

    async def _pass_on(self, call: Call, worker: Worker, connection: Connection, head: Head, reply: Reply) -> None:
        """The worker's answer, from socket to socket as it comes; a slow client slows the worker's socket."""
        self._began(call, head)
        if call.meter is not None:
            call.meter.head(head.get(b"x-fairlead-usage"))
            reply.tap = call.meter.feed
        try:
            if call.held is None or not call.held.begun:
                reply.start(head.status, self._headers(call, head))
            elif not _streams(head):
                call.held.fail(await connection.document())
                return
            await connection.pour(reply)
            if self._split is not None and _streams(head) and any(mark in reply.last for mark in _ERROR_EVENTS):
                self._split.broke(worker)
        except LostAfterHead as error:
            call.ending = "broken"
            if self._split is not None:
                self._split.broke(worker)
            worker.suspect()
            self._metrics.broken_streams.inc()
            logger.warning("request %s: the answer of %s broke off: %s", call.id, call.worker, error)
            self._cut(call, head, reply, "The worker was lost while it was answering.")
        except asyncio.CancelledError:  # the client has gone, and this goes nowhere; or the drain is over
            self._cut(call, head, reply, "The router is shutting down.")
            raise
        finally:
            call.bytes_out = reply.sent

    def _cut(self, call: Call, head: Head, reply: Reply, message: str) -> None:
        """Tell the client of a stream that it is not whole. For other answers the connection is closed, which says the same."""
        if not _streams(head) or head.get(b"content-length") is not None:
            reply.flush()
            return
        lead = b"" if reply.last.endswith(b"\n\n") or not reply.last else b"\n\n"  # an event cut in two would swallow ours
        document = error_body(message, "server_error", code="stream_cut", path=call.path)
        reply.end(lead + protocol_errors.event(call.path, document))

    def _began(self, call: Call, head: Head) -> None:
        call.status = head.status
        call.first_byte = monotonic()
        self._metrics.ttfb.observe(call.first_byte - call.began)
        call.cached = _cached(head)
        if call.cached is not None:
            self._metrics.compared(call.predicted, call.cached)

    def _headers(self, call: Call, head: Head) -> Headers:
        headers = [(name, value) for name, value in head.headers if name not in _HOP and name != b"x-fairlead-predicted-tokens"]
        if head.get(b"x-request-id") is None:
            headers.append((b"x-request-id", call.id.encode()))
        if call.predicted is not None:
            headers.append((b"x-fairlead-predicted-tokens", b"%d" % call.predicted))
        if call.account is not None and call.account.bounded:
            headers += call.account.headers()
        if self.draining:
            headers.append((b"connection", b"close"))
        return headers

    def _note(self, call: Call, choice: Choice) -> Choice:
        call.attempts += 1
        call.worker, call.predicted = choice.worker.address, choice.predicted
        return choice

    def _failed(self, choice: Choice, reason: str, error: Exception) -> None:
        self._metrics.retries.labels(reason).inc()
        self._missed(choice.worker)
        choice.worker.breaker.failed()
        choice.worker.suspect()
        logger.info("worker %s failed a request before its first byte (%s), another is asked", choice.worker.address, error)

    def _missed(self, worker: Worker) -> None:
        """Count an attempt without an answer, where sides are compared."""
        if self._split is not None:
            self._split.failed(worker)


def _streams(head: Head) -> bool:
    return (head.get(b"content-type") or b"").startswith(b"text/event-stream")


def _seconds(retry_after: bytes | None) -> int:
    return int(retry_after) if retry_after is not None and retry_after.isdigit() and len(retry_after) < 5 else 1


def _cached(head: Head) -> int | None:
    said = head.get(b"x-fairlead-cached-tokens")
    return int(said) if said is not None and said.isdigit() else None
