"""The gateway's side of the endpoint picker's protocol over real gRPC: phases in the order in which Envoy sends them."""

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Any

import grpc
from google.protobuf.struct_pb2 import Struct

from fairlead_router.interop.picker.ext_proc_pb2 import (
    FULL_DUPLEX_STREAMED,
    HeaderMap,
    HeaderMutation,
    HeaderValue,
    HttpBody,
    HttpHeaders,
    HttpTrailers,
    Metadata,
    ProcessingRequest,
    ProcessingResponse,
    ProtocolConfiguration,
)

PROCESS = "/envoy.service.ext_proc.v3.ExternalProcessor/Process"


def header_map(**headers: str) -> HeaderMap:
    """`_` stands for `-`; pseudo-headers begin with `_`."""
    named = {(":" + name[1:] if name.startswith("_") else name.replace("_", "-")): value for name, value in headers.items()}
    return HeaderMap(headers=[HeaderValue(key=name, raw_value=value.encode()) for name, value in named.items()])


def metadata(namespace: str, **entries: Any) -> Metadata:
    space = Struct()
    space.update({name.replace("_", "-"): value for name, value in entries.items()})
    return Metadata(filter_metadata={namespace: space})


def set_headers(mutation: HeaderMutation) -> dict[str, str]:
    return {option.header.key: option.header.raw_value.decode() for option in mutation.set_headers}


class Exchange:
    """One HTTP request of the gateway."""

    def __init__(self, call: Any, request_mode: int, response_mode: int) -> None:
        self.call = call
        self._config: ProtocolConfiguration | None = ProtocolConfiguration(request_body_mode=request_mode, response_body_mode=response_mode)

    async def send(self, **fields: Any) -> None:
        await self.call.write(ProcessingRequest(protocol_config=self._config, **fields))
        self._config = None

    async def read(self) -> ProcessingResponse:
        async with asyncio.timeout(20):
            answer = await self.call.read()
        assert answer is not grpc.aio.EOF, "the stream has ended"
        return answer

    async def headers(self, path: str, end: bool = False, subset: list[str] | None = None, method: str = "POST", **more: str) -> None:
        said = HttpHeaders(headers=header_map(_method=method, _path=path, content_type="application/json", **more), end_of_stream=end)
        hint = None if subset is None else metadata("envoy.lb.subset_hint", x_gateway_destination_endpoint_subset=subset)
        await self.send(request_headers=said, metadata_context=hint)

    async def body(self, *chunks: bytes, end: bool = True) -> None:
        for number, chunk in enumerate(chunks, start=1):
            await self.send(request_body=HttpBody(body=chunk, end_of_stream=end and number == len(chunks)))

    async def request(self, path: str, body: bytes, **more: Any) -> None:
        """Send headers and the body in two chunks."""
        await self.headers(path, **more)
        await self.body(body[: len(body) // 2], body[len(body) // 2 :])

    async def picked(self) -> tuple[list[str], dict[str, str]]:
        """Return the endpoints named (in header and metadata alike), and all headers set."""
        answer = await self.read()
        assert answer.WhichOneof("response") == "request_headers", answer
        return named_in(answer, answer.request_headers.response.header_mutation)

    async def streamed(self) -> bytes:
        """Return the body that goes on to the worker in full-duplex mode."""
        body, end = bytearray(), False
        while not end:
            answer = await self.read()
            piece = answer.request_body.response.body_mutation.streamed_response
            assert answer.WhichOneof("response") == "request_body" and len(piece.body) <= 64 * 1024
            body += piece.body
            end = piece.end_of_stream
        return bytes(body)

    async def refused(self) -> tuple[int, bytes, dict[str, str]]:
        answer = (await self.read()).immediate_response
        assert answer.status.code, "not refused"
        assert await self.call.read() is grpc.aio.EOF, "nothing follows an immediate response"
        return answer.status.code, answer.body, set_headers(answer.headers)

    async def respond(self, status: int = 200, served: str = "", end: bool = False, **more: str) -> dict[str, str]:
        """Report the worker's response headers. Returns the headers added to them."""
        context = metadata("envoy.lb", x_gateway_destination_endpoint_served=served) if served else None
        head = HttpHeaders(headers=header_map(_status=str(status), **more), end_of_stream=end)
        await self.send(response_headers=head, metadata_context=context)
        return set_headers((await self.read()).response_headers.response.header_mutation)

    async def response_body(self, chunk: bytes, end: bool = False) -> ProcessingResponse:
        await self.send(response_body=HttpBody(body=chunk, end_of_stream=end))
        return await self.read()

    async def trailers(self, **more: str) -> None:
        await self.send(request_trailers=HttpTrailers(trailers=header_map(**more)))


def named_in(answer: ProcessingResponse, mutation: HeaderMutation) -> tuple[list[str], dict[str, str]]:
    headers = set_headers(mutation)
    named = headers["x-gateway-destination-endpoint"]
    assert answer.dynamic_metadata["envoy.lb"]["x-gateway-destination-endpoint"] == named
    return named.split(","), headers


class Gateway:
    """A channel to one picker."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.channel = channel
        self._process = channel.stream_stream(
            PROCESS, request_serializer=ProcessingRequest.SerializeToString, response_deserializer=ProcessingResponse.FromString
        )

    def exchange(self, request_mode: int = FULL_DUPLEX_STREAMED, response_mode: int = FULL_DUPLEX_STREAMED) -> Exchange:
        return Exchange(self._process(), request_mode, response_mode)


class Balancer:
    """Passes each new connection to the first of `ports`, as a Kubernetes Service does, and what the server sends after a delay."""

    DELAY = 0.05  # seconds

    def __init__(self, ports: list[int]) -> None:
        self.ports = ports
        self.port = 0
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> "Balancer":
        self._server = await asyncio.start_server(self._connect, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        theirs, ours = await asyncio.open_connection("127.0.0.1", self.ports[0])
        for source, target, delay in ((reader, ours, 0.0), (theirs, writer, self.DELAY)):
            task = asyncio.create_task(self._copy(source, target, delay))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _copy(self, source: asyncio.StreamReader, target: asyncio.StreamWriter, delay: float) -> None:
        try:
            while data := await source.read(1 << 16):
                await asyncio.sleep(delay)
                target.write(data)
                await target.drain()
        except OSError:
            pass
        finally:
            target.close()


@asynccontextmanager
async def gateway(
    port: int, credentials: grpc.ChannelCredentials | None = None, options: Iterable[tuple[str, Any]] = ()
) -> AsyncIterator[Gateway]:
    options = [("grpc.max_send_message_length", -1), *options]
    if credentials is None:
        channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}", options)
    else:
        channel = grpc.aio.secure_channel(f"localhost:{port}", credentials, options)
    async with channel:
        yield Gateway(channel)
