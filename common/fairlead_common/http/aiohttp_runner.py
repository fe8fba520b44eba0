"""aiohttp's runner for servers of few clients. A request that cannot be parsed gets a short answer and one line in the log.

aiohttp logs a traceback, and quotes a part of the request in it and in its answer. That part may be a secret.
"""

import logging

from aiohttp import web
from aiohttp.http_exceptions import BadHttpMessage, LineTooLong

logger = logging.getLogger(__name__)


class Runner(web.AppRunner):
    """Runs an application, as `web.AppRunner` does."""

    async def _make_server(self) -> web.Server:
        made = await super()._make_server()
        return _Server(
            made.request_handler, request_factory=made.request_factory, handler_cancellation=made.handler_cancellation, **made._kwargs
        )


class _Server(web.Server):
    def __call__(self) -> web.RequestHandler:
        return _Connection(self, loop=self._loop, **self._kwargs)


class _Connection(web.RequestHandler):
    __slots__ = ()

    def handle_error(
        self, request: web.BaseRequest, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        if not isinstance(exc, BadHttpMessage):
            return super().handle_error(request, status, exc, message)
        logger.warning("a request from %s is refused: %s", request.remote, type(exc).__name__)
        status, code, message = 400, "bad_request", "The request is not valid HTTP."
        if isinstance(exc, LineTooLong):
            status, code = 431, "headers_too_large"
            message = f"The request line or a header is longer than {exc.args[1]} bytes; send a shorter one."
        error = {"message": message, "type": "invalid_request_error", "code": code}
        response = web.json_response({"error": error}, status=status)
        response.force_close()
        return response
