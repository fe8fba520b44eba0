"""Error answers, in OpenAI's format or in that of the path's API."""

from fairlead_common.protocols import errors as protocol_errors

Headers = list[tuple[bytes, bytes]]
SHUTTING_DOWN = "This router is shutting down. Try again at once."
"""Message of a 503: the Service sends the next connection to another router."""


class ListenError(Exception):
    """The router cannot listen on a port. The message names the flag, the port and the cause."""


class ApiError(Exception):
    """Error answer: status, OpenAI's fields, and extra headers. `body` holds it in OpenAI's format."""

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
        self.param, self._kind = param, kind
        self.body = self.document("")

    def document(self, path: str) -> bytes:
        """Return the error in the format of the API that `path` belongs to."""
        return protocol_errors.document(path, self.status, str(self), self._kind, self.param, self.code)


def unavailable(message: str, retry_after: int) -> ApiError:
    return ApiError(
        503, message, kind="service_unavailable_error", code="service_unavailable", headers=[(b"retry-after", str(retry_after).encode())]
    )


def overloaded(message: str, retry_after: int) -> ApiError:
    return ApiError(429, message, kind="rate_limit_error", code="overloaded", headers=[(b"retry-after", str(retry_after).encode())])
