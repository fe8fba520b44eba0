"""Rotary position embeddings (Su et al. 2021), in the half-split order of GPT-NeoX and transformers."""

import torch

Rotation = tuple[torch.Tensor, torch.Tensor]
"""Cosines and sines, each [tokens, 1, head_dim] float32."""


def rotation(positions: torch.Tensor, head_dim: int, theta: float) -> Rotation:
    """Return the rotation of tokens at `positions` [tokens]."""
    frequencies = 1.0 / theta ** (torch.arange(0, head_dim, 2, device=positions.device).float() / head_dim)
    angles = (positions[:, None].float() * frequencies).repeat(1, 2)[:, None]
    return angles.cos(), angles.sin()


def rotate(rows: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    """Return queries or keys [tokens, heads, head_dim], rotated in float32."""
    cosines, sines = rotation
    first, second = rows.float().chunk(2, -1)
    return (rows.float() * cosines + torch.cat((-second, first), -1) * sines).to(rows.dtype)
