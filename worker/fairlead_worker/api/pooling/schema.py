"""Bodies of requests that are answered from pooled hidden states."""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from fairlead_worker.api.errors import invalid
from fairlead_worker.api.schema import TokenId

MAX_TEXTS = 2048
"""Limit of one request: OpenAI's bound."""


class PooledRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Fields of all pooling requests. `None` always means that the field is absent."""

    model: str | None = None
    user: Annotated[str, Meta(max_length=256)] | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=256)] | None = None
    priority: Annotated[int, Meta(ge=-(2**31), lt=2**31)] | None = None
    truncate_prompt_tokens: Any = None

    def __post_init__(self) -> None:
        if self.truncate_prompt_tokens is not None:
            raise invalid("truncate_prompt_tokens: not supported; shorten the text", param="truncate_prompt_tokens")


class EmbeddingRequest(PooledRequest, frozen=True, kw_only=True):
    input: str | list[str | TokenId | list[TokenId]] | None = None
    dimensions: Annotated[int, Meta(ge=1)] | None = None
    encoding_format: Literal["float", "base64"] | None = None


class ScoreRequest(PooledRequest, frozen=True, kw_only=True):
    text_1: str | list[str] | None = None
    text_2: str | list[str] | None = None


class Document(msgspec.Struct, frozen=True):
    text: str


class RerankRequest(PooledRequest, frozen=True, kw_only=True):
    query: str | None = None
    documents: list[str | Document] | None = None
    top_n: Annotated[int, Meta(ge=1)] | None = None
    return_documents: bool | None = None
