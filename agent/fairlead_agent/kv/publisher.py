"""The index's writer of this worker, replaced whenever all that it published is withdrawn at once."""

import asyncio
from collections.abc import Callable

from fairlead_index.redis.access import RedisAccess
from fairlead_index.worker_load import WorkerCard, WorkerLoad
from fairlead_index.writer import IndexWriter


class Publisher:
    """A `Sink` of blocks that writes to the index. Without Redis it does nothing.

    `reset` joins under a fresh incarnation. Routers ignore records of another incarnation than the worker reports, so they see either
    nothing or the new blocks, never a mixture.
    """

    def __init__(self, redis: RedisAccess | None, namespace: str, card: WorkerCard) -> None:
        self._create: Callable[[], IndexWriter | None] = lambda: IndexWriter(redis, namespace, card) if redis is not None else None
        self._writer = self._create()
        self._is_started = self._has_left = False
        self._is_empty = True
        self._load: WorkerLoad | None = None
        self._leaving: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        """Join the index."""
        self._is_started = True
        if self._writer is not None:
            self._writer.start()

    def store(self, hashes: list[int], parent: int) -> None:
        self._is_empty = False
        if self._writer is not None and not self._has_left:
            self._writer.store(hashes, parent)

    def remove(self, hashes: list[int]) -> None:
        if self._writer is not None and not self._has_left:
            self._writer.remove(hashes)

    def reset(self) -> None:
        if self._is_empty or self._has_left or self._writer is None:
            return
        self._is_empty = True
        old, self._writer = self._writer, self._create()
        if self._is_started:
            self._leave_in_background(old)
            assert self._writer is not None
            self._writer.start()
            if self._load is not None:
                self._writer.report(self._load)

    def report(self, load: WorkerLoad) -> None:
        """Set the newest load."""
        self._load = load
        if self._writer is not None and not self._has_left:
            self._writer.report(load)

    async def leave(self) -> None:
        """Leave the index for good. Later changes have no effect."""
        self._has_left = True
        if self._writer is not None and self._is_started:
            await self._writer.leave()
        await asyncio.gather(*self._leaving, return_exceptions=True)

    @property
    def incarnation(self) -> str:
        """The incarnation that the index has; empty before the first join and after the last leave."""
        return self._writer.incarnation if self._writer is not None and not self._has_left else ""

    @property
    def is_joined(self) -> bool:
        return self._writer is not None and self._writer.joined

    @property
    def is_full(self) -> bool:
        return self._writer is not None and self._writer.stats.full

    def _leave_in_background(self, writer: IndexWriter) -> None:
        task = asyncio.create_task(writer.leave())
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)
