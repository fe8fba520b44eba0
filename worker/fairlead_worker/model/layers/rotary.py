"""Rotary position embeddings (Su et al. 2021): pairs of a head's dimensions are rotated by angles that grow with the position."""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch

from fairlead_worker.model.fused.library import DTYPES, Library


class QueryGrowth(NamedTuple):
    """A query at position p is multiplied by 1 + factor * log(1 + (p + ahead) // length), as in Llama 4 and Ministral 3."""

    factor: float
    length: int
    ahead: int = 0

    def at(self, positions: torch.Tensor) -> torch.Tensor:
        """Return the factors [tokens, 1, 1] of `positions` [tokens], whose bits do not depend on how many there are."""
        return (1 + self.factor * torch.log1p(((positions + self.ahead) // self.length).double())).float()[:, None, None]


@dataclass(eq=False)
class Rope:
    """The rotary embedding of some layers of a decoder."""

    frequencies: torch.Tensor
    """[half] float32: the first 2 * half dimensions of a head are rotated; none: only queries change, by their `growth`."""
    scale: float = 1.0
    """Factor of cosines and sines, as of YaRN."""
    interleaved: bool = False
    """Whether neighbours are pairs, as in GPT-J. Else dimension d and half + d are."""
    growth: QueryGrowth | None = None
    kernels: Library | None = None
    """Rotates 16 bits in one kernel, on a GPU, by `table`."""
    table: torch.Tensor | None = None
    """[positions, 2 * half] float32: cosines, then sines."""

    def tables(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cosines and sines [tokens, half] float32 of `positions` [tokens]."""
        angles = positions[:, None].float() * self.frequencies
        return angles.cos() * self.scale, angles.sin() * self.scale

    def at(self, positions: torch.Tensor) -> "StepRotation":
        """Return what rotates tokens at `positions` [tokens]."""
        return StepRotation(self, positions)


@dataclass(eq=False)
class StepRotation:
    """A `Rope` at the positions of a step, shared by its layers."""

    rope: Rope
    positions: torch.Tensor

    @cached_property
    def _tables(self) -> tuple[torch.Tensor, torch.Tensor]:
        cosines, sines = self.rope.tables(self.positions)
        return cosines[:, None], sines[:, None]

    def __call__(self, query: torch.Tensor, key: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return query and key, each [tokens, its heads, head_dim], rotated; the kernel does it in place."""
        rope = self.rope
        if not len(rope.frequencies):
            pass
        elif rope.kernels is None or rope.table is None or query.dtype not in DTYPES:
            query, key = self._rotate(query), self._rotate(key)
        else:
            flat = [part.reshape(len(self.positions), -1) for part in (query, key)]
            rope.kernels.apply_rope_with_cos_sin_cache_inplace(self.positions, flat[0], flat[1], query.shape[-1], rope.table)
            query, key = flat[0].view(query.shape), flat[1].view(key.shape)
        return (query if rope.growth is None else (query * rope.growth.at(self.positions)).to(query.dtype)), key

    def _rotate(self, rows: torch.Tensor) -> torch.Tensor:
        cosines, sines = self._tables
        rotated = 2 * cosines.shape[-1]
        wide = rows[..., :rotated].float()
        first, second = (wide[..., ::2], wide[..., 1::2]) if self.rope.interleaved else wide.chunk(2, -1)
        pairs = (first * cosines - second * sines, second * cosines + first * sines)
        wide = torch.stack(pairs, -1).flatten(-2) if self.rope.interleaved else torch.cat(pairs, -1)
        first = wide.to(rows.dtype)
        return first if rotated == rows.shape[-1] else torch.cat((first, rows[..., rotated:]), -1)
