"""Which living workers hold which prefix, in this process's memory: a match in microseconds. No I/O, no clock.

A block maps to a bitmask of the lives that hold it. A life's bit is this table's own, and is cleaned out of every mask before another life
gets it, so the end of a life is one cleared bit, as in Redis. About 90 bytes a distinct block: a dict entry and its key. The blocks are
spread over many dicts: one dict of millions takes a good part of a second to grow, and the event loop would wait for it.
"""

import struct
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import Final

__all__ = ["PrefixTable"]

SWEEP_BLOCKS: Final = 2000
SAMPLE_BLOCKS: Final = 10_000  # a few milliseconds
SHARED_MASKS: Final = 65536
SHARDS: Final = 256  # by the lowest byte of the hash
LAST_SHARD: Final = SHARDS - 1


class PrefixTable:
    """Prefix-closed sets of blocks, one for each life of a worker. `slot` is the life's name in Redis: 2 bytes."""

    def __init__(self) -> None:
        # By the block's lowest bits: block -> bits of its lives, dead ones among them until they are swept.
        self._shards: list[dict[int, int]] = [{} for _ in range(SHARDS)]
        self._get = [shard.get for shard in self._shards]
        self._bit: dict[bytes, int] = {}  # slot -> bit, of lives that have not ended
        self._card: dict[int, tuple[str, int]] = {}  # bit -> address, block tokens
        self._joined = 0  # lives that have not ended
        self._alive = 0  # those under a lease: only they are named
        self._dead = 0  # ended, and still in some masks
        self._sweeping: tuple[int, Iterator[int]] | None = None
        self._masks: dict[int, int] = {}  # equal masks are one object
        self._groups: dict[int, list[tuple[int, list[str]]]] = {}  # mask -> block tokens and addresses
        self._same: dict[tuple[int, int], dict[str, int]] = {}  # depth, mask -> tokens by address

    def __len__(self) -> int:
        return sum(map(len, self._shards))

    @property
    def lives(self) -> int:
        return len(self._bit)

    def join(self, slot: bytes, address: str, block_tokens: int) -> None:
        """A new life, under a lease until `renew` says otherwise. An older one under the same slot is over."""
        self.end(slot)
        taken = self._joined | self._dead
        bit = ~taken & (taken + 1)  # the lowest that nobody has
        self._bit[slot] = bit
        self._card[bit] = (address, block_tokens)
        self._joined |= bit
        self._alive |= bit
        self._forget_names()

    def end(self, slot: bytes) -> None:
        """The end of a life; nothing happens to one that is unknown."""
        bit = self._bit.pop(slot, 0)
        if bit:
            del self._card[bit]
            self._joined &= ~bit
            self._alive &= ~bit
            self._dead |= bit
            self._forget_names()

    def renew(self, leases: bytes, now_ms: float, longest_ms: float) -> None:
        """Who lives: `leases` are 8 bytes a slot at its number, the end of its lease in milliseconds of Redis' clock.

        One that ends more than the longest lease from now was written by another clock, and one below zero is in doubt: neither counts.
        """
        alive, last = 0, now_ms + longest_ms
        for slot, bit in self._bit.items():
            at = 8 * int.from_bytes(slot, "big")
            if at + 8 <= len(leases) and now_ms < struct.unpack_from("<d", leases, at)[0] <= last:
                alive |= bit
        self._alive = alive

    def stored(self, slot: bytes, hashes: Iterable[int]) -> None:
        """Blocks that a life holds from now on, parents before children. An unknown slot's are left out."""
        bit = self._bit.get(slot)
        if bit is None:
            return
        shards, share = self._shards, self._share
        for value in hashes:
            holders = shards[value & LAST_SHARD]
            mask = holders.get(value)
            if mask is None:
                holders[value] = bit
            elif not mask & bit:
                holders[value] = share(mask | bit)

    def removed(self, slot: bytes, hashes: Iterable[int]) -> None:
        """Blocks that a life no longer holds, children before parents."""
        bit = self._bit.get(slot, 0)
        for value in hashes:
            mask = self._get[value & LAST_SHARD](value, 0)
            if mask & bit:
                self._keep(value, mask & ~bit)

    def held_alone(self) -> dict[str, float]:
        """Of the blocks of each living life, by address, the share that no other living one holds: from whole shards, which hashes fill
        evenly, until SAMPLE_BLOCKS were seen."""
        alive, seen = self._alive, 0
        held = {bit: 0 for bit in self._bit.values() if bit & alive}
        alone = dict(held)
        for shard in self._shards:
            for mask in shard.values():
                living = left = mask & alive
                while left:
                    bit = left & -left
                    held[bit] += 1
                    left ^= bit
                if living and not living & (living - 1):
                    alone[living] += 1
            seen += len(shard)
            if seen >= SAMPLE_BLOCKS:
                break
        return {self._card[bit][0]: alone[bit] / count for bit, count in held.items() if count}

    def match(self, hashes: Sequence[int]) -> dict[str, int]:
        """Tokens of the prompt that each living worker holds, exactly. The holders of block n are among those of block n - 1."""
        if not hashes:
            return {}
        get, alive = self._get, self._alive
        value = hashes[0]
        first = get[value & LAST_SHARD](value, 0) & alive
        if not first:
            return {}
        if len(hashes) == 1 or not get[hashes[1] & LAST_SHARD](hashes[1], 0) & alive:
            return self._all_at(1, first).copy()  # most prompts share a first block with everybody, and no more
        levels: list[tuple[int, int]] = []  # depth and who holds at least that much, the deepest first
        known, end = 0, len(hashes)  # holders deeper than `end`
        while known != first:
            low, at = 0, first  # the deepest block with more holders than `known`: the first one has them
            while end - low > 1:
                middle = (low + end) // 2
                value = hashes[middle]
                mask = get[value & LAST_SHARD](value, 0) & alive
                if mask != known:
                    low, at = middle, mask
                else:
                    end = middle
            levels.append((low + 1, at))
            known, end = at, low
        found = self._all_at(*levels.pop()).copy()
        for depth, mask in reversed(levels):
            for block_tokens, addresses in self._named(mask):
                for address in addresses:
                    found[address] = depth * block_tokens
        return found

    def sweep(self, blocks: int = SWEEP_BLOCKS) -> bool:
        """A bounded piece of cleaning dead bits out of the masks. Returns whether there is more to do."""
        if self._sweeping is None:
            if not self._dead:
                return False
            self._sweeping = (self._dead, chain.from_iterable(map(list, self._shards)))  # of a shard as it is when its turn comes
        dead, left = self._sweeping
        for value in islice(left, blocks):
            mask = self._get[value & LAST_SHARD](value, 0)
            if mask & dead:
                self._keep(value, mask & ~dead)
            blocks -= 1
        if blocks > 0:
            self._dead &= ~dead
            self._sweeping = None
        return self._sweeping is not None or bool(self._dead)

    def _keep(self, value: int, mask: int) -> None:
        if mask & self._joined:
            self._shards[value & LAST_SHARD][value] = self._share(mask)
        else:
            self._shards[value & LAST_SHARD].pop(value, None)

    def _forget_names(self) -> None:
        self._groups.clear()
        self._same.clear()

    def _share(self, mask: int) -> int:
        if len(self._masks) > SHARED_MASKS:
            self._masks.clear()
        return self._masks.setdefault(mask, mask)

    def _all_at(self, depth: int, mask: int) -> dict[str, int]:
        """What those of the mask hold, each `depth` blocks. Not to be changed: the first block of a system prompt has many holders."""
        found = self._same.get((depth, mask))
        if found is None:
            if len(self._same) > SHARED_MASKS // 64:
                self._same.clear()
            found = {address: depth * block_tokens for block_tokens, addresses in self._named(mask) for address in addresses}
            self._same[depth, mask] = found
        return found

    def _named(self, mask: int) -> list[tuple[int, list[str]]]:
        group = self._groups.get(mask)
        if group is None:
            if len(self._groups) > SHARED_MASKS:
                self._groups.clear()
            by_size: dict[int, list[str]] = {}
            for bit in _bits(mask):
                address, block_tokens = self._card[bit]
                by_size.setdefault(block_tokens, []).append(address)
            group = self._groups[mask] = list(by_size.items())
        return group


def _bits(mask: int) -> Iterator[int]:
    while mask:
        bit = mask & -mask
        yield bit
        mask ^= bit
