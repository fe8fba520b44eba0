"""Zamba 2 (Glorioso et al. 2024): Mamba 2 layers. Before some, a transformer block reads the residual beside the embedding.

These layers share a few blocks. Each use of a block has its own low-rank additions to the block's matrices.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from fairlead_worker.kernels.base import LayerSpec, StepContext
from fairlead_worker.model.decoder import Body
from fairlead_worker.model.definition import Definition, NormNames, Recurrence
from fairlead_worker.model.layers.causal import CausalAttention
from fairlead_worker.model.layers.mamba2 import Mamba2, Mamba2Shape
from fairlead_worker.model.layers.mlp import ACTIVATIONS, GatedMlp
from fairlead_worker.model.layers.rotary import StepRotation
from fairlead_worker.sharding.shards import Ranks, Unshardable


class ZambaAttention(CausalAttention):
    """Attention of a block. Its input is as wide as the residual and the embedding together."""

    def __init__(self, definition: Definition, block: int) -> None:
        config, width = definition.config, definition.config.attention_hidden_size
        spec = LayerSpec(definition.heads, definition.kv_heads, definition.head_dim, definition.head_dim, definition.scaling)
        super().__init__(
            width, block, spec, definition.make_norm, bias=False, output_bias=False, stacked=False, sinks=False, head_norms="none"
        )
        self.o_proj = nn.Linear(width, definition.width, bias=False)
        self.adapters = ["linear_q_adapter_list", "linear_k_adapter_list", "linear_v_adapter_list"] * config.use_shared_attention_adapter
        for name in self.adapters:
            self.add_module(name, _make_adapters(config, block, width, width))

    def divide(self, ranks: Ranks) -> Any:
        """Raise Unshardable: a rank would need a part of each addition."""
        raise Unshardable("blocks that layers share are not divided")

    def attend(self, states: torch.Tensor, rotation: StepRotation | None, context: StepContext, use: int) -> torch.Tensor:
        """Return [T, width of the residual] for states [T, width]. use: number among the layers with attention."""
        parts = self.project(states)
        if self.adapters:
            parts = [part + getattr(self, name)[use](states) for part, name in zip(parts, self.adapters, strict=True)]
        query, key, value = (torch.unflatten(part, -1, (-1, self.head_dim)) for part in parts)
        if rotation is not None:
            query, key = rotation(query, key)
        attended: torch.Tensor = self.o_proj(context.attend(use, query, key, value).flatten(1))
        return attended


class ZambaBlock(nn.Module):
    """A transformer block that layers share. It has no residual of its own."""

    def __init__(self, definition: Definition, block: int) -> None:
        super().__init__()
        config, width, inner = definition.config, definition.width, definition.inner
        self.self_attn, self.input_layernorm = ZambaAttention(definition, block), definition.make_norm(config.attention_hidden_size)
        self.feed_forward = GatedMlp(width, inner, definition.activation, stacked=True)
        self.feed_forward.gate_up_proj_adapter_list = _make_adapters(config, block, width, 2 * inner)
        self.pre_ff_layernorm = definition.make_norm(width)

    def forward(self, states: torch.Tensor, rotation: StepRotation | None, context: StepContext, use: int) -> torch.Tensor:
        """Return [T, width] for states [T, 2 * width]. use: as of `ZambaAttention.attend`."""
        states = self.pre_ff_layernorm(self.self_attn.attend(self.input_layernorm(states), rotation, context, use))
        mlp: Any = self.feed_forward
        gate, up = (mlp.gate_up_proj(states) + mlp.gate_up_proj_adapter_list[use](states)).chunk(2, -1)
        out: torch.Tensor = mlp.down_proj(ACTIVATIONS[mlp.activation](gate) * up)
        return out


class ZambaBody(Body):
    """A decoder whose layers share blocks."""

    def __init__(self, definition: Definition) -> None:
        super().__init__(definition)
        self.uses: list[int] = definition.config.hybrid_layer_ids
        self.blocks = nn.ModuleList(ZambaBlock(definition, block) for block in range(definition.config.num_mem_blocks))
        for layer in self.uses:
            self.layers[layer].linear = nn.Linear(definition.width, definition.width, bias=False)

    def attentions(self) -> Iterator[tuple[int, Any]]:
        for use, layer in enumerate(self.uses):
            yield layer, self._block(use).self_attn

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor, context: StepContext) -> torch.Tensor:
        residual = embedded = self.embed(tokens, positions)
        rotation = self.ropes[""].at(positions) if self.ropes else None
        layer: Any
        for index, layer in enumerate(self.layers):
            states = residual
            if index in self.uses:
                use = self.uses.index(index)
                states = states + layer.linear(self._block(use)(torch.cat((residual, embedded), -1), rotation, context, use))
            residual = residual + layer.recurrent(layer.input_layernorm(states), context)
        out: torch.Tensor = self.last_norm(residual)
        return out

    def _block(self, use: int) -> Any:
        return self.blocks[use % len(self.blocks)]


def zamba2(config: Any) -> Definition | None:
    if config.add_bias_linear or not config.tie_word_embeddings:  # transformers' layers share blocks only if the head is tied
        return None
    layers = config.num_hidden_layers
    shape = Mamba2Shape(
        width=config.hidden_size,
        heads=config.n_mamba_heads,
        head_dim=config.mamba_headdim,
        state=config.mamba_d_state,
        groups=config.mamba_ngroups,
        convolution=config.mamba_d_conv,
        convolution_bias=True,
        bias=False,
        output_bias=False,
        eps=1e-5,
        limit=(config.time_step_min, float("inf")),
    )
    firsts = enumerate(config.hybrid_layer_ids[: config.num_mem_blocks])
    return Definition.read(
        config,
        names={r"\.mamba_decoder\.": ".", **{rf"layers\.{layer}\.shared_transformer\.": f"blocks.{block}." for block, layer in firsts}},
        make_body=ZambaBody,
        make_mlp=lambda _: None,
        norms=NormNames(before_attention="input_layernorm"),
        norm_name="final_layernorm",
        attends=(False,) * layers,
        scaling=(config.attention_head_dim / 2) ** -0.5,
        ropes=("" if config.use_mem_rope else None,) * layers,
        recurrence=Recurrence("mamba", (True,) * layers, lambda _, index: Mamba2(shape, index), activation="silu"),
    )


def _make_adapters(config: Any, block: int, inputs: int, outputs: int) -> nn.ModuleList:
    """Return an addition for each use of any block, without weights where it is not of `block`."""
    rank = config.adapter_rank
    return nn.ModuleList(
        nn.Sequential(nn.Linear(inputs, rank, bias=False), nn.Linear(rank, outputs, bias=False))
        if use % config.num_mem_blocks == block
        else nn.Identity()
        for use in range(len(config.hybrid_layer_ids))
    )
