"""Attention backend interface: a backend owns the KV pages and computes attention for one packed, mixed step.

The runner packs a step, `Backend.plan` prepares it once, and every layer of the model calls `StepContext.attend`. A step uses no global
state: its context travels through the model as a keyword argument.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
import torch

from fairlead_worker.native.memory import LINE

if TYPE_CHECKING:  # the stage that compiles kernels has no cache
    from fairlead_worker.cache.states import RowState

FLOAT8 = torch.float8_e4m3fn
"""Dtype of KV in 8 bits (vLLM's `fp8`)."""


def make_zeros(*shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return zeros for KV, aligned to a cache line.

    On a CPU the operating system provides them lazily and memory is taken on the first write; `torch.zeros` takes all of it immediately.
    """
    if device.type != "cpu":
        return torch.zeros(*shape, dtype=dtype, device=device)
    size = math.prod(shape) * dtype.itemsize
    room = np.zeros(size + LINE, np.uint8)
    begin = -room.ctypes.data % LINE
    return torch.from_numpy(room[begin : begin + size]).view(dtype).view(*shape)


def pad_page_count(pages: int) -> int:
    """Return `pages` rounded up to one of four sizes per doubling: at most a quarter is padding."""
    step = max(1, 1 << (pages.bit_length() - 3) if pages > 7 else 1)
    return -(-pages // step) * step


class CausalMask(NamedTuple):
    """Which keys a query at position p sees: those from `first_key(p)` to p."""

    window: int | None = None
    """The last so many; None: all."""
    chunk: int | None = None
    """Those of its own chunk of so many positions (Llama 4); None: of all."""

    @property
    def span(self) -> int | None:
        """Return the most keys that a query sees; None: there is no limit."""
        return self.window or self.chunk

    def first_key(self, position: int) -> int:
        if self.chunk is not None:
            return position // self.chunk * self.chunk
        return 0 if self.window is None else max(0, position - self.window + 1)

    def hides(self, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """Return whether queries at positions do not see keys at positions, each of a shape that is broadcast to the other's."""
        hidden = keys > queries
        if self.window is not None:
            hidden |= keys <= queries - self.window
        if self.chunk is not None:
            hidden |= keys < queries // self.chunk * self.chunk
        return hidden


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One attention layer as the model itself calls it (recorded by `model.probe`, not read from a config)."""

    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    scaling: float
    """Factor on query times key."""
    window: int | None = None
    """A query at position p sees positions p - window + 1 to p; None: all up to p."""
    softcap: float | None = None
    """Scores become `softcap * tanh(scores / softcap)` before the mask."""
    sinks: tuple[float, ...] | None = field(default=None, compare=False)
    """For each head, the score of a further key without a value, which every query sees (Xiao et al. 2023, as gpt-oss learns it). Not
    compared: what layers of one kind share is planned once."""
    chunk: int | None = None
    """A query at position p sees positions p // chunk * chunk to p; None: see `window`."""
    source: int | None = field(default=None, compare=False)
    """The earlier layer whose stored keys and values it reads (Gemma 3n and 4); None: it stores its own. In a step it gets those of that
    layer."""
    value_in_key: bool = False
    """The value is the first `value_dim` numbers of the key, and only the key is stored (latents, DeepSeek-AI 2024)."""

    @property
    def mask(self) -> CausalMask:
        return CausalMask(self.window, self.chunk)

    @property
    def own_value_dim(self) -> int:
        """Return the numbers of a value that are stored beside its key."""
        return 0 if self.value_in_key else self.value_dim


@dataclass(frozen=True, slots=True)
class KVSpec:
    """Everything that determines the size of the KV storage, except the number of pages."""

    layers: tuple[LayerSpec, ...]
    page_size: int
    """Tokens in a page, 1 to 64."""
    dtype: torch.dtype
    """Of queries, and of KV unless it has `scales`."""
    device: torch.device
    scales: tuple[float, ...] | None = None
    """Of each layer, for KV in float8: a stored number times its layer's scale is the key or value. None: KV has `dtype`."""
    groups: tuple[int, ...] = ()
    """Group of each layer (`kernels/groups.py`); empty: one page holds all layers. The layers of a group have a page each in turn, and the
    groups take turns: storage s holds layer s of every group, in pages that no two groups share."""

    def __post_init__(self) -> None:
        if not 1 <= self.page_size <= 64:
            raise ValueError(f"page size {self.page_size} is not between 1 and 64 tokens; set --page-size")

    @property
    def page_bytes(self) -> int:
        """Return the bytes that one page takes over all layers of a group, keys and values."""
        scalars = sum(layer.kv_heads * (layer.key_dim + layer.own_value_dim) for layer in self.stored)
        return scalars * self.page_size * self.kv_dtype.itemsize

    @property
    def stored(self) -> tuple[LayerSpec, ...]:
        """Return the layers of the largest group, each with the shape of its storage."""
        own = tuple(layer for layer in self.layers if layer.source is None)
        return own[:1] * (max(self.places) + 1) if self.groups else own  # all of several groups have one shape

    @property
    def places(self) -> tuple[int, ...]:
        """Return the storage of each layer."""
        places, taken = list[int](), Counter[int]()
        for number, layer in enumerate(self.layers):
            group = self.groups[number] if self.groups else 0
            places.append(taken[group] if layer.source is None else places[layer.source])
            taken[group] += layer.source is None
        return tuple(places)

    @property
    def num_groups(self) -> int:
        return max(self.groups, default=0) + 1

    @property
    def kv_dtype(self) -> torch.dtype:
        return self.dtype if self.scales is None else FLOAT8

    @property
    def copy_dtype(self) -> torch.dtype:
        """Return the dtype in which pages are copied: bytes for float8, which torch does not index on every device."""
        return self.dtype if self.scales is None else torch.uint8

    @property
    def page_width(self) -> int:
        """Return the numbers of `copy_dtype` that a page takes."""
        return self.page_bytes // self.copy_dtype.itemsize

    def scale(self, layer: int) -> float:
        """Return the factor of what is stored of `layer`."""
        source = self.layers[layer].source
        return 1.0 if self.scales is None else self.scales[layer if source is None else source]

    def pages_for(self, memory: int) -> int:
        """Return how many pages fit into `memory` bytes."""
        return memory // self.page_bytes


@dataclass(frozen=True, slots=True)
class HostArrays:
    """The arrays of a packed step that are copied to the device, on the host, so that other ranks get them without a copy back."""

    tokens: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    sampling: torch.Tensor


@dataclass(frozen=True, slots=True)
class GroupPages:
    """The pages of a packed step in one group of layers."""

    slots: torch.Tensor
    """As `PackedStep.slots`."""
    page_indices: torch.Tensor
    """As `PackedStep.page_indices`. Entries behind the group's window are outdated: they name pages, but not the row's."""
    host_slots: torch.Tensor | None = None
    """`slots` on the host, as `HostArrays`; None: they were made on the device."""


@dataclass(frozen=True, slots=True)
class PackedStep:
    """A step's rows laid end to end. T tokens, R rows, S positions whose logits are wanted.

    A row may read what any other row of the step stores, in any order: the pages of a shared prefix, or, if several rows belong to one
    request (a decode that speculates), the tokens before its own. So a backend stores the KV of all rows before any row attends.
    """

    tokens: torch.Tensor
    """[T] int64, on the model's device."""
    positions: torch.Tensor
    """[T] int64: each token's position in its request."""
    slots: torch.Tensor
    """[T] int64: the storage slot of each token's KV, `page * page_size + offset`."""
    starts: Sequence[int]
    """[R] position of each row's first token, which is the number of tokens whose KV is already in pages."""
    counts: Sequence[int]
    """[R] tokens of each row computed in this step."""
    page_indptr: torch.Tensor
    """[R + 1] int32 on the CPU: row r's page table is `page_indices[page_indptr[r] : page_indptr[r + 1]]`, exactly as long as `starts +
    counts` tokens need."""
    page_indices: torch.Tensor
    """[pages] int32 on the CPU: the page tables of all rows, end to end (CSR, as FlashInfer's `plan` takes them)."""
    sampling: torch.Tensor
    """[S] int64: index in T of each token whose logits are wanted, ascending."""
    adapters: Sequence[int] = ()
    """[R] number of each row's LoRA adapter, 0 for none; empty if no row has one."""
    host: HostArrays | None = None
    """None: the arrays on the device were changed or made there."""
    others: Sequence[GroupPages] = ()
    """Of each group after the first one; empty if all layers are in one group."""
    states: "Sequence[RowState | None]" = ()
    """[R] where each row's recurrent states are (`kernels/states.py`); empty if no row keeps any."""

    def with_pages(self, first: GroupPages, others: Sequence[GroupPages] = ()) -> "PackedStep":
        """Return the step with these pages of the first group and the others."""
        return replace(self, slots=first.slots, page_indices=first.page_indices, others=others, host=None)

    def of_groups(self) -> "list[PackedStep]":
        """Return the step as each group of layers sees it."""
        return [self, *map(self.with_pages, self.others)]

    def tables(self) -> list[torch.Tensor]:
        """Return each row's page table, [R] of [pages] int32, as views of `page_indices`."""
        return [self.page_indices[begin:end] for begin, end in pairwise(self.page_indptr.tolist())]


class StepContext(Protocol):
    """One planned step, as the model's layers see it."""

    def attend(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Store this step's KV of `layer`, unless it has a `source`, then attend over each row's whole KV.

        query [T, heads, key_dim], key [T, kv_heads, key_dim], value [T, kv_heads, value_dim] -> [T, heads, value_dim]. The value of a
        layer with `value_in_key` is the beginning of its key.
        """
        ...


class Backend(Protocol):
    """Owner of the KV storage, in the layout that its kernels need."""

    name: str
    spec: KVSpec
    pages: int

    def plan(self, step: PackedStep) -> StepContext:
        """Prepare whatever all layers of this step share."""
        ...

    def read_pages(self, pages: torch.Tensor) -> torch.Tensor:
        """Return all KV of `pages`, [n] int64 on the backend's device, as a new tensor [n, page_width] of `copy_dtype`."""
        ...

    def write_pages(self, pages: torch.Tensor, content: torch.Tensor) -> None:
        """Write the result of `read_pages`, on the same device, into `pages`, each named once."""
        ...
