"""Requests for embeddings and scores: tokens_of count, and no prefix is foretold, for a mean takes nothing from the cache."""

from array import array
from collections.abc import Callable
from typing import Any, Protocol


class Fields(Protocol):
    """Of a body, as the client wrote them: any type."""

    input: Any
    text_1: Any
    text_2: Any
    query: Any
    documents: Any


def count_texts(body: Fields) -> int:
    """How many count_texts are asked about."""
    return max(1, sum(map(_count, (body.input, body.text_1, body.text_2, body.query, body.documents))))


def tokens_of(body: Fields, encode: "Callable[[str], array[int]]") -> "array[int] | None":
    """Of the one text of an embedding; None where there are several, or where it is the worker's to say what is wrong."""
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
