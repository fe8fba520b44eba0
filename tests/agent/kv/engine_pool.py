"""A model of an engine's block pool that reports KV events as vLLM does: least recently used eviction, and no deduplication."""

import random
from collections import OrderedDict
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

from fairlead_index.hashing import block_hashes, chain_root

BLOCK = 4


def root_of(adapter: str, salt: str) -> int:
    return chain_root("model", "tokenizer", BLOCK, adapter, salt)


@dataclass
class Pool:
    """`size` blocks. Each has a number; several may hold the same content."""

    size: int
    seed: int = 0
    events: list[dict[str, Any]] = field(default_factory=list)
    _content: dict[int, bytes] = field(default_factory=dict)
    _free: "OrderedDict[int, None]" = field(default_factory=OrderedDict)
    _of_content: dict[bytes, list[int]] = field(default_factory=dict)
    _index_hash: dict[bytes, int] = field(default_factory=dict)
    _parent: dict[bytes, bytes | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._free = OrderedDict.fromkeys(range(self.size))

    def start(self, tokens: list[int], adapter: str = "", salt: str = "") -> list[int]:
        """Run a prompt: reuse its cached prefix, and compute the rest. Return its blocks, which `finish` frees. The prompt must fit."""
        names = self._names(tokens, adapter, salt)
        used: list[int] = []
        for name in names:
            if not (held := self._of_content.get(name)):
                break
            used.append(held[0])
        for block in used:
            self._free.pop(block, None)
        cached = len(used)
        for _ in names[cached:]:
            used.append(self._take())
        for name, block in zip(names[cached:], used[cached:], strict=True):
            self._content[block] = name
            self._of_content.setdefault(name, []).append(block)
        if cached < len(names):
            extra: list[list[str] | None] = [[adapter] if adapter else None for _ in names]
            if salt:
                extra[0] = [*(extra[0] or []), salt]
            self.events.append(
                {
                    "type": "BlockStored",
                    "block_hashes": names[cached:],
                    "parent_block_hash": names[cached - 1] if cached else None,
                    "token_ids": tokens[cached * BLOCK : len(names) * BLOCK],
                    "block_size": BLOCK,
                    "lora_id": 1 if adapter else None,
                    "medium": "GPU",
                    "lora_name": adapter or None,
                    "extra_keys": extra[cached:],
                    "group_idx": 0,
                }
            )
        return used

    def finish(self, blocks: list[int]) -> None:
        """Free the blocks of a request, its last one first: that is evicted first."""
        for block in reversed(blocks):
            self._free[block] = None
            self._free.move_to_end(block)

    def clear(self) -> None:
        """Drop the whole cache."""
        self._content.clear()
        self._of_content.clear()
        self.events.append({"type": "AllBlocksCleared"})

    def take_events(self) -> list[dict[str, Any]]:
        taken, self.events = self.events, []
        return taken

    @property
    def usable(self) -> set[int]:
        """Index hashes of the blocks whose whole prefix is cached: what a new prompt could reuse."""
        held = {name for name, blocks in self._of_content.items() if blocks}

        def is_usable(name: bytes | None) -> bool:
            while name is not None:
                if name not in held:
                    return False
                name = self._parent[name]
            return True

        return {self._index_hash[name] for name in held if is_usable(name)}

    def chains(self) -> dict[int, list[int]]:
        """Return each block that was ever computed, with the hashes of its whole prefix."""
        found: dict[int, list[int]] = {}
        for name, value in self._index_hash.items():
            above = self._parent[name]
            found[value] = [*(found[self._index_hash[above]] if above is not None else []), value]
        return found

    def cached_blocks(self, tokens: list[int], adapter: str = "", salt: str = "") -> int:
        names = self._names(tokens, adapter, salt)
        return next((index for index, name in enumerate(names) if not self._of_content.get(name)), len(names))

    def _take(self) -> int:
        block, _ = self._free.popitem(last=False)
        name = self._content.pop(block, None)
        if name is not None:
            self._of_content[name].remove(block)
            self.events.append({"type": "BlockRemoved", "block_hashes": [name], "medium": "GPU", "group_idx": 0})
        return block

    def _names(self, tokens: list[int], adapter: str, salt: str) -> list[bytes]:
        names: list[bytes] = []
        above: bytes | None = None
        hashes = block_hashes(root_of(adapter, salt), tokens, BLOCK)
        for index in range(len(tokens) // BLOCK):
            state = blake2b(repr((self.seed, above, tokens[index * BLOCK : (index + 1) * BLOCK], adapter, salt)).encode(), digest_size=16)
            self._parent[state.digest()], above = above, state.digest()
            self._index_hash[above] = hashes[index]
            names.append(above)
        return names


class Traffic:
    """Random prompts with shared prefixes, conversations, adapters and salts."""

    def __init__(self, pool: Pool, seed: int) -> None:
        self.pool, self._draw = pool, random.Random(seed)
        self._prompts: list[tuple[list[int], str, str]] = []
        self._running: list[list[int]] = []

    def step(self) -> None:
        """Start or finish one request, so that several run at a time."""
        draw = self._draw
        if self._running and (len(self._running) > 3 or draw.random() < 0.4):
            self.pool.finish(self._running.pop(draw.randrange(len(self._running))))
            return
        if self._prompts and draw.random() < 0.7:
            tokens, adapter, salt = draw.choice(self._prompts)
            tokens = tokens[: draw.randrange(BLOCK, len(tokens) + 1)] + [draw.randrange(1000) for _ in range(draw.randrange(3 * BLOCK))]
        else:
            tokens = [draw.randrange(1000) for _ in range(draw.randrange(BLOCK, 6 * BLOCK))]
            adapter, salt = draw.choice(["", "", "sql", "chat"]), draw.choice(["", "", "a" * 32, "b" * 32])
        tokens = tokens[: self.pool.size // 5 * BLOCK]
        self._prompts = [*self._prompts[-30:], (tokens, adapter, salt)]
        self._running.append(self.pool.start(tokens, adapter, salt))
