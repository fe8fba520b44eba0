"""Prompts that this router has sent and whose answer has not begun: what the index does not show yet, but will. Pure.

`fairlead simulate` runs the same code.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple

from fairlead_index.score import StartEstimate

EXPIRY_SECONDS: Final = 60.0
"""Time after which a prompt no longer counts, as for a reservation: the answer to a redirected client is not seen here."""

SLACK: Final = 1.25
"""A worker that computes a part of the prompt is preferred if it starts the prompt at most this factor later than the best."""


class _Sent(NamedTuple):
    address: str
    hashes: Sequence[int]
    expires: float


class PromptsInFlight:
    """Blocks that workers will compute for this router, by the reservation of each request.

    Only blocks beyond those that the index showed are kept, so the cost is that of what the worker has to compute.
    """

    def __init__(self) -> None:
        self._sent: dict[bytes, _Sent] = {}
        self._requests: dict[int, dict[str, int]] = {}
        """Requests that compute each block, by the worker's address."""

    def add(self, reservation: bytes, address: str, hashes: Sequence[int], now: float) -> None:
        """Note that a worker will compute these blocks. `now`: seconds, never less than before."""
        self._expire(now)
        if not reservation or not len(hashes):
            return
        self._sent[reservation] = _Sent(address, hashes, now + EXPIRY_SECONDS)
        for value in hashes:
            requests = self._requests.setdefault(value, {})
            requests[address] = requests.get(address, 0) + 1

    def remove(self, reservation: bytes) -> None:
        """End a request's entry: its answer has begun, or it has failed. Does nothing for an unknown one."""
        sent = self._sent.pop(reservation, None)
        if sent is None:
            return
        for value in sent.hashes:
            requests = self._requests[value]
            requests[sent.address] -= 1
            if not requests[sent.address]:
                del requests[sent.address]
                if not requests:
                    del self._requests[value]

    def extend(self, held: Mapping[str, int], hashes: Sequence[int], block_tokens_of: Callable[[str], int], now: float) -> dict[str, int]:
        """Return the tokens of a prompt that workers will hold beyond `held`, by address: only workers that compute a part of it."""
        self._expire(now)
        if not self._requests:
            return {}
        depths = {address: tokens // block_tokens_of(address) for address, tokens in held.items()}
        found: dict[str, int] = {}
        for depth in {0, *depths.values()}:
            if depth < len(hashes):
                for address in self._requests.get(hashes[depth], ()):
                    if depths.get(address, 0) == depth:
                        found[address] = self._depth(address, hashes, depth) * block_tokens_of(address)
        return found

    def _depth(self, address: str, hashes: Sequence[int], low: int) -> int:
        """Return how many blocks the worker will hold. It computes the one at `low`. A hash covers all blocks before it."""
        high = len(hashes)
        while high - low > 1:
            middle = (low + high) // 2
            if address in self._requests.get(hashes[middle], ()):
                low = middle
            else:
                high = middle
        return high

    def _expire(self, now: float) -> None:
        while self._sent and self._sent[oldest := next(iter(self._sent))].expires <= now:
            self.remove(oldest)


def prefer_computing(starts: list[StartEstimate], computing: Mapping[str, int]) -> list[StartEstimate]:
    """Return the workers, with one first that computes a part of the prompt for another request, if it is about as soon as the best.

    It may be later by SLACK, and by no more than the work that it saves. Without this rule the first equal prompts of a burst spread: to
    wait for a prefix takes as long as to compute it, but the work delays the requests that follow.
    """
    shared = [start for start in starts if start.address in computing]
    if not shared or starts[0] in shared:
        return starts
    first, best = starts[0], min(shared, key=lambda start: (not start.fits, start.seconds))
    if best.seconds > min(SLACK * first.seconds, first.seconds + first.work - best.work) or (first.fits and not best.fits):
        return starts
    return [best, *(start for start in starts if start is not best)]
