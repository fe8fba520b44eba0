"""`GET /v1/models` in OpenAI's form and in Anthropic's, whose clients name themselves with the header `anthropic-version`."""

import time
from collections.abc import Sequence
from typing import Literal

from msgspec import UNSET, UnsetType

from fairlead_common.protocols.answer import Answer

ANTHROPIC_VERSION = b"anthropic-version"


class Model(Answer, kw_only=True):
    """A served model or a LoRA adapter."""

    id: str
    """The name for `model` in requests."""
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "fairlead"
    root: str | UnsetType = UNSET
    """Where the weights came from. A router does not know it of another service's model."""
    parent: str | UnsetType | None = UNSET
    """The model of an adapter."""
    max_model_len: int | UnsetType | None = UNSET
    """Context length in tokens."""


class ModelList(Answer, tag_field="object", tag="list"):
    """The served models and the LoRA adapters."""

    data: Sequence[Model]


class AnthropicModel(Answer, kw_only=True, tag="model"):
    """A served model or a LoRA adapter in Anthropic's form."""

    id: str
    """The name for `model` in requests."""
    display_name: str
    created_at: str
    """RFC 3339."""
    lifecycle: Literal["active"] = "active"
    line: None = None
    deprecated_at: None = None
    retires_at: None = None
    capabilities: None = None
    max_input_tokens: int | UnsetType | None = UNSET
    """Context length in tokens."""
    max_tokens: int | UnsetType | None = UNSET


class AnthropicModelList(Answer, kw_only=True):
    """The served models and the LoRA adapters in Anthropic's form, on one page."""

    data: list[AnthropicModel]
    has_more: Literal[False] = False
    first_id: str | None
    last_id: str | None


def to_anthropic_model(model: Model) -> AnthropicModel:
    return AnthropicModel(
        id=model.id,
        display_name=model.id,
        created_at=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(model.created)),
        max_input_tokens=model.max_model_len,
        max_tokens=model.max_model_len,
    )


def to_anthropic_list(models: Sequence[Model]) -> AnthropicModelList:
    """Return one page with all models."""
    data = [to_anthropic_model(model) for model in models]
    first, last = (data[0].id, data[-1].id) if data else (None, None)
    return AnthropicModelList(data=data, first_id=first, last_id=last)
