"""The worker's side of the index: publish its blocks and its load."""

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

from fairlead_index.changes import Change, Changes, pack
from fairlead_index.redis.access import RedisAccess
from fairlead_index.redis.backoff import Backoff
from fairlead_index.redis.connection import ReplyError
from fairlead_index.redis.replies import as_byte_strings
from fairlead_index.redis.scripts import REDIS_ERRORS, Scripts, eviction_advice
from fairlead_index.worker_load import WorkerCard, WorkerLoad

__all__ = ["IndexWriter", "WorkerCard", "WorkerLoad", "WriterStats"]

MIN_BATCH_BLOCKS: Final = 16  # blocks Redis for less than 0.1 ms: a router's query may wait behind two batches of every writer
MAX_BATCH_BLOCKS: Final = 128  # for a snapshot or a long backlog: two thirds of the server time per block, an eighth of the round trips
BATCH_SHARE: Final = 8  # a batch is one eighth of the pending blocks: the busier Redis is, the cheaper each block
BATCH_SECONDS: Final = 0.005
SWEEP_ENTRIES: Final = 400  # bounds how long one sweep blocks other calls
BUCKETS: Final = 256  # of a new namespace. An empty bucket costs nothing, and buckets grow with the blocks
CALL_SECONDS: Final = 2.0

log = logging.getLogger(__name__)


@dataclass(slots=True)
class WriterStats:
    """Counters since the start, for /metrics."""

    joins: int = 0
    batches: int = 0
    blocks: int = 0
    stale: int = 0
    gaps: int = 0
    errors: int = 0
    held: int = 0
    pending: int = 0
    full: bool = False
    """Redis is at its maxmemory: it keeps the lease and takes removals, but no new blocks until it has memory."""
    last_error: str = ""


@dataclass(slots=True)
class _Incarnation:
    """One run of this worker in the index. `batch` was sent as `sequence + 1`, and is resent unchanged until it is acknowledged."""

    slot: bytes
    epoch: bytes
    sequence: int = 0
    batch: list[Change] | None = None

    @property
    def blocks(self) -> int:
        return sum(change.blocks for change in self.batch or ())


class _Lost(Exception):
    """The index no longer knows this incarnation, or knows an older state of it."""


