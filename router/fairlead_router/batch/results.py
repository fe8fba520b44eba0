"""Result lines: how they are written, which request each belongs to, and how they become durable together."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

import msgspec

from fairlead_router.batch.line_client import Answer
from fairlead_router.batch.records import BatchRecord
from fairlead_router.batch.storage.base import Log


class _Result(msgspec.Struct):
    id: str
    error: dict[str, str] | None = None


class _Response(msgspec.Struct):
    status_code: int
    request_id: str
    body: msgspec.Raw


class _Output(msgspec.Struct):
    id: str
    custom_id: str
    response: _Response | None
    error: dict[str, str] | None


_results = msgspec.json.Decoder(_Result)

_LINE_BREAKS = (("\u0085", rb"\u0085"), ("\u2028", rb"\u2028"), ("\u2029", rb"\u2029"))
"""Line breaks of Unicode, and their escapes: `str.splitlines` and httpx's `iter_lines` would cut a result at them."""


def request_id(batch: BatchRecord, position: int) -> str:
    """Return the id of a line's request. It contains the line's position, by which recovery knows the line."""
    return f"batch_req_{batch.id.removeprefix('batch_')}{position:08x}"


def read_result(text: bytes) -> tuple[int, bool]:
    """Return the position of the line that a result line belongs to, and whether its request was executed."""
    result = _results.decode(text)
    return int(result.id[-8:], 16), result.error is None


def answer_line(batch: BatchRecord, position: int, custom_id: str, answer: Answer) -> bytes:
    """Return the result line of an answered request, as in OpenAI's output files."""
    response = _Response(answer.status, answer.request_id, msgspec.Raw(answer.body))
    return _encode(_Output(request_id(batch, position), custom_id, response, None))


def unanswered_line(batch: BatchRecord, position: int, custom_id: str, code: str, message: str) -> bytes:
    """Return the result line of a request that was not executed."""
    return _encode(_Output(request_id(batch, position), custom_id, None, {"code": code, "message": message}))


def _encode(output: _Output) -> bytes:
    """Return the result as JSON without any line break."""
    line = msgspec.json.encode(output)
    for character, escape in _LINE_BREAKS:
        line = line.replace(character.encode(), escape)
    return line


class ResultWriter:
    """Appends results to a log, many with one sync: while one append runs, further results collect for the next."""

    def __init__(self, log: Log, flush_seconds: float, on_durable: Callable[[int, int], None]) -> None:
        """`on_durable(executed lines, bytes)` is called after each append."""
        self._log, self._flush_seconds, self._on_durable = log, flush_seconds, on_durable
        self._pending: list[bytes] = []
        self._num_executed = 0
        """Pending lines whose requests were executed."""
        self._more = asyncio.Event()
        self._closed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def waiting(self) -> int:
        """Return how many results are not durable yet."""
        return len(self._pending)

    def start(self) -> asyncio.Task[None]:
        """Start writing. The task ends after `close`, and raises StorageError."""
        self._task = asyncio.create_task(self._run())
        return self._task

    def add(self, line: bytes, is_executed: bool = True) -> None:
        self._pending.append(line)
        self._num_executed += is_executed
        self._more.set()

    def close(self) -> Awaitable[None]:
        """Write the rest. Await the result."""
        self._closed.set()
        self._more.set()
        assert self._task is not None
        return self._task

    async def _run(self) -> None:
        while self._pending or not self._closed.is_set():
            await self._more.wait()
            self._more.clear()
            if self._flush_seconds and not self._closed.is_set():
                await self._collect()
            lines, self._pending, executed, self._num_executed = self._pending, [], self._num_executed, 0
            if lines:
                await self._append(lines)
                self._on_durable(executed, sum(map(len, lines)) + len(lines))
            if self._closed.is_set() or self._pending:
                self._more.set()

    async def _append(self, lines: list[bytes]) -> None:
        """Append, to the end even if this task is cancelled: a write must not go on beside the recovery of the next run."""
        append = asyncio.ensure_future(self._log.append(lines))
        try:
            await asyncio.shield(append)
        except asyncio.CancelledError:
            await asyncio.gather(append, return_exceptions=True)
            raise

    async def _collect(self) -> None:
        """Let results collect, until the last line ends."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._flush_seconds):
                await self._closed.wait()
