"""Publish the engine's reports to the index: the blocks that this worker holds, and its load. It works without Redis too."""

from array import array
from collections.abc import Callable, Sequence

from fairlead_index.redis.access import RedisAccess
from fairlead_index.worker_load import WorkerCard, WorkerLoad
from fairlead_index.writer import IndexWriter
from fairlead_worker.config import WorkerConfig
from fairlead_worker.ipc.messages import CacheEvent, Load


class IndexPublisher:
    """Feeds one IndexWriter. It starts only when the engine is ready, because routers choose every worker in the index."""

    def __init__(self, config: WorkerConfig, redis: RedisAccess, address: str, page_size: int, arrival_rate: Callable[[], float]) -> None:
        """`arrival_rate`: returns the requests received per second."""
        card = WorkerCard(pod=config.pod, address=address, block_tokens=config.block_tokens)
        self.writer = IndexWriter(redis, config.index_namespace, card)
        self._page_size, self._arrival_rate = page_size, arrival_rate
        self._on_joined: Callable[[], None] | None = None

    def start(self, on_joined: Callable[[], None] | None = None) -> None:
        """`on_joined`: called once, with the first load report after the worker has joined the index."""
        self._on_joined = on_joined
        self.writer.start()

    def on_events(self, events: Sequence[CacheEvent]) -> None:
        for event in events:
            hashes = array("Q", event.hashes)
            if event.kind == "stored":
                self.writer.store(hashes, event.parent)
            else:
                self.writer.remove(hashes)

    def on_load(self, load: Load) -> None:
        self.writer.report(to_worker_load(load, self._page_size, self._arrival_rate()))
        if self._on_joined is not None and self.writer.joined:
            self._on_joined()
            self._on_joined = None

    async def leave(self) -> None:
        await self.writer.leave()


def to_worker_load(load: Load, page_size: int, arrival_rate: float) -> WorkerLoad:
    """Return the engine's load as the index's load record."""
    return WorkerLoad(
        running=load.running,
        waiting=load.waiting,
        backlog_tokens=load.backlog_tokens,
        prefill_rate=load.prefill_rate,
        step_seconds=load.step_seconds,
        pages_free=load.pages_free,
        pages_total=load.pages_total,
        page_size=page_size,
        arrival_rate=arrival_rate,
    )
