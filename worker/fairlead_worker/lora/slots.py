"""LoRA matrices in fixed memory, so that one CUDA graph serves whatever adapters its rows have.

Every linear layer that adapters may touch has its down and up matrices of all slots stacked, padded with zeros to one rank, and a graph's
rows have the number of their slot in a tensor that is part of the graph. An adapter is copied into a slot when it is loaded; nothing is
recorded anew. Fixed slots, and an index for each row, are Punica's BGMV and S-LoRA's (Chen et al., Sheng et al. 2023; vLLM's and SGLang's
graphs have them too). The kernel here is a plain product: a few slots are multiplied whole, and what is not a row's own is made zero in
between. That reads each adapter once a step, where gathering reads the matrices of each row and writes and reads a copy of them.
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
"""What gathering costs, in slots that could be read meanwhile: for each row, whose matrices are read, written and read again; and for the
two more kernels of every layer (4 us at 4.3 TB/s are 17 MB, a slot of rank 64 on a layer of 4096 by 4096 has 1). Reckoned, not measured."""


class Rows(NamedTuple):
    """Whose the rows of a step are, in the forms that all layers share. N rows, S slots of rank R."""

    gather: torch.Tensor | None
    """[N] int64: each row's slot, counted from 0, any where it has none; None: all slots are multiplied."""
    foreign: torch.Tensor
    """Bool: what is not a row's own, [N, S * R], or where slots are gathered [N, R]."""


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
        """The layer's answer [..., N, out_features], with what the adapters of its rows add to it, in place."""
        assert self.rows is not None, "a hook while a graph is recorded, and at no other time"
        flat = answer.view(-1, answer.shape[-1])
        flat.add_(self.delta(inputs[0].reshape(len(flat), -1), self.rows))
        return answer

    def delta(self, inputs: torch.Tensor, rows: Rows) -> torch.Tensor:
        """[N, in_features] -> [N, out_features]: a row's bits do not depend on the other rows' slots, nor on what is in them."""
        if rows.gather is None:
            low = nn.functional.linear(inputs, self.down.flatten(0, 1)).masked_fill_(rows.foreign, 0)
            return low @ self.up.flatten(0, 1)
        low = torch.bmm(inputs[:, None], self.down[rows.gather].transpose(1, 2)).masked_fill_(rows.foreign[:, None], 0)
        return torch.bmm(low, self.up[rows.gather])[:, 0]


class AdapterSlots:
    """The slots of a model, numbered from 1; 0 is no adapter."""

    def __init__(
        self, layers: Mapping[str, tuple[nn.Module, tuple[int, int]]], slots: int, rank: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """`layers`: by path, each with its (in_features, out_features). MemoryError where there is no room for them."""
        try:
            self._layers = {path: _Layer(module, sizes, slots, rank, dtype, device) for path, (module, sizes) in layers.items()}
        except torch.OutOfMemoryError as error:
            raise MemoryError(f"{slots} LoRA adapters of rank {rank} do not fit: lower --max-loras or --max-lora-rank") from error
        self._rank = rank
        self._owners = torch.arange(1, slots + 1, device=device).repeat_interleave(rank)
        """[S * R]: whose slot each of the stacked rows of `down` is."""
        self._free = list(range(slots, 0, -1))
        self._slot_of: dict[int, int] = {}
        self.bytes = sum(layer.bytes for layer in self._layers.values())
        """Of the device."""
        logger.info("LoRA in CUDA graphs: %d slots of rank %d on %d layers, %.2f GiB", slots, rank, len(self._layers), self.bytes / 2**30)

    def put(self, number: int, pairs: Mapping[str, Pair]) -> dict[str, Pair]:
        """Copies an adapter's matrices (finite numbers) into a slot, in the order of the stream. Where they are now: views, by layer.

        An adapter that touches other layers, or is of a higher rank, has no slot: its steps run without graphs. The answer is empty then.
        """
        if not self._free or not pairs.keys() <= self._layers.keys() or any(len(pair.down) > self._rank for pair in pairs.values()):
            return {}
        slot = self._slot_of[number] = self._free.pop()
        placed = {}
        for path, layer in self._layers.items():
            down, up = layer.down[slot - 1], layer.up[slot - 1]
            down.zero_()  # of whoever had the slot before
            up.zero_()
            if (pair := pairs.get(path)) is not None:
                rank = len(pair.down)
                down[:rank].copy_(pair.down)
                up[:rank].copy_(pair.up.T)
                placed[path] = Pair(down[:rank], up[:rank].T)
        return placed

    def drop(self, number: int) -> None:
        """Its slot is the next adapter's; no row of it is to come."""
        if (slot := self._slot_of.pop(number, None)) is not None:
            self._free.append(slot)

    def of(self, adapters: Sequence[int]) -> list[int] | None:
        """The slot of each row's adapter; None where one has none."""
        slots = [self._slot_of.get(number, 0) for number in adapters]
        return slots if all(slot or not number for slot, number in zip(slots, adapters, strict=True)) else None

    @contextmanager
    def activate(self, slots: torch.Tensor) -> Iterator[None]:
        """For the forward pass inside, which may be recorded: row n is of slot `slots[n]` (int64, on the device), one token each."""
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
