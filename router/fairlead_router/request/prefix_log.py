"""The block hashes of the latest prompts, for the web console's tree of prefixes. Hashes are keyed, so no text can be read from them."""

from array import array
from collections import deque
from collections.abc import Sequence
from typing import Final

MAX_PROMPTS: Final = 1000
MAX_BLOCKS: Final = 1 << 17
"""Hashes that are kept in all: 1 MiB."""
MAX_BLOCKS_OF_PROMPT: Final = 4096
"""Blocks that are kept of one prompt, its first ones: 65,536 tokens of 16 to a block. Longer prompts are cut."""


class PrefixLog:
    """The latest hash chains, bounded by their number and by their blocks. A busy tenant pushes out its own chains first."""

    def __init__(self) -> None:
        self._chains: dict[str, deque[array[int]]] = {}  # by tenant
        self._blocks: dict[str, int] = {}

    def record(self, tenant: str, hashes: Sequence[int]) -> None:
        """Store a prompt's block hashes, and drop the oldest ones beyond the bounds. A prompt without a full block is left out."""
        if not hashes:
            return
        chain = array("Q", hashes[:MAX_BLOCKS_OF_PROMPT])
        self._chains.setdefault(tenant, deque()).append(chain)
        self._blocks[tenant] = self._blocks.get(tenant, 0) + len(chain)
        while sum(self._blocks.values()) > MAX_BLOCKS:
            self._drop(max(self._blocks, key=self._blocks.__getitem__))
        while sum(map(len, self._chains.values())) > MAX_PROMPTS:
            self._drop(max(self._chains, key=lambda name: len(self._chains[name])))

    def chains(self, tenant: str | None) -> "list[array[int]]":
        """Return the hash chains, of each tenant the oldest first. `tenant`: only this tenant's; None: all."""
        chosen = self._chains.values() if tenant is None else [self._chains.get(tenant, ())]
        return [chain for chains in chosen for chain in chains]

    def _drop(self, tenant: str) -> None:
        self._blocks[tenant] -= len(self._chains[tenant].popleft())
