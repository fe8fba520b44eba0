"""/healthz and /readyz of the operator."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from aiohttp import web


@asynccontextmanager
async def served(port: int, problem: Callable[[], str], ready: Callable[[], bool]) -> AsyncIterator[int]:
    """Serve while the context lasts; yields the port. `problem()` is empty while the process is of use."""

    async def healthz(_: web.Request) -> web.Response:
        found = problem()
        return web.json_response({"ok": not found, "problem": found}, status=503 if found else 200)

    async def readyz(_: web.Request) -> web.Response:
        return web.json_response({"ready": ready()}, status=200 if ready() else 503)

    app = web.Application()
    app.add_routes([web.get("/healthz", healthz), web.get("/readyz", readyz)])
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        site = web.TCPSite(runner, None, port)
        await site.start()
        yield int(runner.addresses[0][1])
    finally:
        await runner.cleanup()
