"""Multi-head latent attention (DeepSeek-AI 2024, DeepSeek-V2): keys and values of all heads are projections of one latent of each token.

Only the latent and the rotated part of the key are stored. The projections are absorbed: queries are projected into the space of latents,
which all heads attend to as one KV head, and what they read is projected to values. Chunks of prompts would be faster with keys and values
expanded (16 heads on one core, 512 tokens after 1,024: 39 ms a layer, not 122). But then a token's bits would depend on how its prompt is
cut, and decodes would be slower (8 of 2,048 tokens: 7.2 ms, not 3.7).
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from fairlead_worker.kernels.base import LayerSpec, StepContext
from fairlead_worker.model.attention import UnsupportedAttention
from fairlead_worker.model.exact import reader_of
from fairlead_worker.model.layers.heads import HeadLinear
from fairlead_worker.model.layers.norm import RmsNorm
from fairlead_worker.model.layers.rotary import StepRotation
from fairlead_worker.model.layers.stack import Projections
from fairlead_worker.sharding.shards import AnyCut, Ranks

EPSILON = 1e-6
"""Of norms of latents, whatever a config says of others."""


@dataclass(frozen=True, slots=True)
class LatentSizes:
    """Dimensions of a layer, by their names in a config."""

    kv_lora_rank: int
    """Of a latent."""
    q_lora_rank: int | None
    """Queries are projections of a vector of so many dimensions; None: of the layer's input."""
    qk_nope_head_dim: int
    """Of the part of a head's query and key that is not rotated."""
    qk_rope_head_dim: int
    """Of the part that is. All heads share it of the key."""
    v_head_dim: int
    kv_scale: float = 1.0
    """Factor of a latent after its norm."""

    @property
    def query(self) -> int:
        """Return the dimensions of a head's query."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def stored(self) -> int:
        """Return the numbers of a token that are stored."""
        return self.kv_lora_rank + self.qk_rope_head_dim


class Absorbed(nn.Module):
    """The two halves of `kv_b_proj`, each on its own side of the attention."""

    def __init__(self, weight: torch.Tensor, keys: int) -> None:
        """weight [heads, keys + values, rank]."""
        super().__init__()
        self.query = HeadLinear(weight[:, :keys].transpose(1, 2).contiguous())
        self.value = HeadLinear(weight[:, keys:].contiguous())


class LatentAttention(Projections):
    """Attention over latents."""

    STACK = "qkv_a_proj"

    def __init__(self, width: int, index: int, spec: LayerSpec, sizes: LatentSizes, bias: bool) -> None:
        """spec: of the whole layer. index: among layers with attention. bias: of the first projections and the last one."""
        super().__init__()
        self.index, self.latent, self._spec = index, sizes, spec
        heads, rank = spec.heads, sizes.q_lora_rank
        self.PARTS = ("q_proj" if rank is None else "q_a_proj", "kv_a_proj_with_mqa")
        self.q_proj = nn.Linear(width, heads * sizes.query, bias=False) if rank is None else None
        if rank is not None:
            self.q_a_proj = nn.Linear(width, rank, bias)
            self.q_a_layernorm = RmsNorm(rank, EPSILON)
            self.q_b_proj = nn.Linear(rank, heads * sizes.query, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(width, sizes.stored, bias)
        self.kv_a_layernorm = RmsNorm(sizes.kv_lora_rank, EPSILON)
        self.kv_b_proj: Any = nn.Linear(sizes.kv_lora_rank, heads * (sizes.qk_nope_head_dim + sizes.v_head_dim), bias=False)
        self.o_proj = nn.Linear(heads * sizes.v_head_dim, width, bias)

    @property
    def spec(self) -> LayerSpec:
        """Return what the layer needs of attention; of a sharded model, this rank's part."""
        return self._spec

    def divide(self, ranks: Ranks) -> dict[str, AnyCut]:
        """Keep a rank's heads, and all latents; return the parts of its tensors, by name. Raises Unshardable."""
        sizes, heads = self.latent, self._spec.heads
        self._spec = replace(self._spec, heads=ranks.share(heads, "heads"))
        return {
            "q_b_proj" if self.q_proj is None else "q_proj": ranks.cut(heads * sizes.query),
            "kv_b_proj": ranks.cut(heads * (sizes.qk_nope_head_dim + sizes.v_head_dim)),
            "o_proj": ranks.cut(heads * sizes.v_head_dim, dim=1),
        }

    def absorb(self) -> None:
        """Divide `kv_b_proj` for `forward`, in the dtype of the norms, once its weights are there. Raises UnsupportedAttention."""
        if isinstance(self.kv_b_proj, Absorbed):
            return
        sizes, dtype, read = self.latent, self.kv_a_layernorm.weight.dtype, reader_of(self.kv_b_proj)
        if read is None:
            raise UnsupportedAttention(f"the numbers of kv_b_proj, a {type(self.kv_b_proj).__name__}, cannot be read")
        weight = (read(0, self.kv_b_proj.out_features) * sizes.kv_scale).to(dtype)
        self.kv_b_proj = Absorbed(weight.view(self.spec.heads, -1, sizes.kv_lora_rank), sizes.qk_nope_head_dim)

    def forward(self, states: torch.Tensor, rotation: StepRotation | None, context: StepContext) -> torch.Tensor:
        """Return [T, width] for states [T, width]. rotation: rotates queries and keys; None: they have no positions."""
        sizes, absorbed = self.latent, self.kv_b_proj
        query, latent = self.project(states)
        if self.q_proj is None:
            query = self.q_b_proj(self.q_a_layernorm(query))
        query = torch.unflatten(query, -1, (-1, sizes.query))
        plain, rotated = query[..., : sizes.qk_nope_head_dim], query[..., sizes.qk_nope_head_dim :]
        latent, shared = latent[:, None, : sizes.kv_lora_rank], latent[:, None, sizes.kv_lora_rank :]
        if rotation is not None:
            rotated, shared = rotation(rotated, shared)
        query = torch.cat((absorbed.query(plain), rotated), -1)
        key = torch.cat((self.kv_a_layernorm(latent), shared), -1)
        attended = context.attend(self.index, query, key, key[..., : sizes.kv_lora_rank])
        out: torch.Tensor = self.o_proj(absorbed.value(attended).flatten(1))
        return out
