"""A router on a real socket, stand-in workers, and a real redis-server where a test asks for one."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
from tests.router.stand_in_worker import StandIn

from fairlead_router.config import RouterConfig
from fairlead_router.server import RouterServer


async def eventually(condition: Callable[[], bool | Awaitable[bool]], what: str, seconds: float = 30.0) -> None:
    """Poll until the condition holds."""
    deadline = asyncio.get_running_loop().time() + seconds
    while not (await holds if isinstance(holds := condition(), Awaitable) else holds):
        assert asyncio.get_running_loop().time() < deadline, f"not within {seconds} s: {what}"
        await asyncio.sleep(0.01)


def post(body: dict, version: str = "1.1", *headers: str) -> bytes:
    """Return the bytes of a completion request, for tests that write to a bare connection."""
    data = json.dumps(body).encode()
    lines = [f"POST /v1/completions HTTP/{version}", "host: x", f"content-length: {len(data)}", *headers, "", ""]
    return "\r\n".join(lines).encode() + data


class RunningRouter:
    """A router in this process and a client of it."""

    def __init__(self, server: RouterServer, client: httpx.AsyncClient) -> None:
        self.server, self.client = server, client
        self.table = server.router.table
        self.port = server.port

    async def complete(self, prompt: Any = "hello there", **fields: Any) -> httpx.Response:
        return await self.client.post("/v1/completions", json={"model": "stand-in", "prompt": prompt, **fields})

    async def usable(self, count: int) -> None:
        await eventually(lambda: sum(w.usable and bool(w.format_tag) for w in self.table) == count, f"{count} usable workers")

    async def metric(self, name: str) -> float:
        text = (await self.server.router.metrics.render()).decode()
        return sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.split("{")[0].split(" ")[0] == name)


@asynccontextmanager
async def running_router(**settings: Any) -> AsyncIterator[RunningRouter]:
    config = RouterConfig(**{"host": "127.0.0.1", "port": 0, "poll_interval": 0.1, "drain_timeout": 1, "hold_timeout": 10} | settings)
    server = RouterServer(config)
    task = asyncio.create_task(server.serve())
    try:
        await eventually(lambda: server.started or task.done(), "the router listens")
        port = server.port
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60, limits=limits) as client:
            yield RunningRouter(server, client)
    finally:
        server.leave()
        await task


class Fleet:
    """Starts workers and routers and ends them with the test."""

    def __init__(self, stack: AsyncExitStack, folder: Path) -> None:
        self._stack = stack
        self.file = folder / "workers"
        self.workers: list[StandIn] = []

    async def worker(self, port: int = 0, **settings: Any) -> StandIn:
        worker = await StandIn(**{"pod": f"pod-{len(self.workers)}"} | settings).start(port)
        self.workers.append(worker)
        self._stack.push_async_callback(worker.kill)
        return worker

    def list_in_file(self, *workers: StandIn) -> str:
        fresh = self.file.with_suffix(".new")
        fresh.write_text("".join(f"{worker.address}\n" for worker in workers))
        fresh.replace(self.file)
        return f"file://{self.file}"

    async def router(self, *workers: StandIn, ready: int | None = None, **settings: Any) -> RunningRouter:
        settings.setdefault("workers", "static://" + ",".join(worker.address for worker in workers))
        router = await self._stack.enter_async_context(running_router(**settings))
        await router.usable(len(workers) if ready is None else ready)
        return router
