"""The hidden states of one prompt on their way to one vector, chunk after chunk."""

import numpy as np

from fairlead_worker.messages import PoolingKind


class Pool:
    """What the states of a prompt of `length` tokens have come to so far. Each position counts once, however often it is computed."""

    __slots__ = ("_length", "_total", "kind", "taken")

    def __init__(self, kind: PoolingKind, length: int) -> None:
        self.kind = kind
        self.taken = 0
        """Leading positions that are in already; grows over retractions too."""
        self._length = length
        self._total: np.ndarray | None = None
        """[hidden] float32."""

    @property
    def reusable(self) -> int:
        """Leading tokens whose KV may come from the prefix cache: cached positions have no hidden states, and a mean wants those of all."""
        return self._length - 1 if self.kind == "last" else self.taken

    def wanted(self, start: int, end: int) -> range:
        """Of the positions computed now, from `start` to `end`, those whose states are to be summed."""
        return range(max(start, self._length - 1 if self.kind == "last" else self.taken), end)

    def add(self, states: np.ndarray, end: int) -> None:
        """The sum of what was wanted up to `end`: [hidden] float32."""
        self._total = states if self._total is None else self._total + states
        self.taken = end

    def vector(self) -> bytes:
        """[hidden] float32, once all positions are in."""
        assert self._total is not None and self.taken == self._length, "the whole prompt was computed"
        return (self._total if self.kind == "last" else self._total / np.float32(self._length)).tobytes()
