"""The worker's half of the index: say which blocks it holds and how busy it is."""

from collections.abc import Iterable
from dataclasses import dataclass

from fairlead_index.load import WorkerCard, WorkerLoad

__all__ = ["IndexWriter", "WriterStats"]


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
    last_error: str = ""


class IndexWriter:
    """Keeps the index true about one worker. No method but `leave` waits for Redis, and none raises because of it."""

    def __init__(self, url: str, namespace: str, card: WorkerCard, lease_seconds: float = 10.0) -> None: ...

    def start(self) -> None: ...

    def stored(self, hashes: Iterable[int]) -> None: ...

    def removed(self, hashes: Iterable[int]) -> None: ...

    def report(self, load: WorkerLoad) -> None: ...

    async def leave(self, timeout: float = 2.0) -> None: ...

    @property
    def joined(self) -> bool: ...

    @property
    def stats(self) -> WriterStats: ...
