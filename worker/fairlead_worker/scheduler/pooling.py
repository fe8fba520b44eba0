"""The pooled hidden states of one prompt, summed chunk by chunk. `execution/pooling.py` computes the sums."""

from typing import Literal

from fairlead_worker.ipc.messages import PoolingKind


class Pool:
    """The sum so far. Each position counts once, even if it is computed again after a preemption."""

    __slots__ = ("_length", "kind", "pooled", "sum")

    def __init__(self, kind: PoolingKind | Literal["classify"], length: int) -> None:
        """`length`: tokens of the prompt."""
        self.kind = kind
        self.pooled = 0
        """Leading positions that are pooled already."""
        self.sum = b""
        """[hidden] float32. The embedding, once the whole prompt is pooled."""
        self._length = length

    @property
    def reusable(self) -> int:
        """Leading tokens whose KV may come from the prefix cache. Cached positions have no hidden states, and a mean needs those of all."""
        return self._length - 1 if self.kind == "last" else self.pooled

    def positions(self, start: int, end: int) -> range:
        """Return the positions in `start` to `end` whose hidden states are summed."""
        return range(max(start, self._length - 1 if self.kind == "last" else self.pooled), end)

    def add(self, sum: bytes, end: int) -> None:
        """Store a new sum, which includes the positions up to `end`."""
        self.sum, self.pooled = sum, end

    def embedding(self) -> bytes:
        """Return the embedding, [hidden] float32 of unit length."""
        assert self.pooled == self._length, "the whole prompt was computed"
        return self.sum
