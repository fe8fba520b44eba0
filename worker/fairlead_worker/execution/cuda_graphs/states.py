"""Recurrent states in a graph of decodes: the slots of its rows are static tensors, and padding rows have a slot of their own.

A graph reads and writes one slot for each row. Snapshots are copied after its replay: few rows of a step take one, and a second write in
the graph would move all states again (Qwen3-Next 80B: 77 MB a row).
"""

from collections.abc import Sequence

import torch

from fairlead_worker.cache.states import ZEROS
from fairlead_worker.kernels.base import PackedStep
from fairlead_worker.kernels.states import NO_STATE, Recurrent, StateStore
from fairlead_worker.kernels.transfer import to_device


class GraphStates:
    """The slots of a graph's rows."""

    def __init__(self, store: StateStore, size: int) -> None:
        self._store, self._size = store, size
        self._sources = torch.full((size,), store.zeros, dtype=torch.int64, device=store.device)
        self._targets = torch.full((size,), store.padding, dtype=torch.int64, device=store.device)

    def fill(self, step: PackedStep) -> None:
        """Copy the slots of a step's rows to where the graph reads them; `step` may have fewer rows than the graph."""
        states = [state or NO_STATE for state in step.states]
        states += [NO_STATE] * (self._size - len(states))
        zeros, padding, device = self._store.zeros, self._store.padding, self._store.device
        self._sources.copy_(to_device([zeros if state.source == ZEROS else state.source for state in states], device))
        self._targets.copy_(to_device([padding if state.slot == ZEROS else state.slot for state in states], device))

    def scan(self, layer: Recurrent, *inputs: torch.Tensor) -> torch.Tensor:
        """Advance the states of every row by its token."""
        parts = self._store.layers[layer.index]
        before = [part.index_select(0, self._sources) for part in parts]
        answer, after = layer.advance([part[:, None] for part in inputs], before)
        for part, state in zip(parts, after, strict=True):
            part.index_copy_(0, self._targets, state.to(part.dtype))
        return answer.flatten(0, 1)

    def copy_snapshots(self, step: PackedStep) -> None:
        """Copy the states of rows that take a snapshot after their token, once the step has run."""
        pairs = [(state.slot, slot) for state in step.states if state is not None for _, slot in state.snapshots]
        if not pairs:
            return
        own, taken = (to_device(slots, self._store.device) for slots in _columns(pairs))
        for parts in self._store.layers:
            for part in parts:
                part.index_copy_(0, taken, part.index_select(0, own))


def _columns(pairs: Sequence[tuple[int, int]]) -> tuple[list[int], list[int]]:
    return [own for own, _ in pairs], [taken for _, taken in pairs]
