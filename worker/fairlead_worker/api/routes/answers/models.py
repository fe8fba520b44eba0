"""Responses of `GET /v1/models`, in OpenAI's form and in Anthropic's."""

from typing import Literal

from pydantic import RootModel

from fairlead_worker.api.routes.answers.base import Answer


class Model(Answer):
    """A served model or a LoRA adapter."""

    id: str
    """The name for `model` in requests."""
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    """Where the weights came from."""
    parent: str | None = None
    """The model of an adapter."""
    max_model_len: int
    """Context length in tokens."""


class ModelList(Answer):
    """The served models and the LoRA adapters."""

    object: Literal["list"]
    data: list[Model]


class AnthropicModel(Answer):
    """A served model or a LoRA adapter in Anthropic's form."""

    type: Literal["model"]
    id: str
    """The name for `model` in requests."""
    display_name: str
    created_at: str
    """RFC 3339."""
    lifecycle: Literal["active"]
    line: None = None
    deprecated_at: None = None
    retires_at: None = None
    capabilities: None = None
    max_input_tokens: int
    """Context length in tokens."""
    max_tokens: int


class AnthropicModelList(Answer):
    """The served models and the LoRA adapters in Anthropic's form, on one page."""

    data: list[AnthropicModel]
    has_more: Literal[False]
    first_id: str | None = None
    last_id: str | None = None


class AnyModel(RootModel[Model | AnthropicModel]):
    """A served model or a LoRA adapter. The header `anthropic-version` chooses Anthropic's form."""


class AnyModelList(RootModel[ModelList | AnthropicModelList]):
    """The served models and the LoRA adapters. The header `anthropic-version` chooses Anthropic's form."""
