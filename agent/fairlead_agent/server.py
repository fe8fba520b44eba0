"""The lifecycle of an agent: wait for the engine, serve, follow it through restarts, drain, end."""

import asyncio
import contextlib
import logging
import math
import signal
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import zmq
from aiohttp import web

from fairlead_agent.config import AgentConfig
from fairlead_agent.engine.client import EngineClient, EngineGone, EngineSilent, EngineUnusable, Model
from fairlead_agent.engine.process import EngineProcess
from fairlead_agent.engine.tokenizer import CHAT_SAMPLE, NoFormat, find_folder, read_format
from fairlead_agent.kv.blocks import EngineBlocks
from fairlead_agent.kv.follower import Follower
from fairlead_agent.kv.indexed import IndexedBlocks
from fairlead_agent.kv.publisher import Publisher
from fairlead_agent.metrics import AgentMetrics
from fairlead_agent.proxy.app import Api, Part
from fairlead_agent.proxy.forward import MAX_TOKENS, Forwarder
from fairlead_agent.state import PROMISED_BLOCKS, Agent
from fairlead_common.http.aiohttp_runner import Runner
from fairlead_common.prompts.encoder import PromptFormat
from fairlead_index.worker_load import WorkerCard

log = logging.getLogger(__name__)

START_SECONDS = 0.25
"""Interval of checks while the engine starts."""
WATCH_SECONDS = 0.5
"""Interval of scrapes of the engine: a killed one is noticed within this time."""
SILENT_SCRAPES = 10
"""Scrapes in a row without an answer after which the worker is not ready. A long step of the engine may delay some."""
FAILURE_LINGER_SECONDS = 2.0
"""Seconds that 503 is answered after the engine has failed, so that probes and routers see the reason."""
INTERRUPT_DRAIN_SECONDS = 1.0
"""Seconds that running streams get after SIGINT, because a person waits at a terminal."""
ENGINE_STOP_SECONDS = 20.0
ADAPTER_SECONDS = 5.0
"""Interval of looking for new LoRA adapters that did not come through this agent."""
LINGER_SECONDS = 0.5
"""Seconds after the drain in which its hook gets its answer."""
DEFAULT_BLOCK_TOKENS = 16
"""Block of the index for an engine that does not tell its own."""


