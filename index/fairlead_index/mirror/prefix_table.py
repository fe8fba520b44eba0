"""Which live workers hold which prefix, in this process's memory: a match takes microseconds. No I/O, no clock.

An incarnation is one run of a worker; its slot is its numbered place in Redis. A block maps to a bitmask of the incarnations that hold it.
The table assigns the bits. It clears a bit from every mask before another incarnation gets it, so ending an incarnation clears one bit.
A distinct block takes about 90 bytes: a dict entry and its key. Blocks are spread over many dicts: growing one dict of millions takes a
good part of a second and would block the event loop.
"""

import struct
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from itertools import chain, islice
from sys import getsizeof
from typing import Final, Generic, NamedTuple, TypeVar

__all__ = ["PrefixTable"]

SWEEP_BLOCKS: Final = 2000
SAMPLE_BLOCKS: Final = 10_000  # a few milliseconds
CACHE_BYTES: Final = 1 << 20  # per cache below: a mask of 500 incarnations with their names takes 4 KB
MAX_LEVELS: Final = 8  # distinct depths in a choice: LEVELS in match.lua
ENTRY_BYTES: Final = 100  # of a dictionary, approximately
SHARDS: Final = 256  # by the lowest byte of the hash
LAST_SHARD: Final = SHARDS - 1


_Key = TypeVar("_Key")
_Value = TypeVar("_Value")


class _Cache(Generic[_Key, _Value]):
    """A dictionary that is cleared when it exceeds CACHE_BYTES."""

    def __init__(self) -> None:
        self._known: dict[_Key, _Value] = {}
        self._bytes = 0
        self.get = self._known.get

    def put(self, key: _Key, value: _Value, size: int) -> _Value:
        """Store a value of `size` bytes and return it."""
        self._bytes += size + ENTRY_BYTES
        if self._bytes > CACHE_BYTES:
            self.clear()
            self._bytes = size + ENTRY_BYTES
        self._known[key] = value
        return value

    def clear(self) -> None:
        self._known.clear()
        self._bytes = 0


class _Card(NamedTuple):
    """An incarnation's identity, block size and lease."""

    address: str
    block_tokens: int
    incarnation: str
    lease_ms: float


