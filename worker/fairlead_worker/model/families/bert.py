"""BERT (Devlin et al. 2018) and RoBERTa, XLM-RoBERTa and CamemBERT, which differ in their positions and in the names of their heads."""

from typing import Any, ClassVar

import torch
from torch import nn

from fairlead_worker.model.layers.attention import Attention
from fairlead_worker.model.layers.mlp import ACTIVATIONS, PlainMlp
from fairlead_worker.model.layers.texts import PackedTexts


class Bert(nn.Module):
    """An encoder whose norms follow its sublayers, with an optional head."""

    NAMES: ClassVar[dict[str, tuple[str, ...]]] = {
        "words.": ("embeddings.word_embeddings.",),
        "places.": ("embeddings.position_embeddings.",),
        "types.": ("embeddings.token_type_embeddings.",),
        "embedding_norm.": ("embeddings.LayerNorm.",),
        "layers.": ("encoder.layer.",),
        ".attention.qkv.": (".attention.self.query.", ".attention.self.key.", ".attention.self.value."),
        ".attention.output.": (".attention.output.dense.",),
        ".attention_norm.": (".attention.output.LayerNorm.",),
        ".mlp.up.": (".intermediate.dense.",),
        ".mlp.down.": (".output.dense.",),
        ".mlp_norm.": (".output.LayerNorm.",),
        "head.dense.": ("pooler.dense.",),
        "head.output.": ("classifier.",),
    }
    PREFIX = "bert."

    def __init__(self, config: Any, labels: int) -> None:
        """`labels`: outputs of the head; 0: no head."""
        super().__init__()
        width, eps = config.hidden_size, config.layer_norm_eps
        self.words = nn.Embedding(config.vocab_size, width)
        self.places = nn.Embedding(config.max_position_embeddings, width)
        self.types = nn.Embedding(config.type_vocab_size, width)
        self.embedding_norm = nn.LayerNorm(width, eps)
        self.layers = nn.ModuleList(BertLayer(config) for _ in range(config.num_hidden_layers))
        self.head = BertHead(width, labels) if labels else None
        self.first_position = 0

    @property
    def max_length(self) -> int:
        """Tokens of the longest text."""
        return self.places.num_embeddings - self.first_position

    @staticmethod
    def refuse(config: Any) -> str:
        """Return what of `config` is not supported; empty: all is."""
        if (kind := getattr(config, "position_embedding_type", None) or "absolute") != "absolute":
            return f"position_embedding_type {kind!r}"
        if config.is_decoder:
            return "is_decoder true"
        return "" if config.hidden_act in ACTIVATIONS else f"hidden_act {config.hidden_act!r}"

    def forward(self, texts: PackedTexts) -> torch.Tensor:
        """Return hidden states [tokens, width]."""
        types = self.types(texts.types) if self.types.num_embeddings > 1 else self.types.weight[0]
        states: torch.Tensor = self.embedding_norm(self.words(texts.tokens) + types + self.places(texts.positions + self.first_position))
        for layer in self.layers:
            states = layer(states, texts)
        return states

    def classify(self, states: torch.Tensor, texts: PackedTexts) -> torch.Tensor:
        """Return logits [texts, labels] from hidden states [tokens, width]."""
        assert self.head is not None, "the model has a head"
        logits: torch.Tensor = self.head(texts.pool(states, "cls").to(states.dtype))
        return logits


class BertLayer(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.attention = Attention(config.hidden_size, config.num_attention_heads)
        self.attention_norm = nn.LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.mlp = PlainMlp(config.hidden_size, config.intermediate_size, config.hidden_act, True, ("up", "down"))
        self.mlp_norm = nn.LayerNorm(config.hidden_size, config.layer_norm_eps)

    def forward(self, states: torch.Tensor, texts: PackedTexts) -> torch.Tensor:
        """Return [tokens, width] for states [tokens, width]."""
        states = self.attention_norm(states + self.attention(states, texts))
        out: torch.Tensor = self.mlp_norm(states + self.mlp(states))
        return out


class BertHead(nn.Module):
    """BERT's pooler and classifier, and RoBERTa's classification head: the same function of the first token."""

    def __init__(self, width: int, labels: int) -> None:
        super().__init__()
        self.dense = nn.Linear(width, width)
        self.output = nn.Linear(width, labels)

    def forward(self, pooled: torch.Tensor) -> torch.Tensor:
        """Return [texts, labels] for [texts, width]."""
        logits: torch.Tensor = self.output(self.dense(pooled).tanh())
        return logits


class Roberta(Bert):
    """BERT with positions that begin after the padding token's id."""

    NAMES: ClassVar[dict[str, tuple[str, ...]]] = {
        **Bert.NAMES,
        "head.dense.": ("classifier.dense.",),
        "head.output.": ("classifier.out_proj.",),
    }
    PREFIX = "roberta."

    def __init__(self, config: Any, labels: int) -> None:
        super().__init__(config, labels)
        self.first_position = config.pad_token_id + 1
