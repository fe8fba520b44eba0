"""Bodies of requests that are answered from pooled hidden states."""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from fairlead_worker.api.errors import invalid
from fairlead_worker.api.schema import InferenceRequest, TokenId

MAX_TEXTS = 2048
"""Limit of one request: OpenAI's bound."""


class EmbeddingRequest(InferenceRequest, frozen=True, kw_only=True):
    input: str | list[str | TokenId | list[TokenId]] | None = None
    messages: list[dict[str, Any]] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None
    chat_template: Annotated[str, Meta(min_length=1)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    dimensions: Annotated[int, Meta(ge=1)] | None = None
    encoding_format: Literal["float", "base64"] | None = None
    embed_dtype: Literal["float32"] | None = None
    endianness: Literal["little", "native"] | None = None
    normalize: bool | None = None
    use_activation: bool | None = None

    def __post_init__(self) -> None:
        for name in ("normalize", "use_activation"):
            if getattr(self, name) is False:
                raise invalid(f"{name}: embeddings always have unit length; leave it out, or give true", param=name)


class ScoreRequest(InferenceRequest, frozen=True, kw_only=True):
    """The two sides under any of their names, as in vLLM."""

    text_1: str | list[str] | None = None
    text_2: str | list[str] | None = None
    data_1: str | list[str] | None = None
    data_2: str | list[str] | None = None
    queries: str | list[str] | None = None
    documents: str | list[str] | None = None
    items: str | list[str] | None = None
    use_activation: bool | None = None


class Document(msgspec.Struct, frozen=True):
    text: str


class RerankRequest(InferenceRequest, frozen=True, kw_only=True):
    query: str | None = None
    documents: list[str | Document] | None = None
    top_n: Annotated[int, Meta(ge=0)] | None = None
    return_documents: bool | None = None
    use_activation: bool | None = None


class ClassifyRequest(InferenceRequest, frozen=True, kw_only=True):
    input: str | list[str | TokenId | list[TokenId]] | None = None
    use_activation: bool | None = None
