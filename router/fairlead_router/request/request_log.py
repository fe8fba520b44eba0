"""The latest requests with the choices that were made for them, for the web console. Nothing of a prompt or an answer is kept."""

import time
from array import array
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from msgspec.structs import replace

from fairlead_index.score import StartEstimate
from fairlead_router.request.client_request import Call, Outcome

MAX_REQUESTS: Final = 200
"""Requests that are kept: at most 0.6 MB with 12 candidates each."""
MAX_PROMPTS: Final = 1000
MAX_BLOCKS: Final = 1 << 17
"""Hashes that are kept in all: 1 MiB."""
MAX_BLOCKS_OF_PROMPT: Final = 4096
"""Blocks that are kept of one prompt, its first ones: 65,536 tokens of 16 to a block. Longer prompts are cut."""
Entry = TypeVar("Entry")


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One ended request. Times are in seconds."""

    ended_at: float
    """Unix time."""
    id: str
    path: str
    class_name: str
    is_stream: bool
    seconds: float
    outcome: Outcome
    """Without the prompt's hashes."""

    @property
    def chosen(self) -> StartEstimate | None:
        """The estimate for the chosen worker."""
        return next((start for start in self.outcome.candidates if start.address == self.outcome.worker), None)

    @property
    def time_to_first_token(self) -> float | None:
        """From the choice, of a stream; None: unknown."""
        first, chosen = self.outcome.first_byte_at, self.outcome.chosen_at
        return first - chosen if self.is_stream and first is not None and chosen > 0 else None


class TenantLog(Generic[Entry]):
    """The latest entries, bounded by their number and their size. A busy tenant pushes out its own entries first."""

    def __init__(self, most: int, most_size: int) -> None:
        self._most, self._most_size = most, most_size
        self._entries: dict[str, deque[tuple[Entry, int]]] = {}  # by tenant, with their sizes
        self._sizes: Counter[str] = Counter()

    def add(self, tenant: str, entry: Entry, size: int) -> None:
        """Store an entry, and drop the oldest ones beyond the bounds."""
        self._entries.setdefault(tenant, deque()).append((entry, size))
        self._sizes[tenant] += size
        while self._sizes.total() > self._most_size:
            self._drop(max(self._sizes, key=self._sizes.__getitem__))
        while sum(map(len, self._entries.values())) > self._most:
            self._drop(max(self._entries, key=lambda name: len(self._entries[name])))

    def entries(self, tenant: str | None) -> list[Entry]:
        """Return the entries, of each tenant the oldest first. `tenant`: only this tenant's; None: all."""
        chosen = self._entries.values() if tenant is None else [self._entries.get(tenant, ())]
        return [entry for entries in chosen for entry, _ in entries]

    def _drop(self, tenant: str) -> None:
        _, size = self._entries[tenant].popleft()
        self._sizes[tenant] -= size


class RequestLog:
    """The latest records, and the block hashes of more prompts. Hashes are keyed, so no text can be read from them."""

    def __init__(self) -> None:
        self._records = TenantLog[RequestRecord](MAX_REQUESTS, MAX_REQUESTS)
        self._chains = TenantLog["array[int]"](MAX_PROMPTS, MAX_BLOCKS)

    def record(self, call: Call, now: float) -> None:
        """Store an ended request. `now`: monotonic seconds."""
        tenant = call.caller.tenant.name
        self.record_prefix(tenant, call.outcome.hashes)
        head, outcome = call.head, replace(call.outcome, hashes=())
        is_stream, seconds = call.held_stream is not None, now - head.started_at
        self._records.add(tenant, RequestRecord(time.time(), head.id, head.path, call.class_name, is_stream, seconds, outcome), 1)

    def record_prefix(self, tenant: str, hashes: Sequence[int]) -> None:
        """Store a prompt's block hashes. A prompt without a full block is left out."""
        if hashes:
            chain = array("Q", hashes[:MAX_BLOCKS_OF_PROMPT])
            self._chains.add(tenant, chain, len(chain))

    def newest(self, tenant: str | None) -> list[RequestRecord]:
        """Return the records, the newest first. `tenant`: only this tenant's; None: all."""
        return sorted(self._records.entries(tenant), key=lambda record: record.ended_at, reverse=True)

    def chains(self, tenant: str | None) -> "list[array[int]]":
        """Return the hash chains, of each tenant the oldest first. `tenant`: only this tenant's; None: all."""
        return self._chains.entries(tenant)
