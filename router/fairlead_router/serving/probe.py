"""`GET /fairlead/probe`: a check that a worker generates one token. The operator uses it at the admin port, which asks for no key.

Callers cannot make it expensive: the prompt is fixed, one probe runs at a time, and its answer is shared by all requests
within a second.
"""

import asyncio
from time import monotonic

from fairlead_common.http.response import Reply
from fairlead_common.protocols.paths import CLASSIFICATIONS, EMBEDDINGS, NO_EMBEDDINGS, NO_GENERATION
from fairlead_router.errors import ApiError, Headers, unavailable
from fairlead_router.fleet.workers import WorkerTable
from fairlead_router.request.client_request import Call, RequestHead
from fairlead_router.request.prompts import Prompts
from fairlead_router.serving.request_handler import RequestHandler
from fairlead_router.supervision import stop_tasks

PATH = "/fairlead/probe"
FRESH_SECONDS = 1.0
_BODY = b'{"prompt": "Ready?", "max_tokens": 1, "temperature": 0}'
_TEXT = b'{"input": "Ready?"}'
"""Probe of an embedding model, which refuses generation with `NO_GENERATION`, or of a classifier, which refuses `NO_EMBEDDINGS` too."""


class _BufferedReply(Reply):
    """Reply that keeps its body in memory."""

    def __init__(self) -> None:
        self.status, self.body = 0, b""
        self.started = self.ended = False
        self.last_piece, self.sent, self.source, self.observer = b"", 0, None, None
        self.is_congested = False

    def start(self, status: int, headers: Headers) -> None:
        self.started, self.status = True, status

    def flush(self) -> None: ...

    def write(self, data: bytes) -> None:
        self.body += data

    def end(self, data: bytes = b"") -> None:
        self.ended = True
        self.body += data


class Probe:
    """Cached result of the latest probe, refreshed on request once it is old."""

    def __init__(self, handler: RequestHandler, prompts: Prompts, table: WorkerTable) -> None:
        self._handler, self._prompts, self._table = handler, prompts, table
        self._task: asyncio.Task[tuple[int, bytes]] | None = None
        self._ended_at = 0.0

    async def run(self) -> tuple[int, bytes]:
        """Return the status and body of the probe's answer.

        A probe never waits for a worker: else an unauthenticated client could scale a service up from zero.
        """
        if not self._table.usable():
            refusal = unavailable("No worker is ready. Try again in 5 s.", retry_after=5)
            return refusal.status, refusal.body
        if self._task is None or (self._task.done() and monotonic() - self._ended_at > FRESH_SECONDS):
            self._task = asyncio.create_task(self._complete(), name="probe")
        return await asyncio.shield(self._task)  # one client's disconnect must not cancel the probe that others wait for

    async def close(self) -> None:
        await stop_tasks(self._task)

    async def _complete(self) -> tuple[int, bytes]:
        status, body = await self._post("/v1/completions", _BODY)
        for code, path in ((NO_GENERATION, EMBEDDINGS), (NO_EMBEDDINGS, CLASSIFICATIONS[0])):
            if status == 400 and code.encode() in body:
                status, body = await self._post(path, _TEXT)
        return status, body

    async def _post(self, path: str, body: bytes) -> tuple[int, bytes]:
        kind = (b"content-type", b"application/json")
        call = Call(RequestHead("POST", path, f"probe-{monotonic():.0f}", [kind], len(body)))
        reply = _BufferedReply()
        try:
            self._handler.admit_internal(call)
            call.body = body
            await self._handler.forward(call, await self._prompts.read(path, body), reply)
        except ApiError as error:
            return error.status, error.body
        finally:
            self._ended_at = monotonic()
        return reply.status, reply.body
