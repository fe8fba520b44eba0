"""/healthz, /readyz and /metrics of the operator."""

import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass

from aiohttp import web

from fairlead_common.http.aiohttp_runner import Runner
from fairlead_operator.process.metrics import CONTENT_TYPE


@dataclass(frozen=True)
class Readiness:
    """A standby is ready: it can take over, and a rollout of the operator need not wait until it leads."""

    ready: bool
    leading: bool
    holder: str  # of the lease


def _open_socket(port: int) -> socket.socket:
    """Open one socket for both address families: the kubelet uses the one that the pod has."""
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", port))


@asynccontextmanager
async def serve(
    port: int, problem: Callable[[], str], readiness: Callable[[], Readiness], metrics: Callable[[], bytes]
) -> AsyncIterator[int]:
    """Serve while the context lasts; yields the port. `problem()` is empty while the process is healthy."""

    async def healthz(_: web.Request) -> web.Response:
        found = problem()
        return web.json_response({"ok": not found, "problem": found}, status=503 if found else 200)

    async def readyz(_: web.Request) -> web.Response:
        now = readiness()
        return web.json_response(asdict(now), status=200 if now.ready else 503)

    async def metrics_page(_: web.Request) -> web.Response:
        return web.Response(body=metrics(), headers={"Content-Type": CONTENT_TYPE})

    app = web.Application()
    app.add_routes([web.get("/healthz", healthz), web.get("/readyz", readyz), web.get("/metrics", metrics_page)])
    runner = Runner(app, access_log=None)
    await runner.setup()
    try:
        listening = _open_socket(port)
        await web.SockSite(runner, listening).start()
        yield int(listening.getsockname()[1])
    finally:
        await runner.cleanup()