class IndexWriter:
    """Keeps the index up to date about one worker. Only `leave` waits for Redis, and no method raises because of it.

    Call it from one event loop. The held set is always prefix-closed: store parents before children, remove children before parents.
    Raises ValueError for a url or a namespace that can never work.
    """

    def __init__(
        self,
        redis: RedisAccess | str,
        namespace: str,
        card: WorkerCard,
        lease_seconds: float = 10.0,
        *,
        buckets: int = BUCKETS,
        call_seconds: float = CALL_SECONDS,
    ) -> None:
        self._scripts = Scripts(redis, namespace, timeout=call_seconds)
        self._card = card
        self._lease = lease_seconds
        self._buckets = buckets
        self._changes = Changes()
        self._stats = WriterStats()
        self._backoff = Backoff(first=0.05, longest=min(1.0, lease_seconds / 5))
        self._load: tuple[float, WorkerLoad] | None = None  # when it was measured, monotonic seconds
        self._load_is_new = False
        self._heartbeat_at = 0.0
        self._sweep_at = 0.0
        self._store_at = 0.0  # when to try a full Redis again
        self._epoch = b""
        self._advice = ""
        self._current: _Incarnation | None = None
        self._wake = asyncio.Event()
        self._leaving = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start in the running event loop. Raises RuntimeError on a second call."""
        if self._task is not None or self._leaving.is_set():
            raise RuntimeError("the index writer was started before: create a new IndexWriter to join again")
        self._task = asyncio.get_running_loop().create_task(self._run(), name=f"index-writer-{self._card.pod}")

    def store(self, hashes: Iterable[int], parent: int = 0) -> None:
        """Publish a chain of blocks that the worker now holds. `parent`: the held block before the chain, or the prompt's
        root. Blocks already held change nothing."""
        self._changes.store(hashes, parent)
        self._wake.set()

    def remove(self, hashes: Iterable[int]) -> None:
        """Publish the removal of blocks, children before parents. Blocks not held change nothing."""
        self._changes.remove(hashes)
        self._wake.set()

    def report(self, load: WorkerLoad) -> None:
        """Set the newest load. A heartbeat publishes it within a twentieth of the lease."""
        self._load = (time.monotonic(), load)
        if not self._load_is_new:
            self._load_is_new = True
            self._wake.set()

    async def leave(self, timeout: float = 2.0) -> None:
        """Remove the worker from the index and stop, within `timeout` seconds even without Redis."""
        self._leaving.set()
        self._wake.set()
        try:
            async with asyncio.timeout(timeout):
                if self._task is not None:
                    await asyncio.wait({self._task})  # ends after the call in flight, which may be the join to undo
                if self._epoch:
                    await self._scripts.call("leave", self._card.pod, self._epoch)
        except REDIS_ERRORS as error:
            log.warning("could not leave the index, the lease ends within %.0f s: %s", self._lease, error or "timeout")
        finally:
            self._drop_incarnation()
            if self._task is not None and not self._task.done():
                self._task.cancel()
            with contextlib.suppress(*REDIS_ERRORS):
                await self._scripts.close()

    @property
    def incarnation(self) -> str:
        """Identifies this run of the worker in the index; empty before the first join. Routers use its records only while the worker itself
        reports the same incarnation."""
        return self._epoch.hex()

    @property
    def joined(self) -> bool:
        """Whether the index lists this worker, as far as known here."""
        return self._current is not None

    @property
    def stats(self) -> WriterStats:
        self._stats.held = len(self._changes)
        self._stats.pending = self._changes.pending + (self._current.blocks if self._current else 0)
        return self._stats

    async def _run(self) -> None:
        while not self._leaving.is_set():
            try:
                await self._run_once()
            except _Lost as lost:
                log.warning("index lost this worker (%s): joining again with %d blocks", lost, len(self._changes))
                self._drop_incarnation()
            except REDIS_ERRORS as error:
                await self._handle_failure(error)
            except Exception as error:  # a bug here must stop neither serving nor retrying
                log.exception("index writer failed")
                self._drop_incarnation()
                await self._handle_failure(error)

    async def _run_once(self) -> None:
        """Join if needed, send one batch, renew the lease, wait for more work."""
        if self._current is not None and self._current.batch is None and not self._changes.is_following:
            self._drop_incarnation()  # the backlog was dropped while Redis was away
        incarnation = self._current or await self._join()
        if incarnation.batch is None and self._changes.pending:
            incarnation.batch = self._changes.take(min(MAX_BATCH_BLOCKS, max(MIN_BATCH_BLOCKS, self._changes.pending // BATCH_SHARE)))
        if incarnation.batch is not None:
            await self._apply(incarnation, incarnation.batch)
        if time.monotonic() >= self._next_heartbeat_at():
            await self._heartbeat(incarnation)
        is_nearly_sent = self._changes.pending <= MAX_BATCH_BLOCKS  # pending removals go before the new snapshot
        if self._stats.full and incarnation.batch is None and is_nearly_sent and time.monotonic() >= self._store_at:
            incarnation.batch = self._changes.take(MAX_BATCH_BLOCKS) or None
            self._changes.restart()  # the whole set, parents first: blocks that the index kept change nothing
            self._stats.full = bool(self._changes.pending)
            self._store_at = time.monotonic() + self._lease
        if self._backoff.is_active:
            log.info("the index receives this worker's blocks again")
        self._backoff.reset()
        if incarnation.batch is None and not self._changes.pending:
            await self._idle()

    async def _idle(self) -> None:
        """Wait for a change and BATCH_SECONDS for more of them, or for the next heartbeat."""
        self._wake.clear()
        if self._leaving.is_set():
            return
        try:
            async with asyncio.timeout(max(0.0, self._next_heartbeat_at() - time.monotonic())):
                await self._wake.wait()
        except TimeoutError:
            return
        if self._changes.pending < MIN_BATCH_BLOCKS and not self._leaving.is_set():
            await asyncio.sleep(BATCH_SECONDS)

    def _next_heartbeat_at(self) -> float:
        return self._heartbeat_at + self._lease / (20 if self._load_is_new else 5)

    async def _join(self) -> _Incarnation:
        self._epoch = os.urandom(8)
        card = self._card
        reply = await self._scripts.call(
            "join", card.pod, card.address, card.revision, card.block_tokens, self._epoch, round(self._lease * 1000), self._buckets
        )
        if reply[0] != b"OK":
            await self._scripts.call("sweep", SWEEP_ENTRIES)
            raise OSError("all 65,535 slots of the namespace are taken or wait for the sweep")
        _, slot = as_byte_strings(reply, "the reply of join", least=2, most=2)
        self._current = _Incarnation(slot=slot, epoch=self._epoch)
        self._stats.joins += 1
        self._heartbeat_at = 0.0  # publish the load before the snapshot is complete
        self._changes.restart()
        self._stats.full = False
        if (advice := await eviction_advice(self._scripts.redis)) != self._advice:
            self._advice = advice
            if advice:
                log.warning("%s", advice)
        return self._current

    async def _apply(self, incarnation: _Incarnation, batch: list[Change]) -> None:
        stores = any(change.kind == "S" for change in batch)
        try:
            script, sequence = "apply" if stores else "evict", incarnation.sequence + 1
            reply = await self._scripts.call(script, incarnation.slot, incarnation.epoch, sequence, *pack(batch))
        except ReplyError as error:
            if not stores or error.code != "OOM":
                raise
            self._handle_full(incarnation, batch, str(error))
            return
        self._check_reply(reply)
        self._stats.batches += 1
        self._stats.blocks += incarnation.blocks
        incarnation.sequence += 1
        incarnation.batch = None
        if stores and self._stats.full:
            self._stats.full = False
            log.info("redis has memory again: publishing %d blocks", len(self._changes))

    def _handle_full(self, incarnation: _Incarnation, batch: list[Change], reason: str) -> None:
        """Handle OOM. None of the batch was applied, or on a retry all of it: its removals can reuse the number in both cases."""
        incarnation.batch = [change for change in batch if change.kind == "R"]  # sent even if empty: it confirms the number
        self._changes.keep_removals()
        self._store_at = time.monotonic() + self._lease
        if not self._stats.full:
            self._stats.full = True
            log.warning(
                "redis is full (%s): it takes no new blocks until it has memory, and requests for them are routed by load. "
                "Raise its maxmemory: docs/operate/size.md says how much a worker needs",
                reason,
            )

    async def _heartbeat(self, incarnation: _Incarnation) -> None:
        sent = time.monotonic()
        age, load = (-1, WorkerLoad()) if self._load is None else (round((sent - self._load[0]) * 1000), self._load[1])
        self._load_is_new = False
        reply = await self._scripts.call(
            "heartbeat",
            incarnation.slot,
            incarnation.epoch,
            incarnation.sequence,
            age,
            load.running,
            load.waiting,
            load.backlog_tokens,
            load.prefill_rate,
            load.step_seconds,
            load.pages_free,
            load.pages_total,
            load.page_size,
            load.arrival_rate,
        )
        self._check_reply(reply)
        self._heartbeat_at = sent
        if reply[1:] != [0] or sent >= self._sweep_at:
            await self._scripts.call("sweep", SWEEP_ENTRIES)
        if sent >= self._sweep_at:
            await self._scripts.call("renew")
            self._sweep_at = sent + self._lease

    def _check_reply(self, reply: list[Any]) -> None:
        if reply[0] == b"STALE":
            self._stats.stale += 1
            raise _Lost("stale: another incarnation took over, or the index was emptied")
        if reply[0] == b"GAP":
            self._stats.gaps += 1
            raise _Lost("gap: the index is missing changes")

    def _drop_incarnation(self) -> None:
        self._current = None
        self._changes.forget()

    def _repair_advice(self) -> str:
        if "WRONGTYPE" not in self._stats.last_error:
            return ""
        return f". A key of the index was overwritten: delete all keys that begin with {self._scripts.prefix}; workers then publish again"

    async def _handle_failure(self, error: BaseException) -> None:
        self._stats.errors += 1
        self._stats.last_error = str(error) or type(error).__name__
        if not self._backoff.is_active:
            log.warning(
                "the index does not receive this worker's blocks until Redis answers: %s%s", self._stats.last_error, self._repair_advice()
            )
        seconds = self._backoff.record_failure(self._stats.last_error)
        log.debug("next try in %.2f s: %s", seconds, self._stats.last_error)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._leaving.wait()
