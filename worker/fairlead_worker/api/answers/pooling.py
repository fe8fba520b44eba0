"""Answers of embeddings, scores, reranking and classification."""

from typing import Literal

from msgspec import UNSET, UnsetType

from fairlead_common.protocols.answer import Answer
from fairlead_worker.api.answers.completions import PromptTokensDetails


class PromptUsage(Answer):
    """Tokens of a request that generates nothing."""

    prompt_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class AnswerList(Answer, kw_only=True):
    """Answers in vLLM's form."""

    id: str
    object: Literal["list"] = "list"
    created: int
    """Unix time in seconds."""
    model: str
    usage: PromptUsage


class Embedding(Answer, tag_field="object", tag="embedding"):
    """The embedding of one text."""

    index: int
    embedding: list[float] | str
    """Values, or little-endian float32 in base64 with `encoding_format: base64`."""


class EmbeddingList(Answer, tag_field="object", tag="list"):
    """Embeddings in the order of the input."""

    data: list[Embedding]
    model: str
    usage: PromptUsage


class PooledData(Answer, kw_only=True):
    """The embedding of one text, in vLLM's form."""

    index: int
    object: Literal["pooling"] = "pooling"
    data: list[float] | str
    """Values, or little-endian float32 in base64 with `encoding_format: base64`."""


class PooledList(AnswerList, kw_only=True):
    """Embeddings in the order of the input, in vLLM's form."""

    data: list[PooledData]


class Score(Answer, kw_only=True):
    """The score of one pair of texts."""

    index: int
    object: Literal["score"] = "score"
    score: float
    """What a reranker says of the pair, else the cosine of the two embeddings."""


class ScoreList(AnswerList, kw_only=True):
    """Scores in the order of the pairs."""

    data: list[Score]


class RankedText(Answer):
    """A document's text."""

    text: str


class RankedDocument(Answer):
    """A document and its score."""

    index: int
    """The document's place in the request."""
    relevance_score: float
    document: RankedText | UnsetType = UNSET
    """Absent with `return_documents: false`."""


class Ranking(Answer):
    """Documents, those with the highest score first."""

    id: str
    model: str
    results: list[RankedDocument]
    usage: PromptUsage


class Classification(Answer):
    """The class of one text."""

    index: int
    label: str
    """The most likely label, by the model's `id2label`."""
    probs: list[float]
    """Of each label, in the model's order; logits with `use_activation: false`."""
    num_classes: int


class ClassificationList(AnswerList, kw_only=True):
    """Classes in the order of the input, in vLLM's form."""

    data: list[Classification]
