"""The block hashes of the latest prompts, for the web console's tree of prefixes. Hashes are keyed, so no text can be read from them."""

from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Final

MAX_PROMPTS: Final = 1000
MAX_BLOCKS: Final = 1 << 17
"""Hashes that are kept in all: 1 MiB."""
MAX_BLOCKS_OF_PROMPT: Final = 4096
"""Blocks that are kept of one prompt, its first ones: 65,536 tokens of 16 to a block. Longer prompts are cut."""


class PrefixLog:
    """A ring of hash chains, bounded by their number and by their blocks."""

    def __init__(self) -> None:
        self._chains: deque[tuple[str, array[int]]] = deque()
        self._blocks = 0

    def record(self, tenant: str, hashes: Sequence[int]) -> None:
        """Store a prompt's block hashes, and drop the oldest ones beyond the bounds. A prompt without a full block is left out."""
        if not hashes:
            return
        chain = array("Q", hashes[:MAX_BLOCKS_OF_PROMPT])
        self._chains.append((tenant, chain))
        self._blocks += len(chain)
        while len(self._chains) > MAX_PROMPTS or self._blocks > MAX_BLOCKS:
            self._blocks -= len(self._chains.popleft()[1])

    def chains(self, tenant: str | None) -> "Iterator[array[int]]":
        """Yield the hash chains, the oldest first. `tenant`: only this tenant's; None: all."""
        return (chain for owner, chain in self._chains if tenant is None or owner == tenant)
