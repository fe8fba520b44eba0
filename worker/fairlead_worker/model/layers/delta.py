"""The gated delta rule (Yang et al. 2024) of Qwen3-Next, Qwen3.5 and OLMo Hybrid: a linear attention whose state forgets and is corrected.

A head's state S [key_dim, value_dim] maps keys to values. A token with key k and value v makes it S' = a S + k (b (v - (a S)^T k))^T, where
a is its decay and b how far the value is corrected; its output is S'^T q.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.nn import functional

from fairlead_worker.kernels.states import RecurrentContext, StateSpec
from fairlead_worker.model.layers.convolution import CausalConvolution
from fairlead_worker.sharding.shards import AnyCut, Ranks

CHUNK = 64
"""Tokens whose values are computed together from one state."""


@dataclass(frozen=True, slots=True)
class DeltaShape:
    """The sizes of a gated delta rule."""

    width: int
    key_heads: int
    value_heads: int
    """A multiple of `key_heads`: each query and key serves as many values in a row."""
    key_dim: int
    value_dim: int
    convolution: int
    """Tokens that the convolution before it sees."""
    eps: float
    correction: float = 1.0
    """The most that a value is corrected; above 1, a state may change its sign (OLMo Hybrid)."""


class GatedNorm(nn.Module):
    """weight * x / sqrt(mean(x²) + eps) * activation(gate), in float32."""

    def __init__(self, width: int, eps: float, activation: Callable[[torch.Tensor], torch.Tensor] = functional.silu) -> None:
        super().__init__()
        self.activation = activation
        self.weight = nn.Parameter(torch.empty(width))
        self.eps = eps

    def forward(self, states: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """Return [..., width] of states and gate of this shape."""
        wide = states.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        weighted = self.weight * normed.to(states.dtype)
        return (weighted * self.activation(gate.float())).to(states.dtype)


class GatedDelta(nn.Module):
    """A layer with the gated delta rule. `project` reads a checkpoint's own matrices."""

    NORM, OUT = "norm", "out_proj"

    def __init__(self, shape: DeltaShape, index: int) -> None:
        """index: among the recurrent layers."""
        super().__init__()
        self.shape, self.index = shape, index
        self.conv1d = CausalConvolution(2 * self.key_size + self.value_size, shape.convolution, bias=False)
        self.dt_bias = nn.Parameter(torch.empty(shape.value_heads))
        self.A_log = nn.Parameter(torch.empty(shape.value_heads))
        self.add_module(self.NORM, GatedNorm(shape.value_dim, shape.eps))
        self.add_module(self.OUT, nn.Linear(self.value_size, shape.width, bias=False))

    @property
    def key_size(self) -> int:
        return self.shape.key_heads * self.shape.key_dim

    @property
    def value_size(self) -> int:
        return self.shape.value_heads * self.shape.value_dim

    def divide(self, ranks: Ranks) -> dict[str, AnyCut]:
        """Keep a rank's key heads and their values; return the parts of its tensors, by name. Raises Unshardable."""
        shape, keys, values = self.shape, self.key_size, self.value_size
        heads = ranks.share(shape.key_heads, "key heads")
        cuts = {"conv1d": ranks.cut(keys, keys, values), self.OUT: ranks.cut(values, dim=1), **self._divide_inputs(ranks)}
        self.shape = replace(shape, key_heads=heads, value_heads=shape.value_heads // ranks.size)
        return cuts

    def _divide_inputs(self, ranks: Ranks) -> dict[str, AnyCut]:
        """Return the parts of what is before the convolution, and of decays."""
        return dict.fromkeys(("dt_bias", "A_log"), ranks.cut(self.shape.value_heads))

    @property
    def state(self) -> StateSpec:
        shape, convolution = self.shape, self.conv1d.state
        heads = (shape.value_heads, shape.key_dim, shape.value_dim)
        return StateSpec((*convolution.shapes, heads), (*convolution.dtypes, torch.float32))

    def project(self, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return queries, keys and values side by side, gates, corrections and decays, each [T, ...], before their activations.

        Each family stores these projections in its own way, and has its own subclass.
        """
        raise NotImplementedError

    def log_decay(self, decay: torch.Tensor) -> torch.Tensor:
        """Return logarithms of decays [T, heads] in float32."""
        return -self.A_log.float().exp() * functional.softplus(decay.float() + self.dt_bias)

    def run(self, *parts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Do what `advance_chunks` says."""
        return advance_token(*parts) if parts[0].shape[2] == 1 else advance_chunks(*parts)

    def forward(self, states: torch.Tensor, context: RecurrentContext) -> torch.Tensor:
        """Return [T, width] for states [T, width]."""
        mixed, gate, correction, decay = self.project(states)
        mixed = context.scan(self, mixed, self.log_decay(decay), correction.sigmoid() * self.shape.correction)
        normed = getattr(self, self.NORM)(mixed, torch.unflatten(gate, -1, mixed.shape[1:]))
        out: torch.Tensor = getattr(self, self.OUT)(normed.flatten(1))
        return out

    def advance(self, inputs: Sequence[torch.Tensor], states: Sequence[torch.Tensor]) -> tuple[torch.Tensor, Sequence[torch.Tensor]]:
        """inputs: queries, keys and values side by side, logarithms of decays, corrections. Returns values [B, L, heads, value_dim]."""
        shape, (mixed, log_decay, correction) = self.shape, inputs
        convolved, last = self.conv1d.advance(mixed, states[0])
        query, key, value = torch.split(functional.silu(convolved), [self.key_size, self.key_size, self.value_size], -1)
        query, key = (_unit(torch.unflatten(part, -1, (shape.key_heads, -1)).float()) for part in (query, key))
        repeats = shape.value_heads // shape.key_heads
        parts = [
            query.repeat_interleave(repeats, 2) * shape.key_dim**-0.5,
            key.repeat_interleave(repeats, 2),
            torch.unflatten(value, -1, (shape.value_heads, -1)).float(),
            log_decay,
            correction.float(),
        ]
        values, state = self.run(*(part.transpose(1, 2) for part in parts), states[1])
        return values.transpose(1, 2).to(mixed.dtype), (last, state)


class SplitDelta(GatedDelta):
    """With a matrix for each of its inputs, as Qwen3.5 has them."""

    def __init__(self, shape: DeltaShape, index: int) -> None:
        super().__init__(shape, index)
        self.in_proj_qkv = nn.Linear(shape.width, 2 * self.key_size + self.value_size, bias=False)
        self.in_proj_z = nn.Linear(shape.width, self.value_size, bias=False)
        self.in_proj_b = nn.Linear(shape.width, shape.value_heads, bias=False)
        self.in_proj_a = nn.Linear(shape.width, shape.value_heads, bias=False)

    def _divide_inputs(self, ranks: Ranks) -> dict[str, AnyCut]:
        keys, values = self.key_size, self.value_size
        heads = dict.fromkeys(("in_proj_b", "in_proj_a"), ranks.cut(self.shape.value_heads))
        own = {"in_proj_qkv": ranks.cut(keys, keys, values), "in_proj_z": ranks.cut(values)}
        return super()._divide_inputs(ranks) | own | heads

    def project(self, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.in_proj_qkv(states), self.in_proj_z(states), self.in_proj_b(states), self.in_proj_a(states)


class NamedDelta(GatedDelta):
    """With a matrix for each of its inputs, by the names of attention, as OLMo Hybrid has them."""

    NORM, OUT = "o_norm", "o_proj"

    def __init__(self, shape: DeltaShape, index: int) -> None:
        super().__init__(shape, index)
        for name, size in self._sizes.items():
            self.add_module(f"{name}_proj", nn.Linear(shape.width, size, bias=False))

    @property
    def _sizes(self) -> dict[str, int]:
        return {**dict.fromkeys("qk", self.key_size), **dict.fromkeys("vg", self.value_size), **dict.fromkeys("ba", self.shape.value_heads)}

    def _divide_inputs(self, ranks: Ranks) -> dict[str, AnyCut]:
        own = {f"{name}_proj": ranks.cut(size) for name, size in self._sizes.items()}
        return super()._divide_inputs(ranks) | own | divide_convolutions(self, ranks)

    def project(self, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        query, key, value, gate, correction, decay = (getattr(self, f"{name}_proj")(states) for name in "qkvgba")
        return torch.cat((query, key, value), -1), gate, correction, decay


class JoinedDelta(GatedDelta):
    """With two matrices whose outputs belong to one key head after the other, as Qwen3-Next has them."""

    def __init__(self, shape: DeltaShape, index: int) -> None:
        super().__init__(shape, index)
        self.in_proj_qkvz = nn.Linear(shape.width, 2 * self.key_size + 2 * self.value_size, bias=False)
        self.in_proj_ba = nn.Linear(shape.width, 2 * shape.value_heads, bias=False)

    def _divide_inputs(self, ranks: Ranks) -> dict[str, AnyCut]:
        own = {"in_proj_qkvz": 2 * self.key_size + 2 * self.value_size, "in_proj_ba": 2 * self.shape.value_heads}
        return super()._divide_inputs(ranks) | {name: ranks.cut(size) for name, size in own.items()}

    def project(self, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        shape = self.shape
        values = self.value_size // shape.key_heads
        heads = torch.unflatten(self.in_proj_qkvz(states), -1, (shape.key_heads, -1))
        query, key, value, gate = (part.flatten(1) for part in torch.split(heads, [shape.key_dim, shape.key_dim, values, values], -1))
        pairs = torch.unflatten(self.in_proj_ba(states), -1, (shape.key_heads, -1))
        correction, decay = (part.flatten(1) for part in pairs.chunk(2, -1))
        return torch.cat((query, key, value), -1), gate, correction, decay


def divide_convolutions(layer: GatedDelta, ranks: Ranks) -> dict[str, AnyCut]:
    """Return the parts of the convolutions that a checkpoint has of queries, keys and values by themselves."""
    sizes = {"q": layer.key_size, "k": layer.key_size, "v": layer.value_size}
    return {f"{name}_conv1d.weight": ranks.cut(size) for name, size in sizes.items()}


def _unit(rows: torch.Tensor) -> torch.Tensor:
    """Return vectors [..., dim] of length 1."""
    return rows * torch.rsqrt(rows.square().sum(-1, keepdim=True) + 1e-6)


def advance_token(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, log_decay: torch.Tensor, correction: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Do the same as `advance_chunks` for one token."""
    state = state * log_decay.exp()[..., None]
    change = (value - key @ state) * correction[..., None]
    state = state + key.transpose(-1, -2) * change
    return query @ state, state


def advance_chunks(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, log_decay: torch.Tensor, correction: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return values [B, heads, L, value_dim] and the state [B, heads, key_dim, value_dim] after L tokens, all float32.

    query, key: [B, heads, L, key_dim]. log_decay, correction: [B, heads, L].

    The changes of a chunk's tokens, u = b (v - S^T k), depend on one another by a triangular system, which is solved at once: the form of
    Yang et al. 2024, section 3, and of transformers.
    """
    length = query.shape[2]
    padding = -length % min(CHUNK, length)
    query, key, value = (functional.pad(part, (0, 0, 0, padding)) for part in (query, key, value))
    log_decay, correction = (functional.pad(part, (0, padding)) for part in (log_decay, correction))
    size = (-1, min(CHUNK, length))
    query, key, value, log_decay, correction = (torch.unflatten(part, 2, size) for part in (query, key, value, log_decay, correction))
    total = log_decay.cumsum(-1)  # from a chunk's beginning
    after = torch.ones(size[1], size[1], dtype=torch.bool, device=query.device).triu(1)
    between = (total[..., :, None] - total[..., None, :]).masked_fill(after, float("-inf")).exp()
    corrected, grown = key * correction[..., None], total.exp()[..., None]
    system = corrected @ key.transpose(-1, -2) * between
    right = torch.cat((value * correction[..., None], corrected * grown), -1)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    changes, reads = torch.split(solved, [value.shape[-1], key.shape[-1]], -1)
    scores, query = query @ key.transpose(-1, -2) * between, query * grown
    key = key * (total[..., -1:] - total).exp()[..., None]
    outputs = []
    for chunk in range(query.shape[2]):
        change = changes[:, :, chunk] - reads[:, :, chunk] @ state
        outputs.append(query[:, :, chunk] @ state + scores[:, :, chunk] @ change)
        state = state * grown[:, :, chunk, -1:] + key[:, :, chunk].transpose(-1, -2) @ change
    return torch.cat(outputs, 2)[:, :, :length], state
