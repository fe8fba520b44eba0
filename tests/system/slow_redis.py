"""A proxy to Redis that can be made slow: every answer comes `delay` seconds late."""

import asyncio
import threading
from types import TracebackType


class SlowWay:
    """A TCP proxy in its own thread. It listens on `port`; `delay` may be changed at any time."""

    def __init__(self, target_port: int) -> None:
        self._target = target_port
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self.delay = 0.0
        self.port = 0

    def __enter__(self) -> "SlowWay":
        self._thread.start()
        self.port = asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result(10)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    async def _listen(self) -> int:
        self._tasks: set[asyncio.Task[None]] = set()
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    async def _close(self) -> None:
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            back_reader, back_writer = await asyncio.open_connection("127.0.0.1", self._target)
            try:
                await asyncio.gather(self._copy(reader, back_writer, late=False), self._copy(back_reader, writer, late=True))
            finally:
                back_writer.transport.abort()
        except (OSError, asyncio.CancelledError):
            pass
        finally:
            self._tasks.discard(task)
            writer.transport.abort()

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, late: bool) -> None:
        while data := await reader.read(1 << 16):
            if late and self.delay:
                await asyncio.sleep(self.delay)
            writer.write(data)
            await writer.drain()
        raise ConnectionError("one side closed")
