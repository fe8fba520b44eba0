"""The routes of the worker's HTTP API."""

from collections.abc import Awaitable, Callable
from typing import Literal

import msgspec
from starlette.routing import BaseRoute, Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from fairlead_common.protocols.paths import COUNT_TOKENS, EMBEDDINGS, INVOCATIONS, MESSAGES, POOLING, RERANKS, RESPONSES, SCORES
from fairlead_worker.api import invocations, tokenize
from fairlead_worker.api.admin import health, introspection, lora, state, withdraw
from fairlead_worker.api.http import RequestContext, RequestMiddleware
from fairlead_worker.api.openai import chat, completions
from fairlead_worker.api.pooling import embeddings, similarity
from fairlead_worker.api.protocols import anthropic_messages as messages
from fairlead_worker.api.protocols import openai_responses as responses
from fairlead_worker.api.protocols import stored_responses
from fairlead_worker.api.reference import openapi
from fairlead_worker.api.worker import Worker
from fairlead_worker.platform.version import release

Part = Literal["all", "inference", "admin"]
"""The set of paths that a port serves. Every port serves `health`, `ready` and `version`."""
Handler = Callable[[Worker, RequestContext], Awaitable[None]]


class Endpoint:
    """Adapts a handler to the ASGI application of its route."""

    def __init__(self, worker: Worker, handler: Handler) -> None:
        self._worker = worker
        self._handler = handler

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._handler(self._worker, scope["fairlead.context"])


def build(worker: Worker, part: Part = "all") -> ASGIApp:
    """Return the ASGI application of one port. It answers 404 for paths outside `part`."""

    def route(method: str, path: str, handler: Handler) -> BaseRoute:
        return Route(path, Endpoint(worker, handler), methods=[method])

    inference = [
        route("POST", "/v1/completions", completions.completions),
        route("POST", "/v1/chat/completions", chat.chat_completions),
        route("POST", RESPONSES, responses.responses),
        route("GET", f"{RESPONSES}/{{id}}", stored_responses.get_response),
        route("DELETE", f"{RESPONSES}/{{id}}", stored_responses.delete_response),
        route("GET", f"{RESPONSES}/{{id}}/input_items", stored_responses.list_input_items),
        route("POST", f"{RESPONSES}/{{id}}/cancel", stored_responses.cancel_response),
        route("POST", MESSAGES, messages.messages),
        route("POST", COUNT_TOKENS, messages.count_tokens),
        route("POST", EMBEDDINGS, embeddings.embeddings),
        route("POST", POOLING, embeddings.embeddings),
        route("POST", INVOCATIONS, invocations.invocations),
        *(route("POST", path, similarity.score) for path in SCORES),
        *(route("POST", path, similarity.rerank) for path in RERANKS),
        route("GET", "/v1/models", state.models),
        route("GET", "/v1/models/{name:path}", state.model),
        route("POST", "/tokenize", tokenize.tokenize),
        route("POST", "/detokenize", tokenize.detokenize),
    ]
    admin = [
        route("POST", "/v1/load_lora_adapter", lora.load_lora_adapter),
        route("POST", "/v1/unload_lora_adapter", lora.unload_lora_adapter),
        route("POST", "/internal/withdraw/{attempt}", withdraw.withdraw),
        route("GET", "/load", state.load),
        route("GET", "/internal/prompt-format", state.prompt_format),
        route("GET", "/internal/hot-prefixes/{tokens}", state.hot_prefixes),
        route("GET", "/metrics", state.metrics),
        route("GET", "/server_info", introspection.server_info),
        route("GET", "/tokenizer_info", introspection.tokenizer_info),
        route("POST", "/reset_prefix_cache", introspection.reset_prefix_cache),
    ]
    both = [
        # The kubelet probes /health of the admin port, also of pods that earlier releases rendered.
        route("GET", "/health", health.liveness if part == "admin" else health.health),
        route("GET", "/livez", health.liveness),
        *(route(method, "/ping", health.health) for method in ("GET", "POST")),
        route("GET", "/ready", state.ready),
        route("GET", "/version", state.version),
    ]
    routes = [*(inference if part != "admin" else ()), *(admin if part != "inference" else ()), *both]
    if part == "admin":
        return RequestMiddleware(Router(routes, redirect_slashes=False), worker)
    document = msgspec.json.encode(openapi.build_document(routes, release()))

    async def openapi_document(_: Worker, context: RequestContext) -> None:
        await context.respond(200, document)

    routes.append(route("GET", "/openapi.json", openapi_document))
    return RequestMiddleware(Router(routes, redirect_slashes=False), worker)
