"""What the engine holds, by its KV events, under the index's hashes. No I/O, no clock."""

import logging
from collections.abc import Callable
from typing import Final, Protocol

from fairlead_agent.kv.events import Cleared, EngineHash, Event, Removed, Stored
from fairlead_index.hashing import extend, token_bytes, tokens_from_bytes

log = logging.getLogger(__name__)

WHOLE_PREFIX: Final = (None, "full_attention", "mla_attention", "sink_full_attention")
"""Kinds of layers that need the KV of the whole prefix. Sliding windows and states need less, and vLLM stores them as separate groups."""


class Sink(Protocol):
    """Where the claimed blocks go: the index."""

    def store(self, hashes: list[int], parent: int) -> None:
        """Claim a chain of blocks after `parent`."""

    def remove(self, hashes: list[int]) -> None:
        """Withdraw blocks, children before parents."""

    def reset(self) -> None:
        """Withdraw everything at once."""


class _Block:
    """One block of the engine. `copies`: how often each medium holds it; the engine may compute a block twice at the same time."""

    __slots__ = ("children", "claimed", "copies", "hash", "key", "parent", "tail")

    def __init__(self, key: EngineHash, parent: "_Block | None", hash: int | None, tail: bytes) -> None:
        self.key, self.parent = key, parent
        self.hash = hash
        """Index hash of the last whole index block up to this block's end, or the root; None: it cannot be computed from tokens."""
        self.tail = tail
        """Tokens since that index block's end: an index block may span several blocks of the engine."""
        self.copies: dict[str, int] = {}
        self.children: dict[EngineHash, _Block] = {}
        self.claimed = False


