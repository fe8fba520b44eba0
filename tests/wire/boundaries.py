"""The messages that each server finds in a byte stream, compared with h11. In this process, without sockets: a thousand per second."""

import asyncio
import random
from collections.abc import Callable
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import h11
import httptools
from starlette.types import Receive, Scope, Send
from tests.wire.streams import splits

from fairlead_common.http.asgi import AsgiServer
from fairlead_common.http.client_connection import ClientConnection, Request
from fairlead_common.http.connection_limiter import ConnectionLimiter
from fairlead_common.http.response import Reply

Message = tuple[bytes, bytes, bytes]
"""Method, path, body; the body of GET and HEAD is left out, as the router drops it."""
LIMITS: Any = SimpleNamespace(header_timeout=10.0, body_timeout=10.0, max_connections=10_000)
TURNS = 6
"""Event loop iterations without a message after which none will come."""


class Transport:
    """A connection that accepts all writes; `paused` and `closing` are what the protocol requested."""

    def __init__(self) -> None:
        self.paused = self.closing = self.late_write = False

    def write(self, data: bytes) -> None:
        self.late_write = self.late_write or self.closing

    def is_closing(self) -> bool:
        return self.closing

    def close(self) -> None:
        self.closing = True

    abort = write_eof = close

    def can_write_eof(self) -> bool:
        return True

    def pause_reading(self) -> None:
        self.paused = True

    def resume_reading(self) -> None:
        self.paused = False

    def set_write_buffer_limits(self, high: int) -> None: ...

    def get_write_buffer_size(self) -> int:
        return 0

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default


class Server:
    """Makes connections of one server and records the messages that its application gets."""

    def __init__(self, side: str) -> None:
        self.messages: list[Message] = []
        self.late_write = False
        """Whether the last stream's connection was written to after its end."""
        loop = asyncio.get_running_loop()
        guard = ConnectionLimiter(LIMITS, str)
        open: set[ClientConnection] = set()
        app = self._reply if side == "router" else AsgiServer(self._answer)
        self.make: Callable[[], Any] = lambda: ClientConnection(app, open, loop, guard)

    async def _reply(self, request: Request, reply: Reply) -> None:
        while not request.is_complete:
            await request.wait_for_body()
        self.messages.append(_message(request.method.encode(), request.target, request.take()))
        reply.send(404, b"{}")

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        body, more = b"", True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body, more = body + message["body"], message["more_body"]
        self.messages.append(_message(scope["method"].encode(), scope["raw_path"] + b"?" + scope["query_string"], body))
        await send({"type": "http.response.start", "status": 404, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"{}"})

    async def read(self, pieces: list[bytes]) -> list[Message]:
        """Return the messages of a stream that arrives in these pieces."""
        self.messages = []
        protocol, transport = self.make(), Transport()
        protocol.connection_made(transport)
        for piece in pieces:
            while piece and not transport.closing:
                view = protocol.get_buffer(-1)
                size = min(len(view), len(piece))
                view[:size] = piece[:size]
                protocol.buffer_updated(size)
                piece = piece[size:]
                for _ in range(200):
                    if not transport.paused or transport.closing:
                        break
                    await asyncio.sleep(0)
                else:
                    raise AssertionError("reading is paused for good")
        idle = 0
        while idle < TURNS:
            count = len(self.messages)
            await asyncio.sleep(0)
            idle = 0 if len(self.messages) > count else idle + 1
        protocol.connection_lost(None)
        await asyncio.sleep(0)
        self.late_write = transport.late_write
        return self.messages


def by_h11(data: bytes) -> list[Message]:
    """Return the messages that h11 finds before it refuses the rest."""
    connection = h11.Connection(h11.SERVER)
    found: list[Message] = []
    head, body = None, b""
    with suppress(h11.ProtocolError):
        connection.receive_data(data)
        while True:
            event = connection.next_event()
            if isinstance(event, h11.Request):
                head, body = event, b""
            elif isinstance(event, h11.Data):
                body += bytes(event.data)
            elif isinstance(event, h11.EndOfMessage):
                assert head is not None
                found.append(_message(bytes(head.method), bytes(head.target), body))
                connection.send(h11.Response(status_code=404, headers=[("content-length", "0")]))
                connection.send(h11.EndOfMessage())
                if connection.our_state is h11.MUST_CLOSE:
                    return found
                connection.start_next_cycle()
            else:
                return found
    return found


def _message(method: bytes, target: bytes, body: bytes) -> Message:
    if not target.startswith(b"/"):
        try:
            target = httptools.parse_url(target).path or b"/"
        except httptools.HttpParserInvalidURLError:
            target = b"/"
    path = target.partition(b"?")[0]
    if path.endswith(b"/") and path != b"/" and not path.endswith(b"//"):  # both sides leave out one slash at a path's end
        path = path[:-1]
    return method, path, b"" if method in (b"GET", b"HEAD") else body


async def compare(data: bytes, draw: random.Random, servers: dict[str, Server]) -> tuple[str, dict[str, int]]:
    """Return the disagreements with h11 (empty: none), and how many messages each found, and both."""
    expected = by_h11(data)
    found = {"h11": len(expected)}
    for side, server in servers.items():
        messages = await server.read(splits(draw, data))
        found[side] = len(messages)
        both = min(len(messages), len(expected))
        found[f"{side} and h11"] = both
        if server.late_write:
            return f"{side}: written after its end in {data!r}", found
        if messages[:both] != expected[:both]:
            return f"{side}: {messages[:both]} and not {expected[:both]} in {data!r}", found
    return "", found


def quiet() -> None:
    """Silence the log: one line for each stream that is no HTTP is too much."""
