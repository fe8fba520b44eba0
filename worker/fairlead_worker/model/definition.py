"""What all of a family's decoders compute, as data: torch modules (`decoder.py`) and the native library are built from it."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from torch import nn

from fairlead_worker.kernels.base import LayerSpec
from fairlead_worker.model.layers.causal import LLAMA, AttentionNames, HeadNorms
from fairlead_worker.model.layers.latent import LatentSizes
from fairlead_worker.model.layers.norm import RmsNorm
from fairlead_worker.model.layers.rotary import QueryGrowth


class NormNames(NamedTuple):
    """Names of a layer's norms by their place; empty: there is none."""

    before_attention: str = ""
    after_attention: str = ""
    """Of the output of attention, before it is added to the residual."""
    before_mlp: str = ""
    after_mlp: str = ""


BEFORE = NormNames(before_attention="input_layernorm", before_mlp="post_attention_layernorm")
"""Llama and most others."""
AROUND = NormNames("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")
"""Gemma 2 and 3."""
AFTER = NormNames(after_attention="post_attention_layernorm", after_mlp="post_feedforward_layernorm")
"""OLMo 2 and 3."""


class Recurrence(NamedTuple):
    """Layers that keep a state of a request instead of keys and values."""

    name: str
    """Of the layer's part that is in place of attention, or beside it."""
    layers: tuple[bool, ...]
    """Which ones they are."""
    make: Callable[[int, int], nn.Module]
    """Returns that part (`kernels.states.Recurrent`) of a layer, by the layer's number and its number among them."""
    beside: bool = False
    """Whether these layers have attention too, which reads the same norm; the outputs are added together."""
    scale: float = 1.0
    """Factor of its output."""
    activation: str = ""
    """Of its input; empty: the config's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Definition:
    """What a decoder computes. `read` takes the usual fields of a config; a family replaces what differs."""

    config: Any
    """transformers' config, for the frequencies of ropes."""
    width: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    activation: str
    """Of `ACTIVATIONS`."""
    make_norm: Callable[[int], nn.Module]
    """Returns a norm over so many dimensions."""
    norms: NormNames = BEFORE
    head_norms: HeadNorms = "none"
    make_head_norm: Callable[[int], nn.Module] | None = None
    """Returns a norm of `head_norms`; None: `make_norm` does."""
    rotates_first: bool = False
    """Queries and keys are rotated before their norms."""
    gated: bool = False
    """See `CausalAttention`."""
    attends: tuple[bool, ...] | None = None
    """Which layers have attention; None: those that are not recurrent, or all if that part is beside it."""
    attention_name: str = "self_attn"
    attention_names: AttentionNames = LLAMA
    attention_scale: float = 1.0
    """Factor of the output of attention."""
    names: Mapping[str, str] = field(default_factory=dict)
    """Pattern of what checkpoints and adapters call a part -> what it is called here."""
    embedding_name: str = "embed_tokens"
    positions_name: str = ""
    """Of the embedding of positions, which is added to that of tokens; empty: there is none."""
    first_position: int = 0
    """The row of that embedding for a text's first token."""
    norms_embedding: bool = False
    """The last norm, which has no weights, is also of the embedding."""
    norm_name: str = "norm"
    """Of the last norm."""
    recurrence: Recurrence | None = None
    """None: all layers have attention."""
    bias: bool = False
    """Of q, k and v."""
    output_bias: bool = False
    """Of the projection after attention."""
    mlp_bias: bool = False
    head_bias: bool = False
    stacked: bool = False
    """The checkpoint has q, k and v in one matrix, and gate and up in another."""
    by_head: bool = False
    """In that matrix q, k and v of a head follow each other (GPT-NeoX)."""
    transposed: bool = False
    """The checkpoint has the layers' matrices as [inputs, outputs] (GPT-2)."""
    stacked_mlp: bool = False
    """The checkpoint has gate and up in one matrix."""
    make_layer: "Callable[[Definition, int], nn.Module] | None" = None
    """Returns the layer of a number; None: a `DecoderLayer`."""
    make_body: "Callable[[Definition], nn.Module] | None" = None
    """Returns the model without its head; None: a `Body`."""
    plain_mlp: tuple[str, str] | None = None
    """Names of the two matrices of an MLP without a gate; None: it has a gate."""
    make_mlp: Callable[[int], nn.Module | None] | None = None
    """Returns the MLP or experts of a layer, or None if it has none; None: each layer has a `GatedMlp` or `PlainMlp`."""
    mlp_name: str = "mlp"
    shared_mlp: tuple[str, Callable[[], nn.Module]] | None = None
    """Name of a second MLP, whose output is added, and what makes it."""
    parallel: bool = False
    """Attention and MLP read the same residual (GPT-J), by one norm or each by its own; their outputs are added together."""
    windows: tuple[int | None, ...]
    """Of each layer: tokens that a token sees; None: all before it."""
    chunks: tuple[int | None, ...] = ()
    """Of each layer: tokens of the chunks that it attends within; None: no chunks; empty: no layer has any."""
    ropes: tuple[str | None, ...]
    """Of each layer: the kind of its rope in the config's `rope_parameters`; empty: the only one; None: no positions."""
    interleaved: bool = False
    """See `Rope`."""
    backward: bool = False
    """Heads are turned the other way."""
    growth: QueryGrowth | None = None
    """See `Rope`."""
    plain_growth: QueryGrowth | None = None
    """Of queries in layers without positions."""
    partial_rope: bool = False
    """The config's `partial_rotary_factor` counts."""
    scaling: float
    """Factor on query times key."""
    scales_by_layer: bool = False
    """It is divided by the number of the layer, from 1 on."""
    softcap: float | None = None
    """Of the scores: see `LayerSpec`."""
    sinks: bool = False
    latent: LatentSizes | None = None
    """Keys and values are projections of latents; `head_dim` is what is rotated of a head. None: plain keys and values."""
    embedding_scale: float = 1.0
    rounds_embedding_scale: bool = False
    """It is rounded to the dtype of the weights, as transformers' Gemma and MiniCPM 3 keep it."""
    residual_scale: float = 1.0
    """Factor of what a sublayer adds to the residual."""
    wide_residual: bool = False
    """The residual is in float32, whatever the dtype."""
    logits_scale: float = 1.0
    logits_softcap: float | None = None
    """Logits become `cap * tanh(logits / cap)`."""

    @classmethod
    def read(cls, config: Any, **different: Any) -> "Definition":
        """Return a decoder of Llama's shape by transformers' `config`, but for what is `different`."""
        heads, layers = config.num_attention_heads, config.num_hidden_layers
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        bias = bool(getattr(config, "attention_bias", False))
        usual: dict[str, Any] = {
            "config": config,
            "width": config.hidden_size,
            "inner": getattr(config, "intermediate_size", 0),
            "heads": heads,
            "kv_heads": getattr(config, "num_key_value_heads", None) or heads,
            "head_dim": head_dim,
            "activation": getattr(config, "hidden_act", "silu"),
            "bias": bias,
            "output_bias": bias,
            "mlp_bias": bool(getattr(config, "mlp_bias", False)),
            "windows": (None,) * layers,
            "ropes": ("",) * layers,
            "scaling": float(head_dim) ** -0.5,
        }
        if "make_norm" not in different:
            usual["make_norm"] = partial(RmsNorm, eps=config.rms_norm_eps)
        return cls(**(usual | different))

    def spec(self, layer: int) -> LayerSpec:
        if self.latent is not None:
            return LayerSpec(self.heads, 1, self.latent.stored, self.latent.kv_lora_rank, self.scaling, value_in_key=True)
        dim = self.head_dim
        chunk = self.chunks[layer] if self.chunks else None
        scaling = self.scaling / (layer + 1) if self.scales_by_layer else self.scaling
        return LayerSpec(self.heads, self.kv_heads, dim, dim, scaling, self.windows[layer], self.softcap, chunk=chunk)

    @classmethod
    def without_attention(cls, config: Any, **different: Any) -> "Definition":
        """Return a decoder by `config` whose layers are recurrent parts alone."""
        layers = config.num_hidden_layers
        usual: dict[str, Any] = {
            "config": config,
            "width": config.hidden_size,
            **dict.fromkeys(("inner", "heads", "kv_heads", "head_dim"), 0),
            "activation": config.hidden_act,
            "make_mlp": lambda _: None,
            "windows": (None,) * layers,
            "ropes": (None,) * layers,
            "scaling": 1.0,
        }
        return cls(**(usual | different))

    def rename(self, name: str) -> str:
        """Return the name here of a part that a checkpoint or an adapter calls `name`."""
        for theirs, ours in self.names.items():
            name = re.sub(theirs, ours, name)
        return name

    def is_recurrent(self, layer: int) -> bool:
        return self.recurrence is not None and self.recurrence.layers[layer]

    def has_attention(self, layer: int) -> bool:
        if self.attends is not None:
            return self.attends[layer]
        return self.recurrence is None or self.recurrence.beside or not self.recurrence.layers[layer]


def windows_of(config: Any) -> tuple[int | None, ...]:
    """Return each layer's window: the config's in layers of type `sliding_attention`, or in all if layers have no types."""
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers
    window = getattr(config, "sliding_window", None) or None
    return tuple(None if kind == "full_attention" else window for kind in kinds)