class EngineBlocks:
    """The engine's blocks as a forest. The index gets those whose whole prefix is held, because only they can be reused.

    `root_of(adapter, salt)`: root of a prompt's hashes. `block_tokens`: tokens of an index block, a multiple of the engine's.
    """

    def __init__(self, block_tokens: int, root_of: Callable[[str, str], int], sink: Sink) -> None:
        self._block_tokens, self._root_of, self._sink = block_tokens, root_of, sink
        self._blocks: dict[EngineHash, _Block] = {}
        self._group: int | None = None
        self._other_groups: set[int] = set()
        self.removed = 0
        """Blocks that the engine has evicted."""

    def __len__(self) -> int:
        """Return how many blocks the engine holds, as far as is known."""
        return sum(bool(block.copies) for block in self._blocks.values())

    def apply(self, events: list[Event]) -> None:
        """Apply events in their order."""
        for event in events:
            match event:
                case Stored():
                    self._store(event)
                case Removed():
                    self._remove(event)
                case Cleared():
                    self.forget()

    def forget(self) -> None:
        """Forget everything: the engine's cache is empty."""
        self._blocks.clear()
        self._sink.reset()

    def mark_uncertain(self) -> None:
        """Withdraw everything after lost events, and keep the blocks' names.

        A later event proves that its block's whole prefix is held, and this claims them again.
        """
        self._blocks = {key: block for key, block in self._blocks.items() if block.copies}
        for block in self._blocks.values():
            block.copies, block.claimed = {}, False
            block.children = {key: child for key, child in block.children.items() if key in self._blocks}
        self._sink.reset()

    def _store(self, event: Stored) -> None:
        if not self._is_followed(event.group, event.kind):
            return
        medium = event.medium or ""
        parent: _Block | None = None
        if event.tokens and event.parent is not None:
            parent = self._blocks.get(event.parent)
            if parent is None or not self._confirm_held(parent):
                return  # its prefix is unknown: the hashes cannot be computed
        size = event.block_size
        if event.tokens and len(event.tokens) != size * len(event.hashes):
            return  # blocks of layers that do not keep whole prefixes
        for index, key in enumerate(event.hashes):
            block = self._blocks.get(key)
            if block is None:
                tokens = event.tokens[index * size : (index + 1) * size]
                if not tokens:
                    return  # copied to another medium: only the first event of a block has its tokens
                block = self._add(key, parent, tokens, event, index)
            block.copies[medium] = block.copies.get(medium, 0) + 1
            if not block.claimed:
                self._claim(block)
            parent = block

    def _add(self, key: EngineHash, parent: _Block | None, tokens: list[int], event: Stored, index: int) -> _Block:
        extra = (event.extra_keys[index] if event.extra_keys and index < len(event.extra_keys) else None) or []
        others = [value for value in extra if value != event.lora_name]
        hash, tail = (parent.hash, parent.tail) if parent is not None else (None, b"")
        if parent is None:
            salt = others.pop() if others and isinstance(others[-1], str) else event.salt or ""
            if not event.lora_id or event.lora_name:
                hash = self._root_of(event.lora_name or "", salt)
        if others or hash is None:
            hash = None  # images and other inputs: their content is not among the tokens
        else:
            tail += token_bytes(tokens)
            if len(tail) == 4 * self._block_tokens:
                hash, tail = extend(hash, tokens_from_bytes(tail)), b""
        block = self._blocks[key] = _Block(key, parent, hash, tail)
        if parent is not None:
            parent.children[key] = block
        return block

    def _confirm_held(self, block: _Block) -> bool:
        """Record that a running request holds a block, and so its whole prefix. Return False if a part of the prefix is unknown."""
        chain: list[_Block] = []
        above: _Block | None = block
        while above is not None and not above.claimed:
            if self._blocks.get(above.key) is not above:
                return False
            chain.append(above)
            above = above.parent
        for each in reversed(chain):
            if not each.copies:
                each.copies = {"": 1}
            if not each.claimed:
                self._claim(each)
        return True

    def _claim(self, block: _Block) -> None:
        """Claim a block and its held descendants if its prefix is held."""
        stack = [block]
        while stack:
            each = stack.pop()
            above = each.parent
            if not each.copies or each.claimed or each.hash is None or (above is not None and not above.claimed):
                continue
            each.claimed = True
            if not each.tail:
                self._sink.store([each.hash], (above.hash or 0) if above is not None else 0)  # a root is no block of the index
            stack += each.children.values()

    def _remove(self, event: Removed) -> None:
        if event.group is not None and event.group in self._other_groups:
            return
        medium = event.medium or ""
        for key in event.hashes:
            block = self._blocks.get(key)
            if block is None:
                continue
            # A proven copy has no medium: which one removes it is not known, so the first removal counts.
            which = medium if medium in block.copies else "" if "" in block.copies else None
            if which is not None:
                left = block.copies[which] - 1
                if left:
                    block.copies[which] = left
                else:
                    del block.copies[which]
            if not block.copies:
                self.removed += 1
                self._withdraw(block)
                self._prune(block)

    def _withdraw(self, block: _Block) -> None:
        """Withdraw a block and its claimed descendants, children first."""
        if not block.claimed:
            return
        order, stack = [], [block]
        while stack:
            each = stack.pop()
            if each.claimed:
                each.claimed = False
                if not each.tail:
                    assert each.hash is not None
                    order.append(each.hash)
                stack += each.children.values()
        order.reverse()
        if order:
            self._sink.remove(order)

    def _prune(self, block: "_Block | None") -> None:
        """Drop blocks that are neither held nor needed for the names of others."""
        while block is not None and not block.copies and not block.children:
            self._blocks.pop(block.key, None)
            if block.parent is not None:
                block.parent.children.pop(block.key, None)
            block = block.parent

    def _is_followed(self, group: int | None, kind: str | None) -> bool:
        """Return whether events of this group are followed: the first that holds whole prefixes."""
        if group is None:
            return True
        if self._group is None and kind in WHOLE_PREFIX:
            self._group = group
        if group == self._group:
            return True
        if group not in self._other_groups:
            self._other_groups.add(group)
            log.warning("the model has KV of kind %s too: the index may claim prefixes of which the engine evicted that part", kind)
        return False
