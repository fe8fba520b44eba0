"""The span of each inference request, and the ids that its log lines carry."""

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fairlead_common.telemetry.logs import bind_request
from fairlead_common.telemetry.spans import Span, read_trace_id
from fairlead_common.telemetry.tracer import Tracer
from fairlead_worker.api.http import INFERENCE, choose_request_id


class Observe:
    """ASGI middleware. It continues the trace of `traceparent`, as the router sends it, and binds request id and trace id."""

    def __init__(self, app: ASGIApp, tracer: Tracer | None) -> None:
        self._app, self._tracer = app, tracer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers: list[tuple[bytes, bytes]] = list(scope["headers"])
        request_id = choose_request_id(dict(headers).get(b"x-request-id", b""))
        scope["headers"] = [*headers, (b"x-request-id", request_id.encode())]
        if self._tracer is None or scope["path"] not in INFERENCE:
            bind_request(request_id, read_trace_id(headers))
            await self._app(scope, receive, send)
            return
        span = scope["fairlead.span"] = self._tracer.start(f"{scope['method']} {scope['path']}", headers)
        bind_request(request_id, span.trace_id)
        span.set({"http.request.method": scope["method"], "fairlead.request_id": request_id})
        with span:
            await self._app(scope, receive, _Watch(span, send) if span.is_recording else send)


class _Watch:
    """`send` that records the status of the response."""

    def __init__(self, span: Span, send: Send) -> None:
        self._span, self._send = span, send

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._span.set({"http.response.status_code": message["status"]})
            if message["status"] >= 500:
                self._span.fail(f"status {message['status']}")
        await self._send(message)
