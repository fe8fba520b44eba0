"""Runs all unfinished batches: validation, execution, and the files of results. Every step can be repeated after a crash."""

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Coroutine
from functools import partial
from time import thread_time
from typing import Any

from fairlead_common.fair_slots import FairSlots
from fairlead_index.redis.backoff import Backoff
from fairlead_router.batch.batch_run import BatchRun
from fairlead_router.batch.input_file import read_chunks, read_lines
from fairlead_router.batch.line_client import LineClient
from fairlead_router.batch.metrics import BatchMetrics
from fairlead_router.batch.pacing import Slots
from fairlead_router.batch.records import BatchRecord, FileRecord, Status
from fairlead_router.batch.storage.base import StorageConflict, StorageError
from fairlead_router.batch.store import Store
from fairlead_router.batch.unpaid_cpu import UnpaidCpu
from fairlead_router.batch.validation import LineIndex, LineSplitter, Validator
from fairlead_router.supervision import stop_tasks

logger = logging.getLogger(__name__)

RUNNING_OF_TENANT = 8
"""Batches of a tenant that run at the same time; later ones wait. Each needs up to 1 MB of memory for its index."""


class Runner:
    """Tasks of the unfinished batches. `on_conflict` is called when another process writes to the storage."""

    def __init__(
        self,
        store: Store,
        client: LineClient,
        slots: Slots,
        metrics: BatchMetrics,
        on_conflict: Callable[[], None],
        first_pause: float = 1.0,
    ) -> None:
        """`first_pause`: seconds until a batch continues after the storage failed; the pause doubles up to 30 times that."""
        self._store, self._client, self._slots, self._metrics = store, client, slots, metrics
        self._on_conflict, self._first_pause = on_conflict, first_pause
        self.unpaid_cpu = UnpaidCpu()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._runs: dict[str, BatchRun] = {}
        self._waiting: set[str] = set()
        """Batches that wait until fewer of their tenant run."""
        self._validation = FairSlots(1)
        """One chunk at a time, fairly between tenants: threads are needed for the storage too."""
        self._places: defaultdict[str, asyncio.Semaphore] = defaultdict(lambda: asyncio.Semaphore(RUNNING_OF_TENANT))

    def start(self, id: str) -> None:
        """Run a batch until it has ended."""
        self._start(id, self._wait_and_run(id))

    def _start(self, id: str, work: Coroutine[Any, Any, None]) -> None:
        task = self._tasks[id] = asyncio.create_task(work, name=id)
        task.add_done_callback(lambda _: self._tasks.pop(id) if self._tasks.get(id) is task else None)

    def cancel(self, id: str) -> None:
        """Tell a batch's run that its status is now cancelling. A batch that waits for others to end need not wait any more."""
        if id in self._runs:
            self._runs[id].cancel()
        elif id in self._waiting:
            self._tasks[id].cancel()
            self._start(id, self._run_and_retry(id))

    def counts(self, batch: BatchRecord) -> tuple[int, int]:
        """Return how many lines were completed and failed so far."""
        run = self._runs.get(batch.id)
        return (run.completed, run.failed) if run is not None and not batch.is_ended else (batch.completed, batch.failed)

    async def close(self) -> None:
        """Stop all runs. The next process continues them."""
        await stop_tasks(*self._tasks.values())

    async def _wait_and_run(self, id: str) -> None:
        places = self._places[self._store.batches[id].tenant]
        self._waiting.add(id)
        try:
            await places.acquire()
        finally:
            self._waiting.discard(id)
        try:
            await self._run_and_retry(id)
        finally:
            places.release()

    async def _run_and_retry(self, id: str) -> None:
        pause = Backoff(first=self._first_pause, longest=30 * self._first_pause)
        while True:
            try:
                await self._run(id)
                return
            except StorageConflict as error:
                logger.error("%s", error)
                self._on_conflict()
                return
            except StorageError as error:
                seconds = pause.record_failure(str(error))
                logger.warning("%s waits %.0f s for the storage: %s", id, seconds, error)
            except Exception as error:  # a batch must neither be lost nor end the others
                seconds = pause.record_failure(repr(error))
                logger.exception("%s failed; it continues in %.0f s", id, seconds)
            self._metrics.interruptions.inc()
            await asyncio.sleep(seconds)

    async def _run(self, id: str) -> None:
        batch, index = self._store.batches[id], None
        if batch.status == "validating":
            index = await self._validate(batch)
            batch = self._store.batches[id]
        if batch.is_ended:
            return
        if batch.outcome is None:
            batch = await self._execute(batch, index)
        await self._finish(batch)

    async def _validate(self, batch: BatchRecord) -> LineIndex:
        splitter = LineSplitter(self._store.limits.max_line_bytes)
        validator = Validator(batch.endpoint, self._store.limits.max_lines)
        async for chunk, is_last in read_chunks(self._store.storage, batch):
            slot = await self._validation.acquire(batch.tenant)
            checking = asyncio.ensure_future(asyncio.to_thread(_validate_chunk, validator, splitter, chunk, is_last))
            checking.add_done_callback(partial(self._end_validation, batch.tenant, slot))
            await asyncio.shield(checking)  # if the batch is cancelled, the slot is held until the thread ends
            if validator.is_done or splitter.too_long is not None:
                break
        validator.finish(splitter, self._store.limits.max_line_bytes)
        now = int(time.time())
        if validator.problems:
            await self._store.change_batch(batch.id, ("validating",), status="failed", failed_at=now, problems=validator.problems)
            logger.info("%s failed its validation: %s", batch.id, validator.problems[0].code)
        else:
            known = {"total": len(splitter.index), "model": validator.model}
            await self._store.change_batch(batch.id, ("validating",), status="in_progress", in_progress_at=now, **known)
        return splitter.index

    def _end_validation(self, tenant: str, slot: int, checking: asyncio.Future[float]) -> None:
        self._validation.release(tenant, slot)
        if not checking.cancelled() and checking.exception() is None:
            self.unpaid_cpu.add(tenant, checking.result())

    async def _execute(self, batch: BatchRecord, index: LineIndex | None) -> BatchRecord:
        """Send the lines. Return the batch with its outcome: from now on its results are only moved."""
        if batch.status == "cancelling" and not batch.total:  # cancelled before its validation: there are no lines
            return await self._set_outcome(batch, "cancelled", 0, 0)
        if index is None:
            splitter = LineSplitter(1 << 62)  # validated already, perhaps with a higher limit
            async for _ in read_lines(self._store.storage, batch, splitter):
                pass
            index = splitter.index
        self._store.log_bytes.pop(batch.id, None)
        run = self._runs[batch.id] = BatchRun(batch, index, self._store, self._client, self._slots, self._metrics)
        if self._store.batches[batch.id].status == "cancelling":
            run.cancel()
        logger.info("%s: %d lines of tenant %s", batch.id, batch.total, batch.tenant or "-")
        try:
            return await self._set_outcome(batch, await run.run(), run.completed, run.failed)
        finally:
            self._runs.pop(batch.id, None)

    async def _set_outcome(self, batch: BatchRecord, outcome: Status, completed: int, failed: int) -> BatchRecord:
        counts = {"completed": completed, "failed": failed}
        if outcome != "cancelled":
            changed = await self._store.change_batch(
                batch.id, ("in_progress",), status="finalizing", finalizing_at=int(time.time()), outcome=outcome, **counts
            )
            if changed is not None:
                return changed
        changed = await self._store.change_batch(batch.id, ("cancelling",), outcome="cancelled", **counts)
        assert changed is not None, "a running batch is in_progress or cancelling"
        return changed

    async def _finish(self, batch: BatchRecord) -> None:
        """Make the logs files, and set the final status."""
        now, made = int(time.time()), {}
        outcome = batch.outcome
        assert outcome is not None
        for log, id, name in zip(self._store.logs(batch), (batch.output_id, batch.error_id), ("output", "error"), strict=True):
            size = await log.seal(f"files/{id}")
            made[name] = size > 0
            if size:
                filename, expires = f"{batch.id}_{name}.jsonl", now + batch.file_lifetime
                await self._store.add_file(FileRecord(id, batch.tenant, filename, "batch_output", size, now, expires))
        changes = {"status": outcome, f"{outcome}_at": now, "has_output": made["output"], "has_errors": made["error"]}
        await self._store.change_batch(batch.id, ("finalizing", "cancelling"), **changes)
        self._store.log_bytes.pop(batch.id, None)
        for log in self._store.logs(batch):
            await log.delete()
        logger.info("%s %s: %d lines completed, %d failed, of %d", batch.id, outcome, batch.completed, batch.failed, batch.total)


def _validate_chunk(validator: Validator, splitter: LineSplitter, chunk: bytes, is_last: bool) -> float:
    """Validate the lines of a chunk. Return the CPU seconds that it took."""
    began = thread_time()
    validator.check_all(splitter.feed(chunk, is_last))
    return thread_time() - began