class PrefixTable:
    """Prefix-closed sets of blocks, one per incarnation. `slot`: its number in Redis, as 2 bytes."""

    def __init__(self) -> None:
        # By the block's lowest bits: block -> bits of its holders. Dead ones are included until swept.
        self._shards: list[dict[int, int]] = [{} for _ in range(SHARDS)]
        self._get = [shard.get for shard in self._shards]
        self._bit: dict[bytes, int] = {}  # slot -> bit, of incarnations that have not ended
        self._card: dict[int, _Card] = {}  # by bit
        self._bits_of: dict[str, int] = {}  # address -> bits of its incarnations
        self._joined = 0  # incarnations that have not ended
        self._alive = 0  # those under a lease: only they are returned
        self._dead = 0  # ended, but still in some masks
        self._sweeping: tuple[int, Iterator[int]] | None = None
        self._masks: _Cache[int, int] = _Cache()  # equal masks are one object
        self._holders: _Cache[tuple[int, int], dict[str, int]] = _Cache()  # depth, mask -> tokens by address

    def __len__(self) -> int:
        return sum(map(len, self._shards))

    @property
    def num_incarnations(self) -> int:
        return len(self._bit)

    def join(self, slot: bytes, address: str, block_tokens: int, incarnation: str = "", lease_ms: float = 0.0) -> None:
        """Add an incarnation, alive until `renew` ends its lease. It replaces an older one in the same slot."""
        self.end(slot)
        taken = self._joined | self._dead
        bit = ~taken & (taken + 1)  # the lowest free bit
        self._bit[slot] = bit
        self._card[bit] = _Card(address, block_tokens, incarnation, lease_ms)
        self._bits_of[address] = self._bits_of.get(address, 0) | bit
        self._joined |= bit
        self._alive |= bit
        self._holders.clear()

    def end(self, slot: bytes) -> None:
        """End an incarnation. Does nothing for an unknown slot."""
        bit = self._bit.pop(slot, 0)
        if bit:
            address = self._card.pop(bit).address
            self._bits_of[address] &= ~bit
            if not self._bits_of[address]:
                del self._bits_of[address]
            self._joined &= ~bit
            self._alive &= ~bit
            self._dead |= bit
            self._holders.clear()

    def renew(self, leases: bytes, now_ms: float, trusts: Callable[[str, str], bool] = lambda address, incarnation: True) -> None:
        """Update which incarnations are alive. `leases`: 8 bytes per slot, the end of its lease in milliseconds of Redis' clock.

        A lease that ends later than one lease from now comes from another clock and does not count, nor do untrusted incarnations.
        """
        alive = 0
        for slot, bit in self._bit.items():
            at, card = 8 * int.from_bytes(slot, "big"), self._card[bit]
            ends = struct.unpack_from("<d", leases, at)[0] if at + 8 <= len(leases) else 0.0
            if now_ms < ends <= now_ms + card.lease_ms and trusts(card.address, card.incarnation):
                alive |= bit
        self._alive = alive

    def store(self, slot: bytes, hashes: Iterable[int]) -> None:
        """Add blocks to an incarnation, parents before children. Blocks of an unknown slot are ignored."""
        bit = self._bit.get(slot)
        if bit is None:
            return
        shards, intern = self._shards, self._intern
        for value in hashes:
            holders = shards[value & LAST_SHARD]
            mask = holders.get(value)
            if mask is None:
                holders[value] = bit
            elif not mask & bit:
                holders[value] = intern(mask | bit)

    def remove(self, slot: bytes, hashes: Iterable[int]) -> None:
        """Remove blocks from an incarnation, children before parents."""
        bit = self._bit.get(slot, 0)
        for value in hashes:
            mask = self._get[value & LAST_SHARD](value, 0)
            if mask & bit:
                self._set_mask(value, mask & ~bit)

    def unique_shares(self) -> dict[str, float]:
        """Return, by address, the share of its blocks that no other live incarnation holds. Samples whole shards, which hashes fill evenly,
        until SAMPLE_BLOCKS blocks."""
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
        return {self._card[bit].address: alone[bit] / count for bit, count in held.items() if count}

    def match(self, hashes: Sequence[int]) -> dict[str, int]:
        """Return exactly how many prompt tokens each live worker holds, by address."""
        levels = self._levels(hashes)
        if not levels:
            return {}
        depth, mask = levels.pop()
        found = self._tokens_at(depth, mask).copy()
        if not levels:
            return found
        deeper: dict[str, int] = {}
        seen = 0
        for depth, mask in levels:
            for bit in _iterate_bits(mask & ~seen):
                card = self._card[bit]
                deeper.setdefault(card.address, depth * card.block_tokens)
            seen = mask
        found.update(deeper)
        return found

    def deepest(self, hashes: Sequence[int], limit: int, allowed: Container[str], included: Iterable[str] = ()) -> dict[str, int]:
        """Return the prompt tokens held by about `limit` of the deepest live workers in `allowed`, and by those in `included`."""
        found: dict[str, int] = {}
        included_bits = 0  # bits of `included`
        for address in included:
            included_bits |= self._bits_of.get(address, 0)
        levels, seen = self._levels(hashes, MAX_LEVELS), 0
        if levels:
            included_bits &= levels[-1][1]  # those without a block need no search
        for depth, mask in levels:
            fresh = mask & ~seen
            for bit in chain(_iterate_bits(fresh & included_bits), _iterate_bits(fresh & ~included_bits)):
                if len(found) >= limit and not bit & included_bits:
                    break
                card = self._card[bit]
                if bit & included_bits or card.address in allowed:
                    found[card.address] = depth * card.block_tokens
            seen = mask
            if len(found) >= limit and not included_bits & ~seen:
                break
        return found

    def _levels(self, hashes: Sequence[int], max_levels: int = 0) -> list[tuple[int, int]]:
        """Return (depth, mask of the holders of at least that depth), the deepest first. Holders of block n also hold block n - 1.

        `most`: after so many levels the rest count as holders of the first block; 0: no limit.
        """
        get, alive, end = self._get, self._alive, len(hashes)
        first = get[hashes[0] & LAST_SHARD](hashes[0], 0) & alive if end else 0
        if not first:
            return []
        if end == 1 or not get[hashes[1] & LAST_SHARD](hashes[1], 0) & alive:
            return [(1, first)]  # most prompts share only a first block with all others
        levels: list[tuple[int, int]] = []
        known = 0  # holders deeper than `end`
        while known != first:
            if len(levels) == max_levels and max_levels:
                levels.append((1, first))
                break
            low, at = 0, first  # search the deepest block with more holders than `known`; block 0 has more
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
        return levels

    def sweep(self, blocks: int = SWEEP_BLOCKS) -> bool:
        """Clear dead bits from up to `blocks` masks. Return whether more remain."""
        if self._sweeping is None:
            if not self._dead:
                return False
            self._sweeping = (self._dead, chain.from_iterable(map(list, self._shards)))  # each shard is copied when the sweep reaches it
        dead, left = self._sweeping
        for value in islice(left, blocks):
            mask = self._get[value & LAST_SHARD](value, 0)
            if mask & dead:
                self._set_mask(value, mask & ~dead)
            blocks -= 1
        if blocks > 0:
            self._dead &= ~dead
            self._sweeping = None
        return self._sweeping is not None or bool(self._dead)

    def _set_mask(self, value: int, mask: int) -> None:
        if mask & self._joined:
            self._shards[value & LAST_SHARD][value] = self._intern(mask)
        else:
            self._shards[value & LAST_SHARD].pop(value, None)

    def _intern(self, mask: int) -> int:
        known = self._masks.get(mask)
        return known if known is not None else self._masks.put(mask, mask, getsizeof(mask))

    def _tokens_at(self, depth: int, mask: int) -> dict[str, int]:
        """Return tokens by address for a mask of holders of `depth` blocks. Shared, read-only: a system prompt has many holders."""
        found = self._holders.get((depth, mask))
        if found is None:
            cards = [self._card[bit] for bit in _iterate_bits(mask)]
            found = {card.address: depth * card.block_tokens for card in cards}
            self._holders.put((depth, mask), found, getsizeof(found) + getsizeof(mask))
        return found


def _iterate_bits(mask: int) -> Iterator[int]:
    while mask:
        bit = mask & -mask
        yield bit
        mask ^= bit
