"""Errors in the form of each path's API, as a whole response and as a stream's last event, the same in router and worker."""

from typing import Literal

import msgspec

from fairlead_common.protocols.answer import Answer
from fairlead_common.protocols.paths import COUNT_TOKENS, MESSAGES, RESPONSES
from fairlead_common.truncate import MESSAGE_CHARACTERS, truncate

_ANTHROPIC = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}
EVENT_NAME = b"event: error\n"
"""Start of a failed stream's last event, in protocols with event names."""
PING = b'event: ping\ndata: {"type":"ping"}\n\n'
COMMENT = b": held\n\n"


class ErrorFields(Answer):
    """What is wrong, and what to do."""

    message: str
    """Names the field and the fix."""
    type: str
    """`invalid_request_error`, `rate_limit_error`, `permission_error` or `server_error`."""
    param: str | None = None
    """The field of the request, if the error is about one."""
    code: str | int | None = None
    """A code that does not change, such as `context_length_exceeded`."""


class Error(Answer):
    """An error in OpenAI's form, and the last event of a stream that failed."""

    error: ErrorFields


class MessagesErrorFields(Answer):
    """What is wrong, and what to do."""

    type: str
    """Anthropic's name of the status, such as `invalid_request_error` or `overloaded_error`."""
    message: str
    """Names the field and the fix."""


class MessagesError(Answer, tag="error"):
    """An error in Anthropic's form, and the last event of a stream that failed."""

    error: MessagesErrorFields


class ErrorEvent(Answer, kw_only=True):
    """A stream of the Responses API failed. If the response had begun, `response.failed` follows."""

    type: Literal["error"] = "error"
    code: str | int | None = None
    message: str
    param: str | None = None
    sequence_number: int = 0


def document(path: str, status: int, message: str, kind: str, param: str | None = None, code: str | int | None = None) -> bytes:
    """Return the body of an error response. `kind`, `param` and `code` as in OpenAI's API; Anthropic's type follows from `status`."""
    message = truncate(message, MESSAGE_CHARACTERS)
    param = param if param is None else truncate(param)
    if path in (MESSAGES, COUNT_TOKENS):
        kind = _ANTHROPIC.get(status, "invalid_request_error" if status < 500 else "api_error")
        return msgspec.json.encode(MessagesError(MessagesErrorFields(kind, message)))
    return msgspec.json.encode(Error(ErrorFields(message, kind, param, code)))


def event(path: str, document: bytes, sequence_number: int = 0) -> bytes:
    """Return an error document as the last event of a stream. `sequence_number`: used by the Responses API."""
    if path in (MESSAGES, COUNT_TOKENS):
        return EVENT_NAME + b"data: " + document.replace(b"\n", b" ") + b"\n\n"
    if path == RESPONSES:
        return EVENT_NAME + b"data: " + msgspec.json.encode(_error_event(document, sequence_number)) + b"\n\n"
    return b"data: " + document.replace(b"\n", b" ") + b"\n\n"


def keep_alive(path: str) -> bytes:
    """Return what a stream sends while its request waits: Anthropic's event, or a comment that SSE clients ignore."""
    return PING if path == MESSAGES else COMMENT


def _error_event(document: bytes, sequence_number: int) -> ErrorEvent:
    """Return an error in OpenAI's form as an event. A worker of another kind may answer in another form."""
    try:
        error = msgspec.json.decode(document, type=Error).error
    except msgspec.DecodeError:
        return ErrorEvent(message=document.decode(errors="replace")[:2000], sequence_number=sequence_number)
    return ErrorEvent(code=error.code, message=error.message, param=error.param, sequence_number=sequence_number)
