"""Errors in OpenAI's shape, `{"error": {"message", "type", "param", "code"}}`, or in the shape of the API of the request."""

from fairlead_common.errors import exceeds_context
from fairlead_common.protocols import errors as protocol_errors

RETRY_OTHER = ("x-fairlead-retry", "other")
"""Tells the router that another pod may be able to answer."""
RETRY_LOST = ("x-fairlead-retry", "lost")
"""Tells the router that the engine ended while it had the request. The request may be the cause, so routers count these."""


"""Tells the router that the request left this worker as the router asked, before it started."""


class ApiError(Exception):
    """An error response."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.type = type
        self.param = param
        self.code = code
        self.headers = headers or {}

    def body(self, path: str = "") -> bytes:
        """Return the JSON document in the shape of the API of `path`."""
        return protocol_errors.document(path, self.status, self.message, self.type, self.param, self.code)

    def event(self, path: str = "") -> bytes:
        """Return the last event of a stream that failed, in the shape of the API of `path`."""
        return protocol_errors.event(path, self.body(path))


def invalid(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """Return a 400: the request itself is wrong, and every pod would refuse it."""
    return ApiError(400, message, param=param, code=code)


def too_long(message: str, limit: int, field: str) -> ApiError:
    """Return a 400 for a prompt that exceeds the context length. `field`: the request field of the prompt."""
    return invalid(exceeds_context(limit, message), param=field, code="context_length_exceeded")


def too_large(limit: int) -> ApiError:
    return ApiError(413, f"the request body is larger than {limit} bytes (--limits max_body_bytes)", code="request_too_large")


def unavailable(message: str) -> ApiError:
    """Return a 503: this worker cannot answer now, but another may."""
    return ApiError(503, message, type="server_error", code="unavailable", headers=dict([RETRY_OTHER]))


def busy(message: str, retry_after: int) -> ApiError:
    """Return a 429: this worker's queue is full, but another worker's may not be. `retry_after`: seconds."""
    headers = dict([RETRY_OTHER, ("retry-after", str(retry_after))])
    return ApiError(429, message, type="rate_limit_error", code="queue_full", headers=headers)


def lost(message: str) -> ApiError:
    """Return a 503: the engine ended during this request. Another pod may answer it, or end in the same way."""
    return ApiError(503, message, type="server_error", code="unavailable", headers=dict([RETRY_LOST]))


def failed(message: str) -> ApiError:
    """Return a 500: the engine could not process this request."""
    return ApiError(500, message, type="server_error", code="engine_error")
