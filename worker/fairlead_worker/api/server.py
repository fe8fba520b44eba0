"""The lifecycle of a worker: bind, load, serve, drain, exit. The engine process always ends with the worker."""

import asyncio
import contextlib
import logging
import os
import shutil
import signal
import socket
import time
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass
from typing import Any

import uvicorn

from fairlead_common.http.asgi import AsgiServer
from fairlead_common.http.client_connection import ClientConnection
from fairlead_common.http.connection_limiter import ConnectionLimiter
from fairlead_common.http.framing import bound_unsent
from fairlead_common.http.unread_answers import abort_unread
from fairlead_common.memory import freeze_gc
from fairlead_common.telemetry.tracer import Tracer
from fairlead_worker.api.admin.prefix_warmup import should_warm_up, warm_up
from fairlead_worker.api.app import build
from fairlead_worker.api.engine.child import EngineChild
from fairlead_worker.api.engine.index_publisher import IndexPublisher
from fairlead_worker.api.front.wrap import wrap
from fairlead_worker.api.http import tenant_of
from fairlead_worker.api.metrics.vllm_names import NAMES
from fairlead_worker.api.metrics.worker_metrics import Metrics
from fairlead_worker.api.routes.apis import Part
from fairlead_worker.api.worker import Worker
from fairlead_worker.config import WorkerConfig

logger = logging.getLogger(__name__)

FAILURE_LINGER_SECONDS = 2.0
"""Seconds that a worker answers 503 after its engine has ended. Streams get their error event, and probes and routers see the reason."""
INTERRUPT_DRAIN_SECONDS = 1.0
"""Seconds that running streams get after SIGINT, because a person waits at a terminal."""
CLOSING_SECONDS = 2.0
"""Seconds for the last bytes of streams that the drain has cut."""
ENGINE_STOP_SECONDS = 10.0
"""Seconds for the engine to finish its current step before it is killed."""
CHECK_SECONDS = 1.0
"""Interval between checks for clients that are idle, slow, or do not read their answers."""


@dataclass(frozen=True)
class Listeners:
    """Bound sockets. `admin` is the socket of `FAIRLEAD_ADMIN_PORT`; with None, one port serves all paths."""

    inference: socket.socket
    admin: socket.socket | None = None


async def serve(config: WorkerConfig, listeners: Listeners, child: EngineChild, tracer: Tracer | None = None) -> str:
    """Run the worker with a started engine until it ends. Return the reason of a failure, or an empty string after an orderly shutdown."""
    try:
        async with asyncio.TaskGroup() as tasks:
            server = Server(config, listeners, child, tracer)
            background = [tasks.create_task(work, name=name) for name, work in server.background_tasks()]
            try:
                return await server.run()
            finally:
                server.child.kill()
                server.worker.close()
                for task in background:
                    task.cancel()
    except* Exception as errors:
        logger.exception("a task of the worker failed")
        reason = "; ".join(f"{type(error).__name__}: {error}" for error in errors.exceptions)
    return f"internal error: {reason}"


