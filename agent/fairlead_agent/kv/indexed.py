"""What the index shows of this worker: blocks that the engine holds, and blocks that it will compute for a request. No I/O, no clock."""

from collections.abc import Sequence

from fairlead_agent.kv.blocks import Sink


class Promise:
    """The blocks of one request's prompt, parents first."""

    __slots__ = ("_blocks", "_hashes")

    def __init__(self, blocks: "IndexedBlocks", hashes: Sequence[int]) -> None:
        self._blocks, self._hashes = blocks, hashes

    def withdraw(self) -> None:
        """End the promise: of its blocks, the index keeps those that the engine holds or another request promises. Call it once."""
        self._blocks.withdraw(self, self._hashes)


class IndexedBlocks:
    """A `Sink` of the blocks that the engine holds. A block is shown while it is held or promised.

    Without promises a router learns of a prompt only when it is computed, and equal prompts that arrive meanwhile go to other engines.
    The held blocks are prefix-closed, and so are those of each promise.
    """

    def __init__(self, sink: Sink, max_promised: int) -> None:
        """`max_promised`: blocks that the engine can hold. More promised ones could not be held together."""
        self._sink, self._max_promised = sink, max_promised
        self._held: set[int] = set()
        self._promised: dict[int, int] = {}
        """Requests that promise each block."""
        self._open: set[Promise] = set()

    def store(self, hashes: list[int], parent: int) -> None:
        self._held.update(hashes)
        shown = 0
        while shown < len(hashes) and hashes[shown] in self._promised:
            parent = hashes[shown]
            shown += 1
        if shown < len(hashes):
            self._sink.store(hashes[shown:], parent)

    def remove(self, hashes: list[int]) -> None:
        self._held.difference_update(hashes)
        if gone := [value for value in hashes if value not in self._promised]:
            self._sink.remove(gone)

    def reset(self) -> None:
        """Withdraw everything at once, promises too: the engine has ended, or it is not known what it holds."""
        self._held.clear()
        self._promised.clear()
        self._open.clear()
        self._sink.reset()

    @property
    def promised(self) -> int:
        """Blocks that requests promise."""
        return len(self._promised)

    def count(self, hashes: Sequence[int]) -> int:
        """Return how many of the first blocks of a prompt are shown."""
        held, promised, count = self._held, self._promised, 0
        for value in hashes:
            if value not in held and value not in promised:
                break
            count += 1
        return count

    def promise(self, hashes: Sequence[int]) -> Promise | None:
        """Show the blocks of a prompt that the engine gets. Return None for a prompt without blocks, and while too many are promised."""
        if not len(hashes) or len(self._promised) + len(hashes) > self._max_promised:
            return None
        if fresh := list(hashes[(known := self.count(hashes)) :]):
            self._sink.store(fresh, hashes[known - 1] if known else 0)  # a root is no block of the index
        for value in hashes:
            self._promised[value] = self._promised.get(value, 0) + 1
        promise = Promise(self, hashes)
        self._open.add(promise)
        return promise

    def withdraw(self, promise: Promise, hashes: Sequence[int]) -> None:
        if promise not in self._open:
            return  # `reset` has withdrawn it
        self._open.remove(promise)
        gone = []
        for value in reversed(hashes):
            self._promised[value] -= 1
            if not self._promised[value]:
                del self._promised[value]
                if value not in self._held:
                    gone.append(value)
        if gone:
            self._sink.remove(gone)
