"""Errors in the form of each path's API, as a whole response and as a stream's last event, the same in router and worker."""

from typing import Any

import msgspec

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


def document(path: str, status: int, message: str, kind: str, param: str | None = None, code: str | int | None = None) -> bytes:
    """Return the body of an error response. `kind`, `param` and `code` as in OpenAI's API; Anthropic's type follows from `status`."""
    message = truncate(message, MESSAGE_CHARACTERS)
    param = param if param is None else truncate(param)
    if path in (MESSAGES, COUNT_TOKENS):
        kind = _ANTHROPIC.get(status, "invalid_request_error" if status < 500 else "api_error")
        return msgspec.json.encode({"type": "error", "error": {"type": kind, "message": message}})
    return msgspec.json.encode({"error": {"message": message, "type": kind, "param": param, "code": code}})


def event(path: str, document: bytes, sequence_number: int = 0) -> bytes:
    """Return an error document as the last event of a stream. `sequence_number`: used by the Responses API."""
    if path in (MESSAGES, COUNT_TOKENS):
        return EVENT_NAME + b"data: " + document.replace(b"\n", b" ") + b"\n\n"
    if path == RESPONSES:
        fields = {"type": "error", **_event_fields(document), "sequence_number": sequence_number}
        return EVENT_NAME + b"data: " + msgspec.json.encode(fields) + b"\n\n"
    return b"data: " + document.replace(b"\n", b" ") + b"\n\n"


def keep_alive(path: str) -> bytes:
    """Return what a stream sends while its request waits: Anthropic's event, or a comment that SSE clients ignore."""
    return PING if path == MESSAGES else COMMENT


def _event_fields(document: bytes) -> dict[str, Any]:
    """Return the fields of the event `error` from an OpenAI error."""
    try:
        error = msgspec.json.decode(document)["error"]
        return {"code": error.get("code"), "message": str(error["message"]), "param": error.get("param")}
    except (msgspec.DecodeError, KeyError, TypeError, AttributeError):  # from another kind of worker
        return {"code": None, "message": document.decode(errors="replace")[:2000], "param": None}
