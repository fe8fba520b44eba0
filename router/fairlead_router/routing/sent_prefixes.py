"""Prefixes that a router knows without Redis, beyond its mirror: those that it sent itself, and those at their homes."""

from collections.abc import Callable, Mapping, Sequence
from typing import Final

from fairlead_index.mirror.prefix_table import PrefixTable
from fairlead_router.fleet.workers import Worker

HomeOf = Callable[[int], Worker | None]
"""Return the worker that every router would choose for a block's hash; None if no eligible worker exists."""
MAX_BLOCKS: Final = 500_000
"""Distinct blocks that are remembered, about 50 MB. Beyond it, all are forgotten: the newest ones come again with the next requests."""


class SentPrefixes:
    """Prompts that this router sent since Redis went away, or at all. Which of them a worker evicts meanwhile is unknown."""

    def __init__(self) -> None:
        self._table = PrefixTable()
        self._known: dict[str, tuple[bytes, int]] = {}
        """Slot in the table and generation of each worker, by address."""

    def add(self, worker: Worker, block_tokens: int, hashes: Sequence[int]) -> None:
        """Note that the worker gets this prompt. A worker of another generation has lost what it held."""
        if len(self._table) + len(hashes) > MAX_BLOCKS:
            self.clear()
        slot, generation = self._known.get(worker.address) or (len(self._known).to_bytes(2, "big"), None)
        if generation != worker.generation:
            self._known[worker.address] = slot, worker.generation
            self._table.join(slot, worker.address, block_tokens)
        self._table.store(slot, hashes)

    def add_to(self, held: Mapping[str, int], hashes: Sequence[int]) -> dict[str, int]:
        """Return `held`, tokens by address, with the prompt's tokens that were sent."""
        sent = self._table.match(hashes)
        return {address: max(held.get(address, 0), sent.get(address, 0)) for address in {**held, **sent}}

    def clear(self) -> None:
        if self._known:
            self._table, self._known = PrefixTable(), {}


def expect_at_homes(
    held: Mapping[str, int], hashes: Sequence[int], block_tokens_of: Callable[[Worker], int], home_of: HomeOf
) -> dict[str, int]:
    """Return `held`, with the prefixes that other routers may have sent meanwhile: those longer than any known one, at their homes.

    Each power-of-two depth has a home: the worker that its last block hashes to. All routers compute the same homes, so a prefix that no
    router has sent yet goes there too. A conversation stays at its home until it is twice as long, and a prefix that all prompts share
    attracts them by no more than the prefill it saves.
    """
    expected, deepest = dict(held), max(held.values(), default=0)
    for level in range(len(hashes).bit_length()):
        depth = 1 << level
        home = home_of(hashes[depth - 1])
        if home is not None and (tokens := depth * block_tokens_of(home)) > deepest:
            expected[home.address] = tokens
    return expected
