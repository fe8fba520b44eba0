"""Checks shared by the protocols. Each error names the field as the client wrote it, and what to do."""

from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

import msgspec

from fairlead_common.errors import PromptError
from fairlead_common.prompts.content_parts import json_type
from fairlead_common.truncate import quote


class SharedFields(msgspec.Struct, frozen=True, kw_only=True):
    """Fields of vLLM and Fairlead that have the same meaning in every protocol. Chat completions validate them."""

    top_k: Any = None
    min_p: Any = None
    repetition_penalty: Any = None
    presence_penalty: Any = None
    frequency_penalty: Any = None
    seed: Any = None
    stop_token_ids: Any = None
    ignore_eos: Any = None
    min_tokens: Any = None
    logit_bias: Any = None
    allowed_token_ids: Any = None
    bad_words: Any = None
    structured_outputs: Any = None
    cache_salt: Any = None
    priority: Any = None
    chat_template_kwargs: Any = None


ABSENT: tuple[Any, ...] = (None, False, [], {})
"""Values of an unsupported field that count as absent."""
SHARED_FIELDS = SharedFields.__struct_fields__


def refuse(field: str, reason: str) -> NoReturn:
    """Raise PromptError."""
    raise PromptError(field, reason)


def check_text(value: Any, field: str) -> str:
    """Return a string value. Raises PromptError for any other type."""
    if not isinstance(value, str):
        refuse(field, f"must be a string, not {json_type(value)}")
    return str(value)


def iterate_objects(value: Any, field: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (name, element) for each element of a list of objects."""
    if not isinstance(value, list):
        refuse(field, f"must be a list, not {json_type(value)}")
    for at, element in enumerate(value):
        if not isinstance(element, dict):
            refuse(f"{field}[{at}]", f"must be an object, not {json_type(element)}")
        yield f"{field}[{at}]", element


def require_text(value: dict[str, Any], name: str, field: str) -> str:
    """Return a required string member of an object."""
    if value.get(name) is None:
        refuse(f"{field}.{name}", "is missing")
    return check_text(value[name], f"{field}.{name}")


def refuse_fields(body: Mapping[str, Any], reasons: Mapping[str, str]) -> None:
    """Refuse unsupported fields."""
    for field, reason in reasons.items():
        if body.get(field) not in ABSENT:
            refuse(field, reason)


def refuse_values(body: Mapping[str, Any], allowed: Mapping[str, tuple[Any, ...]], field: str = "") -> None:
    """Refuse unsupported values of fields of which only some values are supported."""
    for name, values in allowed.items():
        if (given := body.get(name)) is not None and given not in values:
            other = f", or give {' or '.join(map(quote, values))}" if values else ""
            refuse(f"{field}{name}", f"{quote(given)} is not supported; leave it out{other}")
