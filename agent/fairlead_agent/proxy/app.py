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
from fairlead_common.http.inference_paths import is_inference

Part = Literal["all", "inference", "admin"]
"""The paths that a port serves. Each port serves health checks."""
_HEALTH: Final = ("/health", "/ping", "/livez", "/ready", "/version")
UNPROMPTED: Final = ("/tokenize", "/detokenize")
"""Inference paths that the admin port serves too: routers ask how the engine tokenizes."""
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
                "/internal/drain": self.drain,
                "/engine/health": self.engine_liveness,
            }

        async def handle(request: web.Request) -> web.StreamResponse:
            path = request.path
            if not request.raw_path.startswith("/"):
                return self._forwarder.refusal(path, 400, "the request's target must be a path, as in GET /v1/models")
            if (handler := own.get(path)) is not None:
                return await handler(request)
            inside = path.startswith("/internal/")
            if inside or (part == "inference" and not is_inference(request.raw_path) and path not in _HEALTH):
                return self._forwarder.refusal(path, 404, f"this port does not serve {path[:200]}")
            if part == "admin" and is_inference(request.raw_path) and path not in UNPROMPTED:
                return self._forwarder.refusal(path, 404, "inference paths have another port")
            return await self._forwarder.handle(request)

        app = web.Application(client_max_size=self._agent.config.max_body_bytes)
        app.router.add_route("*", "/{path:.*}", handle)
        return app

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
