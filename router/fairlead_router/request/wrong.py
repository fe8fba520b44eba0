"""What is wrong with a body whichever worker reads it. Asked where there is none: nobody waits for a worker, or brings a service back from
zero, to be told that. Else it is the worker's to say, which may be newer than we are.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec

from fairlead_index.dialects import CHAT, COMPLETIONS
from fairlead_index.dialects.chats import is_dialect, read_chat
from fairlead_index.echo import brief
from fairlead_index.pooled import EMBEDDINGS, POOLED
from fairlead_index.prompt import PromptError
from fairlead_router.errors import ApiError


class _Any(msgspec.Struct):
    """The types, as workers have them, of the fields that a router reads itself. Bounds are workers' own."""

    model: str | None = None
    user: str | None = None
    cache_salt: str | None = None
    priority: int | None = None


class _Generating(_Any):
    n: int | None = None
    stream: bool | None = None
    max_tokens: int | None = None


class _Completion(_Generating):
    prompt: str | list[str | int | list[int]] | None = None
    best_of: int | None = None


class _Chat(_Generating):
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    max_completion_tokens: int | None = None


class _Embedding(_Any):
    input: str | list[str | int | list[int]] | None = None


_TYPES: dict[str, type[msgspec.Struct]] = {COMPLETIONS: _Completion, CHAT: _Chat, **dict.fromkeys(POOLED, _Any), EMBEDDINGS: _Embedding}
_NEEDED = {
    COMPLETIONS: ("prompt", "give a string, token ids, or a list of either"),
    CHAT: ("messages", "give a list of messages"),
    EMBEDDINGS: ("input", "give a string, token ids, or a list of either"),
}


@contextmanager
def refused() -> Iterator[None]:
    """What a decoder finds wrong, as an ApiError 400 that names the field."""
    try:
        yield
    except msgspec.ValidationError as error:
        reason, _, field = str(error).rpartition(" - at `$.")
        if not reason:
            raise ApiError(400, "The request body must be a JSON object.") from None
        field = field.rstrip("`")
        raise ApiError(400, f"{field}: {reason[:1].lower()}{brief(reason[1:])}.", param=field) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ApiError(400, f"The request body is not valid JSON: {error}.", code="invalid_json") from None
    except RecursionError:
        raise ApiError(400, "The request body is nested too deeply.", code="invalid_json") from None


def check(path: str, raw: bytes) -> None:
    """Raises ApiError 400 for a body that no worker would take."""
    with refused():
        body = msgspec.json.decode(raw, type=dict[str, Any])
        if is_dialect(path):
            try:
                read_chat(path, raw)
            except PromptError as error:
                raise ApiError(400, f"{error}.", param=error.field) from None
        elif (types := _TYPES.get(path)) is not None:
            msgspec.convert(body, types)
    field, give = _NEEDED.get(path, ("", ""))
    if field and body.get(field) is None:
        raise ApiError(400, f"{field}: is missing; {give}.", param=field)
