"""Kimi delta attention (Kimi Team 2025): the gated delta rule with a decay of its own for each dimension of a key."""

import torch
from torch import nn
from torch.nn import functional

from fairlead_worker.model.layers.delta import DeltaShape, GatedDelta, GatedNorm, divide_convolutions
from fairlead_worker.sharding.shards import AnyCut, Ranks

CHUNK = 16
"""Tokens whose values are computed together: their decays are a tensor [CHUNK, CHUNK, key_dim] for each head."""


class ForgetGate(nn.Module):
    """Decays of a head's dimensions, by two projections."""

    def __init__(self, shape: DeltaShape) -> None:
        super().__init__()
        size = shape.key_heads * shape.key_dim
        self.f_a_proj = nn.Linear(shape.width, shape.key_dim, bias=False)
        self.f_b_proj = nn.Linear(shape.key_dim, size, bias=False)
        self.dt_bias = nn.Parameter(torch.empty(size))
        self.A_log = nn.Parameter(torch.empty(1, 1, shape.key_heads, 1))

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Return logarithms of decays [T, heads, key_dim] in float32, of states [T, width]."""
        rates = self.A_log.float().exp()[0]
        steps = functional.softplus(self.f_b_proj(self.f_a_proj(states)).float() + self.dt_bias.float())
        return -rates * torch.unflatten(steps, -1, (rates.shape[1], -1))


class KimiDelta(GatedDelta):
    """As many heads for keys as for values."""

    NORM, OUT = "o_norm", "o_proj"

    def __init__(self, shape: DeltaShape, index: int) -> None:
        super().__init__(shape, index)
        del self.A_log, self.dt_bias
        self.o_norm = GatedNorm(shape.value_dim, shape.eps, torch.sigmoid)
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(shape.width, self.key_size, bias=False) for _ in range(3))
        self.b_proj = nn.Linear(shape.width, shape.key_heads, bias=False)
        self.g_a_proj = nn.Linear(shape.width, shape.key_dim, bias=False)
        self.g_b_proj = nn.Linear(shape.key_dim, self.key_size, bias=False)
        self.forget_gate = ForgetGate(shape)

    def _divide_inputs(self, ranks: Ranks) -> dict[str, AnyCut]:
        """As in a checkpoint, which has the parts of the gate in the layer itself, and as here."""
        size, heads = ranks.cut(self.key_size), self.shape.key_heads
        gate = {"f_b_proj": size, "dt_bias": size, "A_log": ranks.cut(heads, dim=2)}
        stored = {"f_b_proj.weight": size, "dt_bias": size, "A_log": gate["A_log"]}
        own = {f"{name}_proj": size for name in ("q", "k", "v", "g_b")} | {"b_proj": ranks.cut(heads)}
        return own | stored | {f"forget_gate.{name}": cut for name, cut in gate.items()} | divide_convolutions(self, ranks)

    def project(self, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        mixed = torch.cat((self.q_proj(states), self.k_proj(states), self.v_proj(states)), -1)
        return mixed, self.g_b_proj(self.g_a_proj(states)), self.b_proj(states), self.forget_gate(states)

    def log_decay(self, decay: torch.Tensor) -> torch.Tensor:
        return decay

    def run(self, *parts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return advance_channels(*parts)


def advance_channels(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, log_decay: torch.Tensor, correction: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Do what `delta.advance_chunks` does, with log_decay [B, heads, L, key_dim]."""
    outputs = []
    for q, k, v, g, b in zip(*(torch.split(part, CHUNK, 2) for part in (query, key, value, log_decay, correction)), strict=True):
        total = g.cumsum(2)  # from the chunk's beginning
        after = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=q.device).triu(1)[..., None]
        keys = (total[:, :, :, None] - total[:, :, None]).masked_fill(after, float("-inf")).exp() * k[:, :, None]
        corrected, grown = k * b[..., None], total.exp()
        system = (corrected[:, :, :, None] * keys).sum(-1)
        solved = torch.linalg.solve_triangular(
            system, torch.cat((v * b[..., None], corrected * grown), -1), upper=False, unitriangular=True
        )
        changes, reads = torch.split(solved, [v.shape[-1], k.shape[-1]], -1)
        change = changes - reads @ state
        outputs.append((q * grown) @ state + (q[:, :, :, None] * keys).sum(-1) @ change)
        last = total[:, :, -1:]
        state = state * last.exp().transpose(-1, -2) + (k * (last - total).exp()).transpose(-1, -2) @ change
    return torch.cat(outputs, 2), state
