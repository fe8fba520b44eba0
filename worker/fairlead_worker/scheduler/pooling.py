"""The hidden states of one prompt on their way to one vector, chunk after chunk. What is in the bytes, `execution/pooling.py` knows."""

from fairlead_worker.ipc.messages import PoolingKind


class Pool:
    """What the states of a prompt of `length` tokens have come to so far. Each position counts once, however often it is computed."""

    __slots__ = ("_length", "kind", "pooled", "sum")

    def __init__(self, kind: PoolingKind, length: int) -> None:
        self.kind = kind
        self.pooled = 0
        """Leading positions that are in already; grows over retractions too."""
        self.sum = b""
        """[hidden] float32; once all are in, the embedding."""
        self._length = length

    @property
    def reusable(self) -> int:
        """Leading tokens whose KV may come from the prefix cache: cached positions have no hidden states, and a mean wants those of all."""
        return self._length - 1 if self.kind == "last" else self.pooled

    def positions(self, start: int, end: int) -> range:
        """Of the positions computed now, from `start` to `end`, those whose states are to be summed."""
        return range(max(start, self._length - 1 if self.kind == "last" else self.pooled), end)

    def add(self, sum: bytes, end: int) -> None:
        """What was wanted up to `end` is in `sum`."""
        self.sum, self.pooled = sum, end

    def embedding(self) -> bytes:
        """[hidden] float32 of unit length."""
        assert self.pooled == self._length, "the whole prompt was computed"
        return self.sum
