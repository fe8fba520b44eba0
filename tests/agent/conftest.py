"""An agent in this process in front of a stand-in engine, and a Redis server for the index."""

import asyncio
import json
import socket
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.agent.stand_in_engine import FORMAT, StandInEngine, write_model
from tests.servers.redis_server import RedisServer

from fairlead_agent import server as agent_server
from fairlead_agent.config import AgentConfig
from fairlead_agent.kv import follower
from fairlead_agent.server import AgentServer
from fairlead_common.prompts.encoder import PromptEncoder
from fairlead_index.hashing import token_bytes

LIMIT = 60.0


@pytest.fixture(scope="module")
def redis() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


@pytest.fixture
def namespace() -> str:
    return f"tests/{uuid.uuid4().hex[:12]}"


@pytest.fixture(autouse=True)
def short_intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in (("START", 0.02), ("WATCH", 0.1), ("FAILURE_LINGER", 0.05), ("LINGER", 0.05)):
        monkeypatch.setattr(agent_server, f"{name}_SECONDS", seconds)
    monkeypatch.setattr(follower, "QUIET_SECONDS", 0.05)


async def eventually(holds: Callable[[], bool | Awaitable[bool]], what: str = "") -> None:
    async with asyncio.timeout(LIMIT):
        while not (await found if isinstance(found := holds(), Awaitable) else found):  # noqa: ASYNC110  # no event
            await asyncio.sleep(0.01)


class RunningAgent:
    """An agent, its client, and where its engine publishes."""

    def __init__(self, server: AgentServer, task: "asyncio.Task[str]", port: int) -> None:
        self.server, self.agent, self.task, self.port = server, server.agent, task, port
        self.client = httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=30)

    async def ready(self) -> "RunningAgent":
        await eventually(lambda: self.agent.is_serving or self.task.done())
        assert not self.task.done(), self.task.result()
        return self

    async def complete(self, prompt: Any, headers: dict[str, str] | None = None, **fields: Any) -> httpx.Response:
        return await self.client.post("/v1/completions", json={"model": "stand-in", "prompt": prompt, **fields}, headers=headers)

    async def complete_tokens(self, prompt: str, **fields: Any) -> httpx.Response:
        """Send a prompt with its token ids, as routers do."""
        tokens = PromptEncoder(FORMAT).encode_text(prompt)
        body = token_bytes(tokens) + json.dumps({"model": "stand-in", "prompt": prompt, **fields}).encode()
        return await self.client.post("/v1/completions", content=body, headers={"x-fairlead-prompt-tokens": str(len(tokens))})


@asynccontextmanager
async def running_agent(folder: Path, engine_url: str, events: str = "", replay: str = "", **settings: Any) -> AsyncIterator[RunningAgent]:
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    given = {"model": str(write_model(folder / "model")), "engine_url": engine_url, "kv_events": events, "kv_replay": replay}
    given |= {"host": "127.0.0.1", "port": port, "pod_name": "pod-0", "advertise": f"127.0.0.1:{port}", "drain_timeout": 5}
    listeners = [listener]
    if "admin_port" in settings:
        listeners.append(socket.create_server(("127.0.0.1", settings["admin_port"])))
    config = AgentConfig(**given | settings, _cli_parse_args=[])
    server = AgentServer(config, listeners, [])
    task = asyncio.create_task(server.run())
    running = RunningAgent(server, task, port)
    try:
        yield running
    finally:
        server.agent.drain_requested.set()
        await running.client.aclose()
        await asyncio.wait_for(task, LIMIT)


@asynccontextmanager
async def pair(folder: Path, **settings: Any) -> AsyncIterator[tuple[StandInEngine, RunningAgent]]:
    """Start an engine and its agent."""
    folder.mkdir(parents=True, exist_ok=True)
    events, replay = f"ipc://{folder}/events", f"ipc://{folder}/replay"
    engine = await StandInEngine(events, replay).start()
    try:
        async with running_agent(folder, engine.url, events, replay, **settings) as agent:
            await agent.ready()
            yield engine, agent
    finally:
        await engine.stop()
