"""A cache of the token ids of text parts, bounded in bytes. Repeated parts of a growing conversation cost one look-up.

The key is the text itself, not a digest, so that two texts cannot collide, by chance or by attack.
"""

import sys
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from threading import Lock
from typing import Final, NamedTuple

ENTRY_OVERHEAD: Final = 176
"""Bytes of an entry besides text and ids: the key and the dictionary's slot (measured: 170)."""
LARGEST_SHARE: Final = 8
"""An entry larger than the cache divided by this is not kept, so that one document cannot evict every conversation."""


class Key(NamedTuple):
    tokenizer: str
    """Digest of the tokenizer."""
    scope: str
    """The tenant's salt. Hits are faster and reveal that a text was seen before, so tenants do not share entries."""
    text: str


class TokenCache:
    """Thread-safe LRU cache. One lock is taken for all parts of a text. With 0 bytes it keeps nothing."""

    def __init__(self, max_bytes: int = 64 << 20) -> None:
        self.max_bytes = max_bytes
        self.bytes = 0
        self.hit_tokens = 0
        """Tokens that were not computed again."""
        self.missed_tokens = 0
        self._entries: OrderedDict[Key, array[int]] = OrderedDict()
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, keys: Sequence[Key]) -> "list[array[int] | None]":
        """Return the token ids of each text, None where they are not cached. The arrays are shared: do not change them."""
        found = []
        with self._lock:
            for key in keys:
                ids = self._entries.get(key)
                if ids is not None:
                    self._entries.move_to_end(key)
                    self.hit_tokens += len(ids)
                found.append(ids)
        return found

    def put(self, key: Key, ids: "array[int]") -> None:
        """Keep the token ids of a text."""
        size = _size(key, ids)
        with self._lock:
            self.missed_tokens += len(ids)
            if size > self.max_bytes // LARGEST_SHARE or key in self._entries:
                return
            self._entries[key] = ids
            self.bytes += size
            while self.bytes > self.max_bytes:
                oldest, dropped = self._entries.popitem(last=False)
                self.bytes -= _size(oldest, dropped)

    def count(self, hit_tokens: int, missed_tokens: int) -> None:
        """Add what a cache of another process found and missed."""
        with self._lock:
            self.hit_tokens += hit_tokens
            self.missed_tokens += missed_tokens


def _size(key: Key, ids: "array[int]") -> int:
    return ENTRY_OVERHEAD + sys.getsizeof(key.text) + sys.getsizeof(ids)
