"""A TCP link to a server that can be cut, held or redirected: network faults for a client that knows one address."""

import asyncio
from types import TracebackType


class Link:
    """Listens on a port of 127.0.0.1 and forwards to `target`."""

    def __init__(self, target: int) -> None:
        self.target = target
        self.port = 0
        self._open = asyncio.Event()
        self._open.set()
        self._connections: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    @property
    def up(self) -> bool:
        return self._open.is_set()

    def hold(self) -> None:
        """Stop forwarding without an error: connections stay open, new ones hang."""
        self._open.clear()

    def heal(self) -> None:
        """Forward everything again. Connections that the partition has broken stay broken."""
        self.drop()
        self._open.set()

    def lead_to(self, target: int) -> None:
        self.target = target
        self.drop()

    def drop(self) -> None:
        """Break every connection. Data in flight is lost."""
        for connection in list(self._connections):
            connection.transport.abort()

    async def __aenter__(self) -> "Link":
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        assert self._server is not None
        self._server.close()
        self.drop()
        self._open.set()
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        me = asyncio.current_task()
        assert me is not None
        self._tasks.add(me)
        me.add_done_callback(self._tasks.discard)
        self._connections.add(writer)
        try:
            try:
                there, back = await asyncio.open_connection("127.0.0.1", self.target)
            except OSError:
                writer.transport.abort()
                return
            self._connections.add(back)
            ways = [asyncio.create_task(self._pass(reader, back)), asyncio.create_task(self._pass(there, writer))]
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            for connection in (writer, back):
                connection.transport.abort()
            await asyncio.wait(ways)
            self._connections.discard(back)
        finally:
            self._connections.discard(writer)

    async def _pass(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        try:
            while data := await source.read(65536):
                await self._open.wait()
                sink.write(data)
                await sink.drain()
        except OSError:
            pass
