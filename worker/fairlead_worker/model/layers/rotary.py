"""Rotary position embeddings (Su et al. 2021): pairs of a head's dimensions are rotated by angles that grow with the position."""

from dataclasses import dataclass
from functools import cached_property

import torch

from fairlead_worker.model.fused.library import DTYPES, Library

Rotation = tuple[torch.Tensor, torch.Tensor]
"""Cosines and sines, each [tokens, 1, head_dim] float32."""


def rotation(positions: torch.Tensor, head_dim: int, theta: float) -> Rotation:
    """Return the rotation of tokens at `positions` [tokens]."""
    frequencies = 1.0 / theta ** (torch.arange(0, head_dim, 2, device=positions.device).float() / head_dim)
    angles = (positions[:, None].float() * frequencies).repeat(1, 2)[:, None]
    return angles.cos(), angles.sin()


def rotate(rows: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    """Return queries or keys [tokens, heads, head_dim], rotated in float32: halves of a head, as in GPT-NeoX."""
    cosines, sines = rotation
    first, second = rows.float().chunk(2, -1)
    return (rows.float() * cosines + torch.cat((-second, first), -1) * sines).to(rows.dtype)


@dataclass(eq=False)
class Rope:
    """The rotary embedding of some layers of a decoder."""

    frequencies: torch.Tensor
    """[half] float32: the first 2 * half dimensions of a head are rotated."""
    scale: float = 1.0
    """Factor of cosines and sines, as of YaRN."""
    interleaved: bool = False
    """Whether neighbours are pairs, as in GPT-J. Else dimension d and half + d are."""
    growth: tuple[float, int] | None = None
    """(b, n): a query at position p is multiplied by 1 + b * log(1 + p // n), as in Llama 4 and Ministral 3."""
    kernels: Library | None = None
    """Rotates 16 bits in one kernel, on a GPU, by `table`."""
    table: torch.Tensor | None = None
    """[positions, 2 * half] float32: cosines, then sines."""

    def tables(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cosines and sines [tokens, half] float32 of `positions` [tokens]."""
        angles = positions[:, None].float() * self.frequencies
        return angles.cos() * self.scale, angles.sin() * self.scale

    def growths(self, positions: torch.Tensor) -> torch.Tensor | None:
        """Return the factor of a query at each of `positions` [tokens] float32; None: there is none."""
        if self.growth is None:
            return None
        factor, length = self.growth
        return 1 + factor * torch.log1p((positions // length).float())

    def at(self, positions: torch.Tensor) -> "Turn":
        """Return what rotates tokens at `positions` [tokens]."""
        return Turn(self, positions)


@dataclass(eq=False)
class Turn:
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
        if rope.kernels is None or rope.table is None or query.dtype not in DTYPES:
            query, key = self._rotate(query), self._rotate(key)
        else:
            flat = [part.reshape(len(self.positions), -1) for part in (query, key)]
            rope.kernels.apply_rope_with_cos_sin_cache_inplace(self.positions, flat[0], flat[1], query.shape[-1], rope.table)
            query, key = flat[0].view(query.shape), flat[1].view(key.shape)
        growths = rope.growths(self.positions)
        return (query if growths is None else (query * growths[:, None, None]).to(query.dtype)), key

    def _rotate(self, rows: torch.Tensor) -> torch.Tensor:
        cosines, sines = self._tables
        rotated = 2 * cosines.shape[-1]
        wide = rows[..., :rotated].float()
        first, second = (wide[..., ::2], wide[..., 1::2]) if self.rope.interleaved else wide.chunk(2, -1)
        pairs = (first * cosines - second * sines, second * cosines + first * sines)
        wide = torch.stack(pairs, -1).flatten(-2) if self.rope.interleaved else torch.cat(pairs, -1)
        turned = wide.to(rows.dtype)
        return turned if rotated == rows.shape[-1] else torch.cat((turned, rows[..., rotated:]), -1)
