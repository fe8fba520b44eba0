"""States of recurrent layers: their storage in slots, and a planned step over it.

A layer says how it advances rows of one length, [rows, tokens, ...]; the step says which rows these are and where their states come from
and go. Rows of one length run together: all decodes, and each chunk. A row with a snapshot inside is cut there.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import torch
from msgspec.structs import replace

from fairlead_worker.cache.states import FURTHER_SLOTS, PREVIOUS, ZEROS, RowState, StateSlots
from fairlead_worker.kernels.base import Backend, KVSpec, PackedStep, StepContext, make_zeros
from fairlead_worker.kernels.transfer import to_device

TOKENS = 1 << 22
"""Most tokens that are counted where there is no KV: the tree's nodes for them take about 130 MB."""
NO_STATE = RowState(ZEROS, ZEROS)
"""Of a row that starts from zeros and keeps nothing."""


@dataclass(frozen=True, slots=True)
class StateSpec:
    """What one recurrent layer keeps of a request: tensors of these shapes."""

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]

    @property
    def bytes(self) -> int:
        return sum(torch.Size(shape).numel() * dtype.itemsize for shape, dtype in zip(self.shapes, self.dtypes, strict=True))


class Recurrent(Protocol):
    """A recurrent layer, or a part of one."""

    @property
    def index(self) -> int:
        """Return its place among the states of the model."""
        ...

    @property
    def state(self) -> StateSpec: ...

    def advance(self, inputs: Sequence[torch.Tensor], states: Sequence[torch.Tensor]) -> tuple[torch.Tensor, Sequence[torch.Tensor]]:
        """Return the outputs [B, L, ...] and the states after L tokens of B rows.

        inputs: each [B, L, ...]. states: each [B, ...], those before the first token, which stay as they are.
        """
        ...


class RecurrentContext(StepContext, Protocol):
    """One planned step, as the layers of a model with recurrent layers see it."""

    def scan(self, layer: Recurrent, *inputs: torch.Tensor) -> torch.Tensor:
        """Advance the layer's states over the tokens of every row; return outputs [T, ...]. inputs: each [T, ...]."""
        ...


@dataclass(frozen=True, slots=True)
class Group:
    """B rows, or parts of rows, of L tokens each."""

    tokens: torch.Tensor | None
    """[B * L] int64: their tokens in the packed step; None: all of them, in order."""
    rows: int
    sources: torch.Tensor
    """[B] int64: slots."""
    kept: torch.Tensor
    """[n] int64: the rows whose states are kept."""
    targets: torch.Tensor
    """[n] int64: their slots."""


@dataclass(frozen=True, slots=True)
class _Part:
    """A row, or its part up to a snapshot."""

    begin: int
    """Index of its first token in the packed step."""
    count: int
    source: int
    targets: tuple[int, ...]


class StateStore:
    """The states of all recurrent layers in `slots.total` slots, one that stays zero, and one for the padding of CUDA graphs."""

    def __init__(self, specs: Sequence[StateSpec], slots: StateSlots, device: torch.device) -> None:
        self.slots, self.device = slots, device
        self.zeros, self.padding = slots.total, slots.total + 1
        count = slots.total + FURTHER_SLOTS
        self.layers = [
            [make_zeros(count, *shape, dtype=dtype, device=device) for shape, dtype in zip(spec.shapes, spec.dtypes, strict=True)]
            for spec in specs
        ]


def plan_waves(step: PackedStep, zeros: int) -> list[list[Group]]:
    """Return the groups that run one after the other: the first parts of all rows, then the second ones, and so on.

    zeros: the slot to start from where there is no state.
    """
    states = [state or NO_STATE for state in step.states] or [NO_STATE] * len(step.counts)
    if all(count == 1 for count in step.counts) and not any(state.snapshots or state.source == PREVIOUS for state in states):
        return [[_decodes(states, zeros, step.tokens.device)]]
    waves: list[dict[int, list[_Part]]] = []
    last = slot = ZEROS  # of the row before: its last wave and its slot
    for begin, count, state in zip(accumulate(step.counts, initial=0), step.counts, states, strict=False):
        continues = state.source == PREVIOUS
        parts = _cut(begin, count, replace(state, source=slot) if continues else state)
        first = last + 1 if continues else 0
        last, slot = first + len(parts) - 1, state.slot
        for number, part in enumerate(parts, first):
            if number == len(waves):
                waves.append({})
            waves[number].setdefault(part.count, []).append(part)
    total, device = sum(step.counts), step.tokens.device
    return [[_group(count, parts, total, zeros, device) for count, parts in wave.items()] for wave in waves]


def _decodes(states: Sequence[RowState], zeros: int, device: torch.device) -> Group:
    """Return all rows of a step with one token each and without snapshots, which most steps are."""
    sources = [zeros if state.source == ZEROS else state.source for state in states]
    kept = [row for row, state in enumerate(states) if state.slot != ZEROS]
    targets = [states[row].slot for row in kept]
    return Group(None, len(states), to_device(sources, device), to_device(kept, device), to_device(targets, device))


def _cut(begin: int, count: int, state: RowState) -> list[_Part]:
    """Return the parts of a row: each starts from what the one before it keeps."""
    parts, at, source = list[_Part](), 0, state.source
    for place, slot in state.snapshots:
        if place < count:
            parts.append(_Part(begin + at, place - at, source, (slot,)))
            at, source = place, slot
    ends = tuple(slot for place, slot in state.snapshots if place == count)
    own = () if state.slot == ZEROS else (state.slot,)
    return [*parts, _Part(begin + at, count - at, source, (*own, *ends))]


