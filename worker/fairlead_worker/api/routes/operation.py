"""Operations of the HTTP API as data, and the FastAPI router of a group of them.

Handlers write to the request's context and return nothing, because their stream of chunks ends together with the request's hold on the
engine and the adapter. Bodies are read within their limit and decoded by msgspec, whose errors name the field. It decodes 8,000
token ids in 147 µs, pydantic in 457 (`bench/end_to_end/front_cost.py`). FastAPI itself takes 60 µs of CPU time of a chat, a seventh, and up
to 90 of a request for the last of its paths. So the middleware calls the handlers of `INFERENCE` paths directly.
"""

from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, get_args

import msgspec
from fastapi import APIRouter, Request, Response
from starlette.types import Receive, Scope, Send

from fairlead_common.protocols.answer import Answer
from fairlead_common.protocols.errors import Error
from fairlead_worker.api.http import Handler

JSON, TEXT, EVENTS = "application/json", "text/plain", "text/event-stream"
ERRORS = {
    400: "The request is wrong, and every worker would refuse it. `param` names the field.",
    404: "There is no such model, adapter or path.",
    408: "The client read its answer too slowly.",
    413: "The body is larger than the limit.",
    429: "The queue is full, or a quota is used up. `Retry-After` says when to try again.",
    500: "The engine could not process the request.",
    503: "The worker does not serve now, or the engine ended.",
}
"""Statuses of operations that take a body."""


class _Sent(Response):
    """An answer that a handler has sent."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None: ...


@dataclass(frozen=True, slots=True)
class Operation:
    """One method of one path."""

    method: str
    path: str
    id: str
    """`operationId`, the name of the function in generated clients."""
    summary: str
    handler: Handler
    answer: Any = None
    """The struct of a JSON response, or a union of structs."""
    media_type: str = JSON
    """Of the response."""
    body: type[msgspec.Struct] | None = None
    required: Sequence[str] = ()
    """Fields of the body that are required. The structs make them optional, so that the error can say more than that a field is missing."""
    alternatives: Sequence[tuple[type[msgspec.Struct], Sequence[Sequence[str]]]] = ()
    """Instead of `body`, the bodies of several operations. One field of each group that stands beside a body is required."""
    stream: Any = None
    """The struct of an event, or a union of structs, of which `stream: true` makes the response a stream."""
    error: type[Answer] = Error
    refusal: int | None = None
    """Another status of a response of the same struct."""
    statuses: Sequence[int] = ()
    """Statuses of errors. Default: those of a body, if there is one."""

    def responses(self) -> dict[int | str, dict[str, Any]]:
        """Return the OpenAPI responses."""
        schema = schema_of(self.answer) if self.answer else {} if self.media_type == JSON else {"type": "string"}
        content = {self.media_type: {"schema": schema}}
        if self.stream is not None:
            content[EVENTS] = {"schema": schema_of(self.stream)}
        found: dict[int | str, dict[str, Any]] = {200: {"description": "The answer.", "content": content}}
        if self.refusal is not None:
            found[self.refusal] = {"description": "The answer is no.", "content": {JSON: {"schema": schema_of(self.answer)}}}
        error = {JSON: {"schema": schema_of(self.error)}}
        for status in self.statuses or (ERRORS if self._body_schema() else ()):
            found[status] = {"description": ERRORS.get(status, "The request is refused."), "content": error}
        return found | {"default": {"description": "Another error.", "content": error}}

    def request(self) -> dict[str, Any]:
        """Return the OpenAPI request body and parameters, in which a handler that reads the context itself has no part."""
        found: dict[str, Any] = {}
        if names := [part[1:-1].partition(":")[0] for part in self.path.split("/") if part.startswith("{")]:
            found["parameters"] = [{"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names]
        if schema := self._body_schema():
            found["requestBody"] = {"required": True, "content": {JSON: {"schema": schema}}}
        return found

    def _body_schema(self) -> dict[str, Any]:
        """Return the schema of the body. Empty: the operation takes none."""
        if self.alternatives:
            return {"anyOf": [schema_of(body) | {"allOf": [_require_one(names) for names in groups]} for body, groups in self.alternatives]}
        if self.body is None:
            return {}
        return schema_of(self.body) | ({"required": list(self.required)} if self.required else {})


def schema_of(kind: Any) -> dict[str, Any]:
    """Return a reference to a struct in the document's components, or to one of several."""
    if kinds := get_args(kind):
        return {"anyOf": [schema_of(each) for each in kinds]}
    return {"$ref": f"#/components/schemas/{kind.__name__}"}


def _require_one(names: Sequence[str]) -> dict[str, Any]:
    return {"anyOf": [{"required": [name]} for name in names]}


def build_router(tag: str, operations: Iterable[Operation], head: bool = True) -> APIRouter:
    """Return the router of an API. `head`: answer HEAD where there is GET; without, the document has one operation for each."""
    router = APIRouter(tags=[tag])
    for each in operations:
        router.add_api_route(
            each.path,
            _build_endpoint(each.handler),
            methods=["GET", "HEAD"] if head and each.method == "GET" else [each.method],
            operation_id=each.id,
            summary=each.summary,
            response_class=Response,
            responses=each.responses(),
            openapi_extra=each.request(),
        )
    return router


def _build_endpoint(handler: Handler) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        await handler(request.app.state.worker, request.scope["fairlead.context"])
        return _Sent()

    return endpoint
