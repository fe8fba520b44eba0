"""gRPC server of the endpoint picker: Envoy's external processor and the health service on one port."""

import asyncio
import logging
from collections.abc import AsyncIterator
from time import monotonic

import grpc
from google.protobuf.message import DecodeError
from grpc_health.v1.health_pb2_grpc import add_HealthServicer_to_server

from fairlead_router.config import RouterConfig
from fairlead_router.errors import ListenError
from fairlead_router.interop.picker.certificates import load_credentials
from fairlead_router.interop.picker.ext_proc_pb2 import ProcessingResponse
from fairlead_router.interop.picker.health import EXT_PROC, Health
from fairlead_router.interop.picker.picker import Picker
from fairlead_router.interop.picker.stream import Stream

logger = logging.getLogger(__name__)

MAX_STREAMS = 1000
"""Concurrent requests on one connection. A gateway opens further connections for more."""
CONNECTION_AGE = 5.0
"""Seconds after which a connection gets a GOAWAY: a proxy finishes its streams there and connects again, to any router that is ready.

Without it a proxy keeps its connection to a router that ends. gRPC's stop() sends a GOAWAY too, but fails streams that cross it.
"""
QUIET = 1.1 * CONNECTION_AGE + 1.0
"""Seconds without a new stream after which no proxy has a connection left. gRPC varies the age by a tenth."""
MESSAGE_MARGIN = 1024 * 1024
"""Bytes of a message beside a complete body (BUFFERED mode)."""


class PickerServer:
    """Server of the picker. `start` and `close` it on a running loop; `drain` it at the process's shutdown."""

    def __init__(self, picker: Picker, config: RouterConfig) -> None:
        """Raises ValueError for invalid certificates."""
        assert config.picker_port is not None
        self._picker, self._config = picker, config
        try:
            self._credentials = load_credentials(config.picker_tls)
        except (OSError, ValueError) as error:
            hint = "give self-signed, off, or a folder with tls.crt and tls.key"
            raise ValueError(f"--picker-tls {config.picker_tls!r}: {error}; {hint}") from error
        self._server: grpc.aio.Server | None = None
        self._stopping: asyncio.Task[None] | None = None
        self._last_stream = -QUIET  # when the newest stream began, as time.monotonic()
        self.port = config.picker_port

    async def start(self) -> None:
        """Listen. Raises ListenError."""
        options = [
            ("grpc.so_reuseport", 0),
            ("grpc.max_receive_message_length", self._config.max_body_bytes + MESSAGE_MARGIN),
            ("grpc.max_concurrent_streams", MAX_STREAMS),
            ("grpc.max_connection_age_ms", round(1000 * CONNECTION_AGE)),  # streams may last longer than their connection accepts new ones
        ]
        self._server = server = grpc.aio.server(options=options)  # bound to the loop that runs now
        # Without a deserializer, which could refuse no message before it is built, and whose errors gRPC logs with a traceback each.
        process = grpc.stream_stream_rpc_method_handler(self._process, response_serializer=ProcessingResponse.SerializeToString)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(EXT_PROC, {"Process": process}),))
        add_HealthServicer_to_server(Health(self._picker), server)
        host = f"[{self._config.host}]" if ":" in self._config.host else self._config.host
        address, credentials = f"{host}:{self.port}", self._credentials
        try:
            self.port = server.add_secure_port(address, credentials) if credentials else server.add_insecure_port(address)
        except RuntimeError as error:
            raise ListenError(f"--host {self._config.host} --picker-port {self.port}: {error}") from None
        await server.start()
        logger.info("endpoint picker on %s:%d, TLS %s", host, self.port, self._config.picker_tls)

    def drain(self) -> None:
        """Accept streams until proxies have gone to other routers. All streams may finish within the drain timeout."""
        if self._stopping is None and self._server is not None:
            self._stopping = asyncio.create_task(self._drain(self._server), name="picker drain")

    async def _drain(self, server: grpc.aio.Server) -> None:
        end = monotonic() + self._config.drain_timeout
        while (rest := min(self._last_stream + QUIET, end) - monotonic()) > 0:  # noqa: ASYNC110 - streams move the time
            await asyncio.sleep(rest)
        await server.stop(max(0.0, end - monotonic()))

    def abort(self) -> None:
        """End all streams now, also during a drain."""
        if self._server is not None:
            if self._stopping is not None:
                self._stopping.cancel()
            self._stopping = asyncio.create_task(self._server.stop(None), name="picker stop")

    async def close(self) -> None:
        """Wait for the drain, or stop immediately without one."""
        if self._stopping is not None:
            await self._stopping
        elif self._server is not None:
            await self._server.stop(None)

    async def _process(self, requests: AsyncIterator[bytes], context: "grpc.aio.ServicerContext[bytes, ProcessingResponse]") -> None:
        self._last_stream = monotonic()
        stream = Stream(self._picker)
        try:
            async for data in requests:
                for answer in await stream.answer(data):
                    await context.write(answer)
                stream.record_written()
                if stream.is_refused:
                    return
        except DecodeError:
            logger.debug("a message of the endpoint picker's client is no ProcessingRequest")
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "The message is not a ProcessingRequest of envoy.service.ext_proc.v3.")
        except Exception:
            logger.exception("internal error of the endpoint picker")
            raise  # Envoy answers 500, or forwards the request if its filter may fail open
        finally:
            stream.close()
