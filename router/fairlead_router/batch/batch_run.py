"""Execution of one batch: every line without a result is sent, until all have one, the window ends, or the batch is cancelled.

The result logs are the only record of progress. After kill -9 a new run reads them and sends the lines that they lack. A line is sent again
if its answer was not durable yet, so each line has exactly one result.
"""

import asyncio
import logging
import time
from collections import deque
from dataclasses import dataclass

from fairlead_router.batch.input_file import read_line, read_lines
from fairlead_router.batch.line_client import Answer, LineClient, Retry
from fairlead_router.batch.metrics import BatchMetrics
from fairlead_router.batch.pacing import Slots
from fairlead_router.batch.records import BatchRecord, Status
from fairlead_router.batch.results import ResultWriter, answer_line, read_result, request_id, unanswered_line
from fairlead_router.batch.store import Store
from fairlead_router.batch.validation import LineIndex, LineSplitter, decode_line
from fairlead_router.supervision import stop_tasks

logger = logging.getLogger(__name__)

MAX_UNWRITTEN = 256
"""Results that may wait for the storage before further lines are sent: they are in memory."""
UNANSWERED = {
    "expired": ("batch_expired", "This request was not executed before the completion window ended."),
    "cancelled": ("batch_cancelled", "The batch was cancelled before this request was executed."),
}


@dataclass(slots=True)
class _Line:
    """A line without a result."""

    position: int
    tries: int = 0
    failures: int = 0


class BatchRun:
    """One run of a batch in this process. `completed` and `failed` count the lines with durable results."""

    def __init__(self, batch: BatchRecord, index: LineIndex, store: Store, client: LineClient, slots: Slots, metrics: BatchMetrics) -> None:
        self.batch, self._index, self._store, self._client, self._slots, self._metrics = batch, index, store, client, slots, metrics
        self.completed = self.failed = 0
        self._has_result = bytearray(len(index))
        self._logs = store.logs(batch)
        flush = store.storage.flush_seconds
        self._output = ResultWriter(self._logs[0], flush, lambda lines, size: self._count(lines, 0, size))
        self._errors = ResultWriter(self._logs[1], flush, lambda lines, size: self._count(0, lines, size))
        self._cancelled = asyncio.Event()
        self._wake = asyncio.Event()
        self._queue: deque[_Line] = deque()
        self._open = 0
        """Lines that were taken from the queue and have neither a result nor a place in it again."""
        self._resume_at = 0.0
        self._sending: set[asyncio.Task[None]] = set()
        self._failure: BaseException | None = None

    def cancel(self) -> None:
        """End the run. Requests in flight are dropped."""
        self._cancelled.set()

    async def run(self) -> Status:
        """Return the batch's final status, once every line has a durable result. Raises StorageError: run it again then."""
        await self._recover()
        writing = [self._output.start(), self._errors.start()]
        sending, cancelled = asyncio.create_task(self._send_all()), asyncio.create_task(self._cancelled.wait())
        try:
            window = max(0.0, self.batch.expires_at - time.time())
            done, _ = await asyncio.wait({sending, cancelled, *writing}, timeout=window, return_when=asyncio.FIRST_COMPLETED)
            for task in done & {sending, *writing}:
                task.result()  # raises the storage's error
            is_complete = sending in done or all(self._has_result)
            outcome: Status = "cancelled" if cancelled in done else "completed" if is_complete else "expired"
            await stop_tasks(sending, cancelled, *self._sending)
            if outcome != "completed":
                await self._write_unanswered(outcome)
            await self._output.close()
            await self._errors.close()
            return outcome
        finally:
            await stop_tasks(sending, cancelled, *self._sending, *writing)

    async def _recover(self) -> None:
        """Read which lines have a result."""
        for number, log in enumerate(self._logs):
            async for text in log.recover():
                position, is_executed = read_result(text)
                self._has_result[position] = 1
                self._store.log_bytes[self.batch.id] += len(text) + 1
                if number == 0:
                    self.completed += 1
                elif is_executed:
                    self.failed += 1

    def _count(self, completed: int, failed: int, size: int) -> None:
        self.completed += completed
        self.failed += failed
        self._store.log_bytes[self.batch.id] += size
        self._wake.set()

    async def _send_all(self) -> None:
        positions = (position for position, has_result in enumerate(self._has_result) if not has_result)
        while True:
            if self._failure is not None:
                raise self._failure
            line = None
            if self._output.waiting + self._errors.waiting < MAX_UNWRITTEN:
                line = self._queue.popleft() if self._queue else next((_Line(position) for position in positions), None)
                if line is None and not self._open:
                    return
            if line is None:
                self._wake.clear()
                await self._wake.wait()
                continue
            self._open += 1
            await asyncio.sleep(max(0.0, self._resume_at - asyncio.get_running_loop().time()))
            await self._slots.acquire(self.batch.tenant)
            task = asyncio.create_task(self._send(line))
            self._sending.add(task)
            task.add_done_callback(self._on_sent)

    def _on_sent(self, task: "asyncio.Task[None]") -> None:
        self._sending.discard(task)
        self._slots.release()
        if not task.cancelled() and task.exception() is not None:
            self._failure = task.exception()
        self._wake.set()

    async def _send(self, item: _Line) -> None:
        batch, loop = self.batch, asyncio.get_running_loop()
        line = await read_line(self._store.storage, batch, self._index, item.position)
        sent_at = self._slots.now()
        self._metrics.in_flight.inc()
        try:
            id = request_id(batch, item.position)
            answer = await self._client.send(batch.tenant, batch.endpoint, id, line, item.tries, item.failures)
        finally:
            self._metrics.in_flight.dec()
        if isinstance(answer, Answer):
            self._slots.limit.record_success()
            is_good = answer.status == 200
            self._has_result[item.position] = 1
            (self._output if is_good else self._errors).add(answer_line(batch, item.position, line.custom_id, answer))
            self._metrics.lines.labels("completed" if is_good else "failed").inc()
            self._open -= 1
            return
        self._record_retry(item, answer, sent_at)
        loop.call_later(answer.seconds, self._requeue, item)

    def _record_retry(self, item: _Line, retry: Retry, sent_at: float) -> None:
        item.tries += 1
        item.failures += retry.is_failure
        self._metrics.lines.labels("retried").inc()
        logger.debug("%s line %d: again in %.1f s: %s", self.batch.id, self._index.numbers[item.position], retry.seconds, retry.reason)
        if retry.is_quota:
            self._resume_at = asyncio.get_running_loop().time() + retry.seconds
        elif not retry.is_failure:
            self._slots.limit.record_busy(sent_at, self._slots.now(), retry.seconds)

    def _requeue(self, item: _Line) -> None:
        self._open -= 1
        self._queue.append(item)
        self._wake.set()

    async def _write_unanswered(self, outcome: Status) -> None:
        """Give every line without a result one that says why."""
        code, message = UNANSWERED[outcome]
        splitter, position = LineSplitter(1 << 62), 0
        async for lines in read_lines(self._store.storage, self.batch, splitter):
            for _, text in lines:
                if not self._has_result[position]:
                    self._errors.add(unanswered_line(self.batch, position, decode_line(text).custom_id, code, message), is_executed=False)
                position += 1
            await asyncio.sleep(0)