class AgentServer:
    """The parts of a running agent. Construct it in the event loop."""

    def __init__(self, config: AgentConfig, listeners: list[socket.socket], command: list[str]) -> None:
        """`listeners`: of `--port`, then of `--admin-port` where it is set. `command`: the engine's, to run it here; empty: it runs
        elsewhere."""
        self.config = config
        self.agent = Agent(config, config.address(listeners[0].getsockname()[1]))
        self._listeners = listeners
        self._engine = EngineClient(config)
        self._metrics = AgentMetrics(self.agent)
        self._api = Api(self.agent, Forwarder(self.agent, self._engine), self._metrics)
        self._process = EngineProcess(command, self._on_progress) if command else None
        self._signal: signal.Signals | None = None
        self._failure = ""
        self._failed = asyncio.Event()
        self._began = time.monotonic()

    async def run(self) -> str:
        """Serve until a signal arrives or the engine fails. Return the reason of a failure, or an empty string."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)
        tasks = [asyncio.create_task(self._watch_engine(), name="engine")]
        if self._process is not None:
            tasks.append(asyncio.create_task(self._supervise(self._process), name="engine process"))
        try:
            async with self._serving():
                ends = [asyncio.create_task(event.wait()) for event in (self.agent.drain_requested, self._failed)]
                done, _ = await asyncio.wait([*ends, tasks[0]], return_when=asyncio.FIRST_COMPLETED)
                for end in ends:
                    end.cancel()
                if tasks[0] in done and (error := tasks[0].exception()) is not None:
                    log.error("the agent has failed", exc_info=error)
                    self._fail(f"{type(error).__name__}: {error}")
                if self._failed.is_set():
                    await self._leave_index()
                    await asyncio.sleep(FAILURE_LINGER_SECONDS)
                else:
                    await self._drain()
                for task in tasks[:1]:
                    task.cancel()
                await asyncio.gather(tasks[0], return_exceptions=True)
                if self._process is not None:
                    await self._process.stop(ENGINE_STOP_SECONDS)
            return self._failure
        finally:
            if self._process is not None:
                self._process.kill()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._engine.close()

    @asynccontextmanager
    async def _serving(self) -> AsyncIterator[None]:
        runners = []
        parts: list[Part] = ["all"] if len(self._listeners) == 1 else ["inference", "admin"]
        try:
            for part, listener in zip(parts, self._listeners, strict=True):
                runner = Runner(
                    self._api.build(part),
                    handler_cancellation=True,  # a client that disconnects cancels its request in the engine
                    access_log=None,
                    auto_decompress=False,  # read_body does it within --max-body-bytes
                    keepalive_timeout=75,  # longer than the router keeps an idle connection
                    shutdown_timeout=2.0,
                )
                runners.append(runner)
                await runner.setup()
                await web.SockSite(runner, listener).start()
            log.info(
                "listening on port %s as %s, advertised as %s", self._listeners[0].getsockname()[1], self.config.pod, self.agent.address
            )
            yield
        finally:
            for runner in runners:
                await runner.cleanup()

    async def _watch_engine(self) -> None:
        """Follow the engine through its restarts. In a cluster the kubelet restarts it."""
        while not self._failed.is_set():
            began = time.monotonic()
            await self._wait_healthy()
            self.agent.start_up["engine"] = time.monotonic() - began
            follower: Follower | None = None
            following: asyncio.Task[None] | None = None
            try:
                follower = await self._connect()
                following = asyncio.create_task(follower.run(), name="KV events") if follower is not None else None
                self.agent.set_phase("ready")
                self.agent.start_up["total"] = time.monotonic() - self._began
                log.info("ready: %s with %d blocks of %d tokens", ", ".join(self.agent.model_names), self.agent.stats.blocks, self._block)
                await self._watch(following)
            except (EngineGone, EngineSilent) as error:
                log.warning("%s: leaving the index until it is back", error)
                self.agent.set_phase("starting", str(error))
            except EngineUnusable as error:
                self._fail(str(error))
            finally:
                self.agent.silent_since = None
                if following is not None:
                    following.cancel()
                    await asyncio.gather(following, return_exceptions=True)
                if follower is not None:
                    follower.close()
                self._metrics.follower = None
                if not self.agent.draining:
                    await self._leave_index()
            await asyncio.sleep(START_SECONDS)

    async def _wait_healthy(self) -> None:
        while True:
            try:
                if await self._engine.is_healthy():
                    return
                reason = f"{self.config.runtime_name} is loading"
            except EngineGone:
                reason = f"{self.config.runtime_name} does not listen yet at {self.config.engine_url}"
            except EngineSilent as error:
                reason = str(error)
            percent = self.agent.percent
            self.agent.set_phase("loading" if percent else "starting", reason)
            self.agent.percent = percent
            await asyncio.sleep(START_SECONDS)

    async def _connect(self) -> Follower | None:
        """Read what the engine serves, and join the index. Return the follower of its KV events.

        Raises EngineGone, EngineSilent, EngineUnusable.
        """
        agent, config = self.agent, self.config
        stats, text = await self._engine.stats()
        size = await self._engine.block_size(stats)
        models = await self._engine.models()
        self._set_models(models)
        agent.fields = await self._engine.body_fields()
        self._block = config.block_tokens or size or DEFAULT_BLOCK_TOKENS
        if size and self._block % size:
            wanted = -(-self._block // size) * size
            raise EngineUnusable(f"--block-tokens {self._block} is not a multiple of the engine's block of {size} tokens: try {wanted}")
        format, reason = await self._read_format(models)
        agent.set_format(format, reason)
        card = WorkerCard(pod=config.pod, address=agent.address, block_tokens=self._block)
        agent.publisher = Publisher(config.redis, config.index_namespace, card)
        agent.set_stats(stats, text)
        follower: Follower | None = None
        if format is not None and config.kv_events:
            capacity = stats.blocks * stats.block_size // self._block
            agent.indexed = IndexedBlocks(agent.publisher, capacity or PROMISED_BLOCKS)
            agent.blocks = EngineBlocks(self._block, agent.root_of, agent.indexed)
            try:
                follower = self._metrics.follower = Follower(config.kv_events, config.kv_replay, agent.blocks)
            except zmq.ZMQError as error:
                raise EngineUnusable(f"--kv-events {config.kv_events} cannot be used: {error}") from error
        if not agent.draining:
            agent.publisher.start()
        return follower

    async def _read_format(self, models: list[Model]) -> tuple[PromptFormat | None, str]:
        """Return the prompt format, or why there is none. Raises EngineGone, EngineSilent."""
        base = next((model for model in models if model.parent is None), Model(self.config.served_model_name or self.config.model))
        try:
            folder = await asyncio.to_thread(find_folder, self.config.model)
            names, longest = self.agent.model_names or [base.id], base.max_model_len or MAX_TOKENS
            format = await asyncio.to_thread(read_format, folder, self.config.runtime, names, self._block, longest, base.root or "")
            difference = await self._engine.find_difference(format)
        except NoFormat as error:
            difference, reason = None, str(error)
        else:
            reason = f"the engine tokenizes otherwise ({difference})"
            if difference is None or difference.what == CHAT_SAMPLE:
                if difference is not None:  # the text's tokens are equal: only the rendering of the template differs
                    log.warning("the engine renders chats otherwise (%s): routers ask its /tokenize", difference)
                return format, ""
        log.warning("routers send text and cannot route by prefix: %s", reason)
        return None, reason

    async def _watch(self, following: "asyncio.Task[None] | None") -> None:
        """Scrape the engine until it is gone. Raises EngineGone, EngineSilent, EngineUnusable, and what ended `following`."""
        silent, adapters_at = 0, time.monotonic()
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(WATCH_SECONDS):
                    await self.agent.adapters_changed.wait()
                    self.agent.adapters_changed.clear()
                    adapters_at = -math.inf
            if following is not None and following.done():
                following.result()
            try:
                self.agent.set_stats(*await self._engine.stats())
                if time.monotonic() - adapters_at > ADAPTER_SECONDS:
                    adapters_at = time.monotonic()
                    self._set_models(await self._engine.models())
                if silent >= SILENT_SCRAPES:
                    self.agent.set_phase("ready")
                silent, self.agent.silent_since = 0, None
            except EngineSilent as error:
                silent += 1
                self.agent.silent_since = self.agent.silent_since or time.monotonic()
                if silent == SILENT_SCRAPES:
                    self.agent.set_phase("loading", f"{self.config.runtime_name}: {error}")

    def _set_models(self, models: list[Model]) -> None:
        named = [name.strip() for name in self.config.served_model_name.split(",") if name.strip()]
        self.agent.model_names = named or [model.id for model in models if model.parent is None]
        self.agent.adapters = {model.id: model.root for model in models if model.parent is not None}

    async def _supervise(self, process: EngineProcess) -> None:
        reason = await process.run()
        if not self.agent.draining:
            self._fail(reason)

    async def _drain(self) -> None:
        """Leave the index, and let running requests finish within the deadline."""
        agent = self.agent
        agent.draining = True
        seconds = self.config.drain_timeout if self._signal != signal.SIGINT else min(INTERRUPT_DRAIN_SECONDS, self.config.drain_timeout)
        log.info("draining %d requests, at most %g s", agent.in_flight, seconds)
        leaving = asyncio.create_task(self._leave_index())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await agent.idle.wait()
        await leaving
        agent.drained.set()
        await asyncio.sleep(LINGER_SECONDS)

    async def _leave_index(self) -> None:
        publisher, self.agent.publisher = self.agent.publisher, None
        self.agent.blocks = self.agent.indexed = None
        if publisher is not None:
            await publisher.leave()

    def _on_progress(self, percent: int) -> None:
        if self.agent.phase in ("starting", "loading"):
            self.agent.percent = min(percent, 99)

    def _fail(self, reason: str) -> None:
        self.agent.set_phase("failed", reason)
        self._failure = reason
        self._failed.set()

    def _on_signal(self, number: signal.Signals) -> None:
        if self._signal is not None:  # the sender does not want to wait
            self._failed.set()
        self._signal = number
        self.agent.drain_requested.set()
