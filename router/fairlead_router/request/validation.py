"""Validation of bodies that every worker would refuse, used only while there is no worker.

An invalid request must neither wait for a worker nor scale a service up from zero. Otherwise the worker validates, since its version may
be newer than the router's.
"""

from typing import Any, Final

import msgspec

from fairlead_common.errors import exceeds_context, too_many_tokens
from fairlead_common.json_size import JsonTooLarge, read_float
from fairlead_common.prompts.encoder import PromptError
from fairlead_common.protocols.chats import needs_conversion, read_chat
from fairlead_common.protocols.paths import CHAT, COMPLETIONS, EMBEDDINGS, POOLED
from fairlead_common.protocols.responses import PREVIOUS
from fairlead_common.truncate import truncate
from fairlead_router.errors import ApiError


class _Request(msgspec.Struct):
    """Types of the fields that the router reads, as the workers have them. Workers check the bounds."""

    model: str | None = None
    user: str | None = None
    cache_salt: str | None = None
    priority: int | None = None


class _Generating(_Request):
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


class _Embedding(_Request):
    input: str | list[str | int | list[int]] | None = None


_TYPES: dict[str, type[msgspec.Struct]] = {COMPLETIONS: _Completion, CHAT: _Chat, **dict.fromkeys(POOLED, _Request), EMBEDDINGS: _Embedding}
_NEEDED = {
    COMPLETIONS: ("prompt", "give a string, token ids, or a list of either"),
    CHAT: ("messages", "give a list of messages"),
    EMBEDDINGS: ("input", "give a string, token ids, a list of either, or messages"),
}


DECODING: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""Exceptions of the decoders."""


_DECODER: Final = msgspec.json.Decoder(dict[str, Any], float_hook=read_float)


def decode_error(error: Exception) -> ApiError:
    """Return a decoder's error as a 400 that names the field. `error`: one of DECODING."""
    if isinstance(error, msgspec.ValidationError):
        reason, _, field = str(error).rpartition(" - at `$.")
        if not reason:
            return ApiError(400, "The request body must be a JSON object.")
        field = field.rstrip("`")
        return ApiError(400, f"{field}: {reason[:1].lower()}{truncate(reason[1:])}.", param=field)
    if isinstance(error, RecursionError):
        return ApiError(400, "The request body is nested too deeply.", code="invalid_json")
    return ApiError(400, f"The request body is not valid JSON: {error}.", code="invalid_json")


def too_large(error: JsonTooLarge) -> ApiError:
    return ApiError(400, f"The request body is too large to decode: {error}.", code="request_too_large")


def too_long(path: str, min_tokens: int, longest: int) -> ApiError:
    """Return a 400 for a prompt of at least `min_tokens` tokens where `longest` are possible, as workers answer it."""
    field = {COMPLETIONS: "prompt", EMBEDDINGS: "input"}.get(path, "messages")
    return ApiError(400, exceeds_context(longest, too_many_tokens(min_tokens)), param=field, code="context_length_exceeded")


def check(path: str, raw: bytes) -> None:
    """Raise ApiError 400 for a body that no worker would accept. Its size is one that `check_json` allows."""
    try:
        body = _DECODER.decode(raw)
        if needs_conversion(path):
            try:
                read_chat(path, raw)
            except PromptError as error:
                if error.field == PREVIOUS:  # only a worker can read stored responses
                    return
                raise ApiError(400, f"{error}.", param=error.field) from None
        elif (types := _TYPES.get(path)) is not None:
            msgspec.convert(body, types)
    except DECODING as error:
        raise decode_error(error) from None
    field, give = _NEEDED.get(path, ("", ""))
    if field and body.get(field) is None and (path != EMBEDDINGS or body.get("messages") is None):
        raise ApiError(400, f"{field}: is missing; {give}.", param=field)
