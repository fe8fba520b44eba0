"""ModernBERT (Warner et al. 2024): rotary positions, local attention between global layers, gated MLPs, norms before the sublayers."""

from typing import Any, ClassVar

import torch
from torch import nn

from fairlead_worker.model.layers.attention import Attention
from fairlead_worker.model.layers.mlp import ACTIVATIONS, GatedMlp, MlpNames
from fairlead_worker.model.layers.rotary import Rope, StepRotation
from fairlead_worker.model.layers.texts import PackedTexts
from fairlead_worker.model.rope import find_frequencies


class ModernBert(nn.Module):
    """An encoder with an optional head."""

    NAMES: ClassVar[dict[str, tuple[str, ...]]] = {
        "words.": ("embeddings.tok_embeddings.",),
        "embedding_norm.": ("embeddings.norm.",),
        ".attention.qkv.": (".attn.Wqkv.",),
        ".attention.output.": (".attn.Wo.",),
        ".attention_norm.": (".attn_norm.",),
        ".mlp.up.": (".mlp.Wi.",),
        ".mlp.down.": (".mlp.Wo.",),
        "head.output.": ("classifier.",),
    }
    PREFIX = "model."

    def __init__(self, config: Any, labels: int) -> None:
        """`labels`: outputs of the head; 0: no head."""
        super().__init__()
        width = config.hidden_size
        self.words = nn.Embedding(config.vocab_size, width)
        self.embedding_norm = _norm(config)
        self.layers = nn.ModuleList(ModernBertLayer(config, kind, number > 0) for number, kind in enumerate(config.layer_types))
        self.final_norm = _norm(config)
        self.head = ModernBertHead(config, labels) if labels else None
        self.head_dim = width // config.num_attention_heads
        self.config = config
        self.max_length = int(config.max_position_embeddings)
        """Tokens of the longest text."""

    @staticmethod
    def refuse(config: Any) -> str:
        """Return what of `config` is not supported; empty: all is."""
        for kind in set(config.layer_types):
            if (rope := config.rope_parameters[kind]["rope_type"]) != "default":
                return f"rope_type {rope!r}"
        unknown = {config.hidden_activation, config.classifier_activation} - ACTIVATIONS.keys()
        return f"activation {min(unknown)!r}" if unknown else ""

    def forward(self, texts: PackedTexts) -> torch.Tensor:
        """Return hidden states [tokens, width]."""
        rotations = {}
        for kind in set(self.config.layer_types):
            frequencies, scale = find_frequencies(self.config, kind, self.head_dim, False, self.max_length)
            rotations[kind] = Rope(frequencies.to(texts.positions.device), scale).at(texts.positions)
        states = self.embedding_norm(self.words(texts.tokens))
        for layer in self.layers:
            states = layer(states, texts, rotations[layer.kind])
        out: torch.Tensor = self.final_norm(states)
        return out

    def classify(self, states: torch.Tensor, texts: PackedTexts) -> torch.Tensor:
        """Return logits [texts, labels] from hidden states [tokens, width]."""
        assert self.head is not None, "the model has a head"
        logits: torch.Tensor = self.head(texts.pool(states, self.head.pooling).to(states.dtype))
        return logits


class ModernBertLayer(nn.Module):
    def __init__(self, config: Any, kind: str, has_norm: bool) -> None:
        """`has_norm`: the first layer has no norm before its attention, because the embeddings are normalised."""
        super().__init__()
        self.kind = kind
        window = config.sliding_window if kind == "sliding_attention" else None
        self.attention_norm = _norm(config) if has_norm else nn.Identity()
        self.attention = Attention(config.hidden_size, config.num_attention_heads, config.attention_bias, window)
        self.mlp_norm = _norm(config)
        names, inner = MlpNames(stack="up", down="down"), config.intermediate_size
        self.mlp = GatedMlp(config.hidden_size, inner, config.hidden_activation, config.mlp_bias, stacked=True, names=names)

    def forward(self, states: torch.Tensor, texts: PackedTexts, rotation: StepRotation) -> torch.Tensor:
        """Return [tokens, width] for states [tokens, width]."""
        states = states + self.attention(self.attention_norm(states), texts, rotation)
        out: torch.Tensor = states + self.mlp(self.mlp_norm(states))
        return out


class ModernBertHead(nn.Module):
    def __init__(self, config: Any, labels: int) -> None:
        super().__init__()
        self.pooling = config.classifier_pooling
        self.dense = nn.Linear(config.hidden_size, config.hidden_size, config.classifier_bias)
        self.activation = ACTIVATIONS[config.classifier_activation]
        self.norm = _norm(config)
        self.output = nn.Linear(config.hidden_size, labels)

    def forward(self, pooled: torch.Tensor) -> torch.Tensor:
        """Return [texts, labels] for [texts, width]."""
        logits: torch.Tensor = self.output(self.norm(self.activation(self.dense(pooled))))
        return logits


def _norm(config: Any) -> nn.LayerNorm:
    return nn.LayerNorm(config.hidden_size, config.norm_eps, bias=config.norm_bias)
