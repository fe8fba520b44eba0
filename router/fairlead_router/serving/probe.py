"""`GET /fairlead/probe`: one token through a worker, for who has no key and has to know whether the service serves (the operator).

Anybody may ask, and nobody can make it expensive: the prompt is ours, one is under way at a time, and its answer serves all who ask within
a second.
"""

import asyncio
from time import monotonic

from fairlead_common.protocols.paths import EMBEDDINGS, NO_GENERATION
from fairlead_router.errors import ApiError, Headers, unavailable
from fairlead_router.fleet.workers import WorkerTable
from fairlead_router.request.client_request import Call
from fairlead_router.request.prompts import Prompts
from fairlead_router.serving.request_handler import RequestHandler
from fairlead_router.wire.response import Reply

PATH = "/fairlead/probe"
FRESH_SECONDS = 1.0
_BODY = b'{"prompt": "Ready?", "max_tokens": 1, "temperature": 0}'
_TEXT = b'{"input": "Ready?"}'
"""For a model that has no head, and says so (`NO_GENERATION`)."""


class _BufferedReply(Reply):
    """An answer that goes nowhere."""

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
    """The latest completion, made anew when somebody asks for it and it is old."""

    def __init__(self, front: RequestHandler, prompts: Prompts, table: WorkerTable) -> None:
        self._front, self._prompts, self._table = front, prompts, table
        self._task: asyncio.Task[tuple[int, bytes]] | None = None
        self._since = 0.0

    async def run(self) -> tuple[int, bytes]:
        """Status and body of the completion's answer. It never waits for a worker: or anybody could bring a service back from zero."""
        if not self._table.usable():
            refusal = unavailable("No worker is ready.", retry_after=5)
            return refusal.status, refusal.body
        old = self._task is None or (self._task.done() and monotonic() - self._since > FRESH_SECONDS)
        if self._task is None or old:
            self._task = asyncio.create_task(self._complete(), name="probe")
        return await asyncio.shield(self._task)  # who asks may go: the others wait for it too

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _complete(self) -> tuple[int, bytes]:
        status, body = await self._post("/v1/completions", _BODY)
        return await self._post(EMBEDDINGS, _TEXT) if status == 400 and NO_GENERATION.encode() in body else (status, body)

    async def _post(self, path: str, body: bytes) -> tuple[int, bytes]:
        kind = (b"content-type", b"application/json")
        call = Call("POST", path, f"probe-{monotonic():.0f}", [kind], len(body), "")
        reply = _BufferedReply()
        try:
            self._front.admit_internal(call)
            call.body = body
            await self._front.forward(call, await self._prompts.read(call.path, body), reply)
        except ApiError as error:
            return error.status, error.body
        finally:
            self._since = monotonic()
        return reply.status, reply.body
