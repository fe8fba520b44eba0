"""The agent's HTTP: a worker's own paths, and the engine's for the rest."""

import gzip
import time
from collections.abc import Awaitable, Callable
from typing import Final, Literal

import msgspec
from aiohttp import web

from fairlead_agent.engine.metrics import add_own_names
from fairlead_agent.metrics import AgentMetrics
from fairlead_agent.proxy.forward import Forwarder
from fairlead_agent.state import Agent
from fairlead_common.http.head import find_fault
from fairlead_common.http.inference_paths import is_inference
from fairlead_common.http.origins import FOREIGN, is_foreign_to_admin
from fairlead_common.protocols.paths import TOKENIZED
from fairlead_common.truncate import truncate

Part = Literal["all", "inference", "admin"]
"""The paths that a port serves. Each port serves health checks."""
DRAIN: Final = "/internal/drain"
"""The only own path that changes state. It takes POST, and all others GET and HEAD."""
ADMIN: Final = frozenset(("/load", "/metrics", "/internal/prompt-format", "/engine/health", DRAIN))
VERSION: Final = "/version"
"""Path of the engine that each port forwards."""
"""Inference paths that the admin port serves too: routers ask how the engine tokenizes."""
READ: Final = frozenset(
    (
        VERSION,
        "/docs",
        "/openapi.json",
        "/server_info",
        "/get_server_info",
        "/model_info",
        "/get_model_info",
        "/tokenizer_info",
        "/is_sleeping",
    )
)
"""Paths of engines that the admin port forwards by GET. Others change the engine by GET too, such as SGLang's `/flush_cache`."""
_SAFE: Final = ("GET", "HEAD")
_METHODS: Final = {DRAIN: ("POST",), "/ping": (*_SAFE, "POST")}  # vLLM answers a POST to /ping too
HUNG_SECONDS = 120.0
"""Silence after which the engine is restarted. A long prefill on a CPU may take a minute."""
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Api:
    """Handlers of the agent's own paths."""

    def __init__(self, agent: Agent, forwarder: Forwarder, metrics: AgentMetrics) -> None:
        self._agent, self._forwarder, self._metrics = agent, forwarder, metrics
        self._gzipped: tuple[str, bytes] = ("", b"")

    def build(self, part: Part) -> web.Application:
        """Return the application of one port."""
        own = self.handlers(part)

        async def handle(request: web.Request) -> web.StreamResponse:
            refuse, path = self._forwarder.refusal, request.path
            version = f"{request.version.major}.{request.version.minor}"
            if fault := find_fault(version, [(name.lower(), value) for name, value in request.raw_headers]):
                return refuse(path, 400, fault)
            if not request.raw_path.startswith("/"):
                return refuse(path, 400, "the request's target must be a path, as in GET /v1/models")
            handler, inference = own.get(path), is_inference(request.raw_path)
            if path in ADMIN or (handler is None and not inference):
                origin = request.headers.get("origin")
                if is_foreign_to_admin(None if origin is None else origin.encode(), request.headers.get("host", "").encode()):
                    return refuse(path, 403, FOREIGN)
            if handler is not None:
                allowed = _METHODS.get(path, _SAFE)
                if request.method not in allowed:
                    return refuse(path, 405, f"{request.method} is not allowed on {path}; use {allowed[0]}", {"allow": ", ".join(allowed)})
                return await handler(request)
            if not self._forwards(part, request, inference):
                return refuse(path, 404, f"this port does not serve {request.method} {truncate(path)}: the agent's --admin-port does")
            return await self._forwarder.handle(request)

        app = web.Application(client_max_size=self._agent.config.max_body_bytes)  # of compressed bodies: read_body bounds the rest
        app.router.add_route("*", "/{path:.*}", handle)
        return app

    def handlers(self, part: Part) -> dict[str, Handler]:
        """Return the handlers of the agent's own paths on one port."""
        own: dict[str, Handler] = {
            "/health": self.liveness if part == "admin" else self.health,
            "/ping": self.health,
            "/livez": self.liveness,
            "/ready": self.ready,
        }
        if part != "inference":
            own |= {
                "/load": self.load,
                "/metrics": self.metrics,
                "/internal/prompt-format": self.prompt_format,
                "/engine/health": self.engine_liveness,
                DRAIN: self.drain,
            }
        return own

    @staticmethod
    def _forwards(part: Part, request: web.Request, is_inference: bool) -> bool:
        """Return whether the engine gets a request. Where clients reach the port, it gets inference only."""
        path = request.path
        if path == VERSION:
            return request.method in _SAFE
        if part != "admin":
            return is_inference
        if is_inference:
            return path in TOKENIZED
        return not path.startswith("/internal/") and (request.method == "POST" or (request.method in _SAFE and path in READ))

    async def health(self, request: web.Request) -> web.Response:
        """Answer 200 while requests are accepted."""
        agent = self._agent
        if agent.is_serving:
            return _json({"status": "ok", "engine": agent.phase})
        return _json({"status": "draining" if agent.draining else agent.phase, "reason": agent.reason}, 503)

    async def liveness(self, request: web.Request) -> web.Response:
        """Answer 200 unless the engine has failed for good. An engine in its own container has its own probe."""
        agent = self._agent
        return _json(
            {"status": "failed" if agent.phase == "failed" else "ok", "reason": agent.reason}, 503 if agent.phase == "failed" else 200
        )

    async def engine_liveness(self, request: web.Request) -> web.Response:
        """Answer 503 for an engine that has hung, for the liveness probe of its container."""
        since = self._agent.silent_since
        silent = 0.0 if since is None else time.monotonic() - since
        return _json({"silent_seconds": round(silent, 1)}, 503 if silent >= HUNG_SECONDS else 200)

    async def ready(self, request: web.Request) -> web.Response:
        return _json(self._agent.describe_readiness(), 200 if self._agent.is_serving else 503)

    async def load(self, request: web.Request) -> web.Response:
        return _json(self._agent.describe_load())

    async def metrics(self, request: web.Request) -> web.Response:
        """Answer with the engine's last exposition under both names, then with the agent's own."""
        text = add_own_names(self._agent.engine_metrics, self._agent.config.runtime) + self._metrics.render()
        return web.Response(body=text, headers={"content-type": "text/plain; version=1.0.0; charset=utf-8"})

    async def prompt_format(self, request: web.Request) -> web.Response:
        """Answer how prompts become tokens; 404 where the files do not tell."""
        agent = self._agent
        if agent.format is None:
            return self._forwarder.refusal(request.path, 404, f"there is no prompt format: {agent.no_format}")
        headers = {"etag": agent.format_etag, "vary": "accept-encoding"}
        if agent.format_etag in (tag.strip() for tag in request.headers.get("if-none-match", "").split(",")):
            return web.Response(status=304, headers=headers)
        headers["content-type"] = "application/json"
        if "gzip" not in request.headers.get("accept-encoding", ""):
            return web.Response(body=agent.format_body, headers=headers)
        if self._gzipped[0] != agent.format_etag:
            self._gzipped = agent.format_etag, gzip.compress(agent.format_body, 6)
        return web.Response(body=self._gzipped[1], headers=headers | {"content-encoding": "gzip"})

    async def drain(self, request: web.Request) -> web.Response:
        """Begin to drain, and answer when the engine may be stopped: the hook before its SIGTERM waits for this."""
        self._agent.drain_requested.set()
        await self._agent.drained.wait()
        return _json({"drained": True})


def _json(document: object, status: int = 200) -> web.Response:
    return web.Response(status=status, body=msgspec.json.encode(document), headers={"content-type": "application/json"})
