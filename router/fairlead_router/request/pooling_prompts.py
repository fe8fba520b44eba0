"""Prompts of embedding and scoring requests.

Only their token count matters: a mean over all tokens cannot use cached KV, so no prefix match is predicted.
"""

from array import array
from collections.abc import Callable
from typing import Any, Protocol


class Fields(Protocol):
    """Fields of a request body, of any type: they are not validated."""

    input: Any
    text_1: Any
    text_2: Any
    data_1: Any
    data_2: Any
    query: Any
    queries: Any
    documents: Any
    items: Any
    truncate_prompt_tokens: Any


_TEXTS = ("input", "text_1", "text_2", "data_1", "data_2", "query", "queries", "documents", "items")


def count_texts(body: Fields) -> int:
    """Return the number of texts in the request."""
    return max(1, sum(_count(getattr(body, name)) for name in _TEXTS))


def tokens_of(body: Fields, encode: "Callable[[str], array[int]]") -> "array[int] | None":
    """Return the token ids of an embedding's only text; None for several texts, a truncated one, or an invalid body."""
    given = body.input if body.truncate_prompt_tokens is None else None
    if isinstance(given, list) and len(given) == 1 and isinstance(given[0], str | list):
        given = given[0]
    if isinstance(given, str):
        return encode(given) if given else None
    if isinstance(given, list) and given and set(map(type, given)) == {int}:
        return array("I", given)
    return None


def _count(given: Any) -> int:
    if isinstance(given, list):
        return len(given) if given and isinstance(given[0], str | list | dict) else 1
    return given is not None
