"""Errors in OpenAI's shape."""

import msgspec

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


def overloaded(message: str, retry_after: int) -> ApiError:
    return ApiError(429, message, kind="rate_limit_error", code="overloaded", headers=[(b"retry-after", str(retry_after).encode())])
