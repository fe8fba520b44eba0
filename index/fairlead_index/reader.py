"""The router's half of the index: ask which worker starts a prompt soonest."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from fairlead_index.load import WorkerLoad

Hashes = Sequence[int]  # fastest as the array("Q") that `block_hashes` returns


@dataclass(frozen=True, slots=True)
class Candidate:
    """A worker for one prompt. `cached_tokens` of the prompt are expected in its cache; `expected_seconds` to its first token."""

    address: str
    pod: str
    cached_tokens: int
    expected_seconds: float


@dataclass(frozen=True, slots=True)
class Route:
    """Candidates, best first (none when no worker is live or all are excluded). `reservation` holds the first one's time until released."""

    candidates: list[Candidate]
    reservation: bytes


@dataclass(frozen=True, slots=True)
class WorkerState:
    """A live worker. `lease_seconds` are left of its lease; `reserved_tokens` were promised to it and are not in its load yet."""

    pod: str
    address: str
    block_tokens: int
    revision: str
    lease_seconds: float
    reserved_tokens: int
    load: WorkerLoad


class IndexReader:
    """Reads the index of one namespace. Every call ends within `deadline` seconds, with an answer or with IndexUnavailable."""

    def __init__(self, url: str, namespace: str, deadline: float = 0.05) -> None: ...

    async def route(self, hashes: Hashes, prompt_tokens: int, exclude: Collection[str] = ()) -> Route: ...

    async def match(self, hashes: Hashes) -> dict[str, int]: ...

    async def release(self, reservation: bytes) -> None: ...

    async def workers(self) -> list[WorkerState]: ...

    async def close(self) -> None: ...
