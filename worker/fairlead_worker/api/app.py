"""The worker's HTTP API as a FastAPI application."""

import msgspec
from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.types import ASGIApp

from fairlead_worker.api.http import INFERENCE, RequestContext, RequestMiddleware
from fairlead_worker.api.reference.openapi import build_document
from fairlead_worker.api.reference.page import render
from fairlead_worker.api.routes.apis import Part, select_apis
from fairlead_worker.api.routes.operation import Operation, build_router
from fairlead_worker.api.worker import Worker
from fairlead_worker.platform.version import release


def build(worker: Worker, part: Part = "all") -> ASGIApp:
    """Return the application of one port. It answers 404 for paths outside `part`."""
    apis = dict(select_apis(part))
    posted = {each.path: each.handler for operations in apis.values() for each in operations if each.method == "POST" and each.path in INFERENCE}
    app = FastAPI(
        title="Fairlead",
        version=release(),
        openapi_url=None,  # the page below is encoded once, and answers as every other path does
        redirect_slashes=False,
        exception_handlers={HTTPException: _raise},
        middleware=[Middleware(RequestMiddleware, worker=worker, handlers=posted)],
    )
    app.state.worker = worker
    if part != "admin":
        apis["Reference"] = _build_pages(build_document(apis, release()))
    for tag, operations in apis.items():
        app.include_router(build_router(tag, operations))
    return app


async def _raise(request: Request, error: Exception) -> Response:
    """Leave an unknown path or method to RequestMiddleware, which formats every error."""
    raise error


def _build_pages(document: dict[str, object]) -> tuple[Operation, ...]:
    """Return the operations that answer with the document, as JSON and as a page."""
    encoded, page = msgspec.json.encode(document), render(document)

    async def openapi(_: Worker, context: RequestContext) -> None:
        await context.respond(200, encoded)

    async def docs(_: Worker, context: RequestContext) -> None:
        await context.respond(200, page, type="text/html; charset=utf-8")

    return (
        Operation("GET", "/openapi.json", "get_openapi", "Return the OpenAPI document", openapi),
        Operation("GET", "/docs", "get_docs", "Return the OpenAPI document as a page", docs, media_type="text/html"),
    )
