"""Bidirectional self-attention over packed texts: a token attends to the tokens of its own text."""

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from fairlead_worker.model.layers.rotary import StepRotation
from fairlead_worker.model.layers.texts import PackedTexts

BLOCK = 256
"""Queries that local attention computes at once, so that its cost grows with the text and not with its square."""


class Attention(nn.Module):
    """Multi-head attention with one stacked projection."""

    def __init__(self, width: int, heads: int, bias: bool = True, window: int | None = None) -> None:
        """`window`: tokens on each side that a token attends to; None: all."""
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width, bias)
        self.output = nn.Linear(width, width, bias)
        self.heads = heads
        self.window = window

    def forward(self, states: torch.Tensor, texts: PackedTexts, rotation: StepRotation | None = None) -> torch.Tensor:
        """Return [tokens, width] for states [tokens, width]."""
        query, key, value = self.qkv(states).view(len(states), 3, self.heads, -1).unbind(1)
        if rotation is not None:
            query, key = rotation(query, key)
        parts = []
        for run in texts.split(query, key, value):
            q, k, v = (part.transpose(1, 2) for part in run)  # [texts, heads, length, head_dim]
            local = self.window is not None and q.shape[2] > self.window + 1
            out = _attend_locally(q, k, v, self.window or 0) if local else scaled_dot_product_attention(q, k, v)
            parts.append(out.transpose(1, 2).flatten(2).flatten(0, 1))
        attended: torch.Tensor = self.output(torch.cat(parts))
        return attended


def _attend_locally(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, window: int) -> torch.Tensor:
    """Attend to at most `window` tokens on each side. All tensors: [texts, heads, length, head_dim]."""
    length, parts = query.shape[2], []
    positions = torch.arange(length, device=query.device)
    for begin in range(0, length, BLOCK):
        rows, seen = slice(begin, begin + BLOCK), slice(max(0, begin - window), begin + BLOCK + window)
        mask = (positions[rows, None] - positions[seen]).abs() <= window
        parts.append(scaled_dot_product_attention(query[:, :, rows], key[:, :, seen], value[:, :, seen], attn_mask=mask))
    return torch.cat(parts, 2)
