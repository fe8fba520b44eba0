"""LoRA matrices in fixed memory, so that one CUDA graph serves any adapters of its rows.

Every linear layer that adapters may touch has the down and up matrices of all slots stacked, padded with zeros to one rank. The graph
has a tensor with each row's slot number. Loading an adapter copies it into a slot; no graph is recorded again. Fixed slots with an
index per row come from Punica's BGMV and S-LoRA (Chen et al., Sheng et al. 2023; vLLM's and SGLang's graphs use them too). The kernel
here is a plain product: a few slots are multiplied whole, and the parts of other slots are zeroed in between. That reads each adapter
once a step, while gathering reads the matrices of each row and writes and reads a copy of them.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import nn

from fairlead_worker.lora.files import Pair

logger = logging.getLogger(__name__)

GATHERED, LAUNCHED = 3, 16
"""Cost of gathering, in slots that could be read in the same time: per row, for reading, writing and reading its matrices; and once for
two more kernels per layer.

At 4.3 TB/s, 4 us are 17 MB, and a slot of rank 64 on a layer of 4096 by 4096 has 1 MB. Estimated, not measured."""


class Rows(NamedTuple):
    """The slots of a step's rows, in forms that all layers share. N rows, S slots of rank R."""

    gather: torch.Tensor | None
    """[N] int64: each row's slot, counted from 0, arbitrary for rows without one. None: all slots are multiplied."""
    foreign: torch.Tensor
    """Bool: the parts that belong to other slots than the row's, [N, S * R], or [N, R] if slots are gathered."""


class _Layer:
    """One linear layer's slots, as its forward hook while a graph is recorded."""

    is_active = True

    def __init__(self, module: nn.Module, sizes: tuple[int, int], slots: int, rank: int, dtype: torch.dtype, device: torch.device) -> None:
        self.module = module
        self.down = torch.zeros(slots, rank, sizes[0], dtype=dtype, device=device)
        self.up = torch.zeros(slots, rank, sizes[1], dtype=dtype, device=device)
        self.rows: Rows | None = None

    @property
    def bytes(self) -> int:
        return self.down.nbytes + self.up.nbytes

    def __call__(self, module: nn.Module, inputs: tuple[torch.Tensor, ...], answer: torch.Tensor) -> torch.Tensor:
        """Add the adapters of the rows to the layer's output [..., N, out_features], in place."""
        assert self.rows is not None, "a hook while a graph is recorded, and at no other time"
        flat = answer.view(-1, answer.shape[-1])
        flat.add_(self.delta(inputs[0].reshape(len(flat), -1), self.rows))
        return answer

    def delta(self, inputs: torch.Tensor, rows: Rows) -> torch.Tensor:
        """Compute [N, in_features] -> [N, out_features]. A row's bits do not depend on the other rows' slots or their content."""
        if rows.gather is None:
            low = nn.functional.linear(inputs, self.down.flatten(0, 1)).masked_fill_(rows.foreign, 0)
            return low @ self.up.flatten(0, 1)
        low = torch.bmm(inputs[:, None], self.down[rows.gather].transpose(1, 2)).masked_fill_(rows.foreign[:, None], 0)
        return torch.bmm(low, self.up[rows.gather])[:, 0]


class AdapterSlots:
    """The adapter slots of a model, numbered from 1; 0 is no adapter."""

    def __init__(
        self, layers: Mapping[str, tuple[nn.Module, tuple[int, int]]], slots: int, rank: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """`layers`: by path, each with its (in_features, out_features). Raises MemoryError if the slots do not fit."""
        try:
            self._layers = {path: _Layer(module, sizes, slots, rank, dtype, device) for path, (module, sizes) in layers.items()}
        except torch.OutOfMemoryError as error:
            raise MemoryError(f"{slots} LoRA adapters of rank {rank} do not fit: lower --max-loras or --max-lora-rank") from error
        self._rank = rank
        self._owners = torch.arange(1, slots + 1, device=device).repeat_interleave(rank)
        """[S * R]: the slot of each stacked row of `down`."""
        self._free = list(range(slots, 0, -1))
        self._slot_of: dict[int, int] = {}
        self.bytes = sum(layer.bytes for layer in self._layers.values())
        """Bytes on the device."""
        logger.info("LoRA in CUDA graphs: %d slots of rank %d on %d layers, %.2f GiB", slots, rank, len(self._layers), self.bytes / 2**30)

    def put(self, number: int, pairs: Mapping[str, Pair]) -> dict[str, Pair]:
        """Copy an adapter's matrices (finite numbers) into a slot, in stream order. Return views of the copies, by layer.

        An adapter that touches other layers, or has a higher rank, gets no slot, and the result is empty. Its steps run without
        graphs.
        """
        if not self._free or not pairs.keys() <= self._layers.keys() or any(len(pair.down) > self._rank for pair in pairs.values()):
            return {}
        slot = self._slot_of[number] = self._free.pop()
        placed = {}
        for path, layer in self._layers.items():
            down, up = layer.down[slot - 1], layer.up[slot - 1]
            down.zero_()  # clear the previous adapter
            up.zero_()
            if (pair := pairs.get(path)) is not None:
                rank = len(pair.down)
                down[:rank].copy_(pair.down)
                up[:rank].copy_(pair.up.T)
                placed[path] = Pair(down[:rank], up[:rank].T)
        return placed

    def drop(self, number: int) -> None:
        """Free the adapter's slot. No later row may use it."""
        if (slot := self._slot_of.pop(number, None)) is not None:
            self._free.append(slot)

    def of(self, adapters: Sequence[int]) -> list[int] | None:
        """Return the slot of each row's adapter; None if an adapter has none."""
        slots = [self._slot_of.get(number, 0) for number in adapters]
        return slots if all(slot or not number for slot, number in zip(slots, adapters, strict=True)) else None

    @contextmanager
    def activate(self, slots: torch.Tensor) -> Iterator[None]:
        """Apply slots in the forward pass inside this context, which may be recorded: row n has one token and slot `slots[n]` (int64, on
        the device).
        """
        rows = self._rows(slots)
        handles = []
        for layer in self._layers.values():
            layer.rows = rows
            handles.append(layer.module.register_forward_hook(layer))
        try:
            yield
        finally:
            for handle, layer in zip(handles, self._layers.values(), strict=True):
                handle.remove()
                layer.rows = None

    def _rows(self, slots: torch.Tensor) -> Rows:
        if (GATHERED * len(slots) + LAUNCHED) * self._rank < len(self._owners):
            return Rows((slots - 1).clamp(min=0), (slots == 0)[:, None].expand(-1, self._rank))
        return Rows(None, slots[:, None] != self._owners)
