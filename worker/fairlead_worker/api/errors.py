"""Errors in OpenAI's shape, `{"error": {"message", "type", "param", "code"}}`, or in that of the API that was asked."""

from fairlead_common.protocols import errors as protocol_errors

RETRY_OTHER = ("x-fairlead-retry", "other")
"""Tells the router that another pod may well answer."""
RETRY_LOST = ("x-fairlead-retry", "lost")
"""... and that the engine ended while it had the request, which may be the cause: routers count these."""


class ApiError(Exception):
    """An answer that is not a completion."""

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
        """The document, as the API of `path` has it."""
        return protocol_errors.document(path, self.status, self.message, self.type, self.param, self.code)

    def event(self, path: str = "") -> bytes:
        """The last event of a stream that broke."""
        return protocol_errors.event(path, self.body(path))


def invalid(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """The request is wrong in itself; no pod would take it."""
    return ApiError(400, message, param=param, code=code)


def too_long(message: str, limit: int, field: str) -> ApiError:
    """`field`: the one that the prompt came in."""
    return invalid(f"this model's context holds {limit} tokens, but {message}", param=field, code="context_length_exceeded")


def too_large(limit: int) -> ApiError:
    return ApiError(413, f"the request body is larger than {limit} bytes (--max-body-bytes)", code="request_too_large")


def unavailable(message: str) -> ApiError:
    """This worker cannot answer now; another may."""
    return ApiError(503, message, type="server_error", code="unavailable", headers=dict([RETRY_OTHER]))


def busy(message: str, retry_after: int) -> ApiError:
    """This worker's queue is full; another's may not be."""
    headers = dict([RETRY_OTHER, ("retry-after", str(retry_after))])
    return ApiError(429, message, type="rate_limit_error", code="queue_full", headers=headers)


def lost(message: str) -> ApiError:
    """The engine ended under this request; another pod may answer it, or end the same way."""
    return ApiError(503, message, type="server_error", code="unavailable", headers=dict([RETRY_LOST]))


def failed(message: str) -> ApiError:
    """The engine could not do this request."""
    return ApiError(500, message, type="server_error", code="engine_error")