def _group(count: int, parts: Sequence[_Part], total: int, zeros: int, device: torch.device) -> Group:
    pairs = [(row, slot) for row, part in enumerate(parts) for slot in part.targets]
    is_whole = count * len(parts) == total  # rows of one length are in the step's order
    tokens = None if is_whole else to_device([token for part in parts for token in range(part.begin, part.begin + count)], device)
    return Group(
        tokens,
        len(parts),
        to_device([zeros if part.source == ZEROS else part.source for part in parts], device),
        to_device([row for row, _ in pairs], device),
        to_device([slot for _, slot in pairs], device),
    )


class RecurrentStep:
    """A planned step of a backend with the states of its rows. Implements `RecurrentContext`."""

    def __init__(self, attention: StepContext, step: PackedStep, store: StateStore | None) -> None:
        """`store`: None: all rows start from zeros, and nothing is kept."""
        self._attention, self._store = attention, store
        self._waves = plan_waves(step, 0 if store is None else store.zeros)

    def attend(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return self._attention.attend(layer, query, key, value)

    def scan(self, layer: Recurrent, *inputs: torch.Tensor) -> torch.Tensor:
        parts = None if self._store is None else self._store.layers[layer.index]
        output: torch.Tensor | None = None
        for wave in self._waves:
            # All groups read before one of them writes: a slot may belong to another row from this step on.
            before = [zero_states(layer, group.rows, inputs[0]) if parts is None else _read(parts, group.sources) for group in wave]
            for group, states in zip(wave, before, strict=True):
                own = inputs if group.tokens is None else [part.index_select(0, group.tokens) for part in inputs]
                answer, after = layer.advance([torch.unflatten(part, 0, (group.rows, -1)) for part in own], states)
                if parts is not None and len(group.targets):
                    for part, state in zip(parts, after, strict=True):
                        part.index_copy_(0, group.targets, state.index_select(0, group.kept).to(part.dtype))
                answer = answer.flatten(0, 1)
                if group.tokens is None:
                    return answer
                if output is None:
                    output = answer.new_empty(len(inputs[0]), *answer.shape[1:])
                output.index_copy_(0, group.tokens, answer)
        assert output is not None, "a step has rows"
        return output


def _read(parts: Sequence[torch.Tensor], slots: torch.Tensor) -> list[torch.Tensor]:
    return [part.index_select(0, slots) for part in parts]


def zero_states(layer: Recurrent, rows: int, like: torch.Tensor) -> list[torch.Tensor]:
    """Return the states before the first token of so many rows, on the device of `like`."""
    spec = layer.state
    return [like.new_zeros(rows, *shape, dtype=dtype) for shape, dtype in zip(spec.shapes, spec.dtypes, strict=True)]


class StatefulBackend:
    """An attention backend with the states of recurrent layers. Implements `Backend`."""

    def __init__(self, attention: Backend, store: StateStore) -> None:
        self.attention, self.store = attention, store
        self.name, self.spec, self.pages = attention.name, attention.spec, attention.pages

    def plan(self, step: PackedStep) -> RecurrentStep:
        return RecurrentStep(self.attention.plan(step), step, self.store)

    def read_pages(self, pages: torch.Tensor) -> torch.Tensor:
        return self.attention.read_pages(pages)

    def write_pages(self, pages: torch.Tensor, content: torch.Tensor) -> None:
        self.attention.write_pages(pages, content)


def count_slots(specs: Sequence[StateSpec], spec: KVSpec, running: int, snapshots: int, room: int) -> StateSlots:
    """Return how many slots there are.

    States get half of `room` bytes, all of it if there is no KV. running: requests that the configuration lets run at once. snapshots: as
    set; 0: running requests get at most half of the slots. room: for KV and states; 0: not known, then there are as many snapshots as set
    or as running requests. Raises ValueError if there is room for no request.
    """
    each = sum(state.bytes for state in specs)
    if not room:
        return StateSlots(running, running + (snapshots or running), each)
    share = room // 2 if spec.page_bytes else room
    slots = share // each - FURTHER_SLOTS
    if slots <= (least := snapshots or 1):
        raise ValueError(
            f"no memory for recurrent states: those of one request take {each} bytes, there must be room for {least + 1 + FURTHER_SLOTS} "
            f"of them, one of zeros and one of padding, and there are {share} bytes; raise --kv-cache-memory-bytes (--mem-fraction-static "
            "on a GPU), lower --limits state_snapshots, or free memory"
        )
    if snapshots:
        running = min(running, slots - snapshots)
        return StateSlots(running, running + snapshots, each)
    running = min(running, slots // 2)
    most = room // 2 // spec.page_bytes if spec.page_bytes else TOKENS // spec.page_size  # one for each page
    return StateSlots(running, min(slots, running + max(most, running)), each)


def count_token_pages(max_model_len: int, page_size: int, running: int) -> int:
    """Return the pages of a model without KV, which only count tokens: enough for all running requests, at most `TOKENS` or one request."""
    longest = -(-max_model_len // page_size)
    return max(longest, min(longest * running, TOKENS // page_size))


def describe_states(spec: KVSpec, slots: StateSlots) -> str:
    """Return what a model with recurrent layers keeps, for the status."""
    return (
        f"{'1 group of layers with attention' if spec.layers else 'no KV'}; states of recurrent layers, {slots.bytes} bytes in "
        f"each of {slots.total} slots: for at most {slots.running} running requests, and for snapshots"
    )
