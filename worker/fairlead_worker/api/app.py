"""The worker's paths."""

from collections.abc import Awaitable, Callable

import msgspec
from starlette.routing import BaseRoute, Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from fairlead_index.dialects import COUNT_TOKENS, MESSAGES, RESPONSES
from fairlead_index.pooled import EMBEDDINGS, RERANKS, SCORES
from fairlead_worker.api import chat, completions, embeddings, lora, openapi, similarity, state, tokenized
from fairlead_worker.api.dialects import messages, responses
from fairlead_worker.api.http import Exchange, Gate
from fairlead_worker.api.worker import Worker
from fairlead_worker.version import release

Handler = Callable[[Worker, Exchange], Awaitable[None]]


class Endpoint:
    """A handler as the ASGI application of its path."""

    def __init__(self, worker: Worker, handler: Handler) -> None:
        self._worker = worker
        self._handler = handler

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._handler(self._worker, scope["fairlead.exchange"])


def build(worker: Worker) -> ASGIApp:
    """The application."""

    def route(method: str, path: str, handler: Handler) -> BaseRoute:
        return Route(path, Endpoint(worker, handler), methods=[method])

    routes = [
        route("POST", "/v1/completions", completions.completions),
        route("POST", "/v1/chat/completions", chat.chat_completions),
        route("POST", RESPONSES, responses.responses),
        route("POST", MESSAGES, messages.messages),
        route("POST", COUNT_TOKENS, messages.count_tokens),
        route("POST", EMBEDDINGS, embeddings.embeddings),
        *(route("POST", path, similarity.score) for path in SCORES),
        *(route("POST", path, similarity.rerank) for path in RERANKS),
        route("POST", "/v1/load_lora_adapter", lora.load),
        route("POST", "/v1/unload_lora_adapter", lora.unload),
        route("GET", "/v1/models", state.models),
        route("GET", "/v1/models/{name:path}", state.model),
        route("POST", "/tokenize", tokenized.tokenize),
        route("POST", "/detokenize", tokenized.detokenize),
        route("GET", "/health", state.health),
        route("GET", "/ready", state.ready),
        route("GET", "/load", state.load),
        route("GET", "/internal/prompt-format", state.prompt_format),
        route("GET", "/internal/hot-prefixes/{tokens}", state.hot_prefixes),
        route("GET", "/metrics", state.metrics),
        route("GET", "/version", state.version),
    ]
    document = msgspec.json.encode(openapi.document(routes, release()))

    async def described(_: Worker, exchange: Exchange) -> None:
        await exchange.whole(200, document)

    routes.append(route("GET", "/openapi.json", described))
    return Gate(Router(routes, redirect_slashes=False), worker)
