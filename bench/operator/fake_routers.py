"""One HTTP server that stands in for the routers of all services. It answers completions and the index state, or refuses all."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from aiohttp import web


@dataclass
class Routers:
    """The server. `answering` False: it accepts connections and answers nothing, as behind a policy that drops packets."""

    answering: bool = True
    url: str = ""
    _silence: asyncio.Event = field(default_factory=asyncio.Event)

    async def _answer(self, page: dict[str, object]) -> web.Response:
        if not self.answering:
            await self._silence.wait()
        return web.json_response(page)

    async def complete(self, _: web.Request) -> web.Response:
        return await self._answer({"choices": [{"text": "!"}]})

    async def index(self, _: web.Request) -> web.Response:
        return await self._answer({"index": "ok", "index_reason": "", "index_read": "mirror", "workers": []})


@asynccontextmanager
async def routers() -> AsyncIterator[Routers]:
    made = Routers()
    app = web.Application()
    app.add_routes([web.post("/v1/completions", made.complete), web.get("/fairlead/workers", made.index)])
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0, backlog=2048)
    await site.start()
    made.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield made
    finally:
        await runner.cleanup()