class UvicornServer(uvicorn.Server):
    """uvicorn without its own signal handling, because the worker drains before uvicorn shuts down."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Port:
    """One listening port: its HTTP server and its own connection limits, which clients of another port cannot exhaust.

    uvicorn listens and shuts down. Its connections are the router's, because its own have no limits and take twice the CPU for a token.
    """

    def __init__(self, worker: Worker, listener: socket.socket, part: Part, tracer: Tracer | None) -> None:
        bound_unsent(listener)
        self.number: int = listener.getsockname()[1]
        self._limiter = ConnectionLimiter(worker.config.limits, lambda name: f"--limits {name}", tenant_of)
        self._connections: set[ClientConnection] = set()
        self._listener = listener
        app = wrap(build(worker, part), worker.config, tracer, part)
        self._app = AsgiServer(app)
        self.server = UvicornServer(
            uvicorn.Config(
                app,
                http=self._connect,  # type: ignore[arg-type]  # a protocol factory, not a class
                ws="none",
                lifespan="off",
                log_config=None,
                timeout_graceful_shutdown=int(CLOSING_SECONDS),
            )
        )
        self.server.server_state.connections = self._connections  # type: ignore[assignment]  # uvicorn calls `shutdown` of each

    def _connect(self, **_: object) -> ClientConnection:
        return ClientConnection(self._app, self._connections, asyncio.get_running_loop(), self._limiter)

    async def serve(self) -> None:
        """Serve until `server.should_exit` is set. Then answers under way have CLOSING_SECONDS to end."""
        checks = asyncio.create_task(self._check_connections())
        try:
            await self.server.serve(sockets=[self._listener])
        finally:
            checks.cancel()

    async def _check_connections(self) -> None:
        """Until cancelled, end connections that exceed a timeout or do not read their answers."""
        while True:
            await asyncio.sleep(CHECK_SECONDS)
            self._limiter.close_overdue(time.monotonic())
            for connection in list(self._connections):
                connection.close_if_stalled(time.monotonic())
            abort_unread(self._connections, time.monotonic())


class Server:
    """The parts of a running worker."""

    def __init__(self, config: WorkerConfig, listeners: Listeners, child: EngineChild, tracer: Tracer | None) -> None:
        port = listeners.inference.getsockname()[1]
        self.config = config
        self.child, self.client = child, child.client
        metrics = Metrics(self.client, config.names[0], NAMES if config.metrics_names == "vllm" else {})
        self.worker = Worker(config, self.client, metrics, config.address(port))
        self.publisher: IndexPublisher | None = None
        self._port = port
        self._stop_requested = asyncio.Event()
        self._signal: signal.Signals | None = None
        self._streams_cut = False
        """True if the drain's deadline ended streams. That is not an engine failure."""
        self._ports = [Port(self.worker, listeners.inference, "inference" if listeners.admin else "all", tracer)]
        if listeners.admin is not None:
            self._ports.append(Port(self.worker, listeners.admin, "admin", tracer))

    def background_tasks(self) -> Iterator[tuple[str, Coroutine[Any, Any, None]]]:
        """Yield the tasks that run beside the HTTP server, as (name, coroutine)."""
        yield "engine messages", self.client.run()
        yield "engine process", self.child.run()
        yield "engine watch", self.child.watch()
        yield "start", self._start()

    async def run(self) -> str:
        """Serve until a signal arrives or the engine ends. Return the reason of a failure, or an empty string after an orderly shutdown."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)
        servers = [asyncio.create_task(port.serve(), name=f"http {port.number}") for port in self._ports]
        logger.info("listening on http://%s:%d as %s, advertised as %s", self.config.host, self._port, self.config.pod, self.worker.address)
        if len(self._ports) > 1:
            logger.info("admin paths on http://%s:%d", self.config.host, self._ports[1].number)
        engine_ended = asyncio.create_task(self.client.ended.wait())
        stop_requested = asyncio.create_task(self._stop_requested.wait())
        try:
            await asyncio.wait((engine_ended, stop_requested, *servers), return_when=asyncio.FIRST_COMPLETED)
            if stop_requested.done():
                await self._drain()
            else:
                # immediately, so that no router chooses this worker while it answers 503
                leaving = asyncio.create_task(self._leave_index())
                await asyncio.wait((stop_requested,), timeout=FAILURE_LINGER_SECONDS)
                await leaving
            failure = self.client.state.reason if self.client.ended.is_set() and not self._streams_cut else ""
            if any(server.done() for server in servers) and not stop_requested.done():
                failure = failure or "the HTTP server ended"
            await self._leave_index()
            await self.child.stop(ENGINE_STOP_SECONDS)
            for port in self._ports:
                port.server.should_exit = True
            await asyncio.gather(*servers)
            logger.info("ended: %s", failure or "in order")
            return failure
        finally:
            for task in (engine_ended, stop_requested, *servers):
                task.cancel()

    async def _start(self) -> None:
        """Wait for the engine; then build the prompt encoder, join the index, and start to serve."""
        await self.client.ready.wait()
        ready = self.client.state.ready
        assert ready is not None
        try:
            if redis := self.config.redis:
                self.publisher = IndexPublisher(self.config, redis, self.worker.address, ready.page_size, lambda: self.client.arrival_rate)
                writer = self.publisher.writer
                self.worker.incarnation = lambda: writer.incarnation
                self.worker.metrics.index_joined.set_function(lambda: float(writer.joined))
                self.worker.metrics.index_full.set_function(lambda: float(writer.stats.full))
                self.client.on_events = self.publisher.on_events
                self.client.on_load = self.publisher.on_load
            self.worker.warming = should_warm_up(self.config)
            await asyncio.to_thread(self.worker.set_ready, ready)
            freeze_gc()
        except Exception as error:
            self.client.mark_failed(f"the engine is ready, but the worker cannot serve: {error}")
            return
        start_up = self.client.state.start_up
        if self.worker.warming:
            start_up.enter("warm", time.monotonic())
            await warm_up(self.worker)
            self.worker.warming = False
        if self.publisher is not None and not self.worker.draining:
            self.publisher.start(lambda: start_up.join(time.monotonic()))
        logger.info("start-up: %s", start_up.finish(time.monotonic()))
        logger.info(
            "ready: %s, %d pages of %d tokens, %s, chunks of %d, context %d, attention %s",
            ", ".join(self.config.names),
            ready.pages,
            ready.page_size,
            ready.kv_groups,
            ready.chunked_prefill_size,
            ready.max_model_len,
            ready.backend,
        )
        if ready.sampling_defaults:
            defaults = ", ".join(f"{name} {value:g}" for name, value in ready.sampling_defaults.items())
            logger.info("sampling defaults from generation_config.json: %s (--generation-config none: OpenAI's defaults)", defaults)

    async def _drain(self) -> None:
        """Leave the index, let running requests finish within the deadline, and end the rest with an error event."""
        self.worker.draining = True
        seconds = self.config.drain_timeout if self._signal == signal.SIGTERM else min(INTERRUPT_DRAIN_SECONDS, self.config.drain_timeout)
        logger.info("%s: draining %d requests, at most %g s", self._signal and self._signal.name, self.worker.in_flight, seconds)
        leaving = asyncio.create_task(self._leave_index())
        try:
            async with asyncio.timeout(seconds):
                await self.worker.idle.wait()
        except TimeoutError:
            self._streams_cut = not self.client.ended.is_set()
            self.client.mark_failed(f"this worker is shutting down, and the request did not end within {seconds:g} s")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CLOSING_SECONDS):
                    await self.worker.idle.wait()
        await leaving

    async def _leave_index(self) -> None:
        publisher, self.publisher = self.publisher, None
        if publisher is not None:
            await publisher.leave()

    def _on_signal(self, number: signal.Signals) -> None:
        if self._signal is not None:
            # A second signal means that the sender does not want to wait. The engine exits when its stdin closes.
            shutil.rmtree(self.child.address, ignore_errors=True)
            os._exit(128 + number)
        self._signal = number
        self._stop_requested.set()
