"""Errors in OpenAI's shape."""

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import msgspec

Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Headers = list[tuple[bytes, bytes]]


class ApiError(Exception):
    """An answer that is an error: status, OpenAI's fields, and headers of its own."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: Headers | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.headers = headers or []
        self.body = error_body(message, kind, param, code)


def error_body(message: str, kind: str, param: str | None = None, code: str | int | None = None) -> bytes:
    return msgspec.json.encode({"error": {"message": message, "type": kind, "param": param, "code": code}})


def unavailable(message: str, retry_after: int) -> ApiError:
    return ApiError(
        503, message, kind="service_unavailable_error", code="service_unavailable", headers=[(b"retry-after", str(retry_after).encode())]
    )


async def answer(send: Send, status: int, body: bytes, headers: Headers, content_type: bytes = b"application/json") -> None:
    """One whole, small answer."""
    fixed = [(b"content-type", content_type), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": fixed + headers})
    await send({"type": "http.response.body", "body": body})
