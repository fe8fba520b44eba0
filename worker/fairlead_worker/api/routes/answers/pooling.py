"""Responses of embeddings, scores and reranking."""

from typing import Literal

from fairlead_worker.api.routes.answers.base import Answer
from fairlead_worker.api.routes.answers.completions import Usage


class Embedding(Answer):
    """The embedding of one text."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str
    """Values, or little-endian float32 in base64 with `encoding_format: base64`."""


class EmbeddingList(Answer):
    """Embeddings in the order of the input."""

    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: Usage


class PooledData(Answer):
    """The embedding of one text, in vLLM's form."""

    index: int
    object: Literal["pooling"]
    data: list[float] | str
    """Values, or little-endian float32 in base64 with `encoding_format: base64`."""


class PooledList(Answer):
    """Embeddings in the order of the input, in vLLM's form."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[PooledData]
    usage: Usage


class Score(Answer):
    """The score of one pair of texts."""

    object: Literal["score"]
    index: int
    score: float
    """The cosine of the two embeddings."""


class ScoreList(Answer):
    """Scores in the order of the pairs."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Score]
    usage: Usage


class RankedText(Answer):
    """A document's text."""

    text: str


class RankedDocument(Answer):
    """A document and its score."""

    index: int
    """The document's place in the request."""
    relevance_score: float
    document: RankedText | None = None
    """Absent with `return_documents: false`."""


class Ranking(Answer):
    """Documents, the most similar first."""

    id: str
    model: str
    results: list[RankedDocument]
    usage: Usage
