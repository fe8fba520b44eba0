"""Anthropic's form of `GET /v1/models`. Its clients name themselves with the header `anthropic-version`."""

import time
from collections.abc import Sequence
from typing import Any

ANTHROPIC_VERSION = b"anthropic-version"


def to_anthropic_model(model: dict[str, Any]) -> dict[str, Any]:
    """Return OpenAI's model object, with vLLM's `max_model_len`, as Anthropic's."""
    return {
        "type": "model",
        "id": model["id"],
        "display_name": model["id"],
        "created_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(model["created"])),
        "lifecycle": "active",
        "line": None,
        "deprecated_at": None,
        "retires_at": None,
        "capabilities": None,
        "max_input_tokens": model["max_model_len"],
        "max_tokens": model["max_model_len"],
    }


def to_anthropic_list(models: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return one page with all models. `models`: OpenAI's model objects."""
    data = [to_anthropic_model(model) for model in models]
    first, last = (data[0]["id"], data[-1]["id"]) if data else (None, None)
    return {"data": data, "has_more": False, "first_id": first, "last_id": last}
