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
    query: Any
    documents: Any


def count_texts(body: Fields) -> int:
    """Return the number of texts in the request."""
    return max(1, sum(map(_count, (body.input, body.text_1, body.text_2, body.query, body.documents))))


def tokens_of(body: Fields, encode: "Callable[[str], array[int]]") -> "array[int] | None":
    """Return the token ids of an embedding's only text; None for several texts or an invalid body, which the worker refuses."""
    given = body.input
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
