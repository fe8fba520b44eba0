"""One pipelined connection for any number of callers: replies come in the order of the commands."""

import asyncio
from collections import deque
from collections.abc import Coroutine, Sequence
from typing import Any

from redis.asyncio.connection import AbstractConnection

from fairlead_index.redis.access import Address
from fairlead_index.redis.connection import Command, RedisError, read_reply


class _Request:
    """Commands written together, and their replies so far."""

    __slots__ = ("count", "future", "replies", "sent_at")

    def __init__(self, count: int, future: "asyncio.Future[list[Any]]", sent_at: float) -> None:
        self.count, self.future, self.sent_at, self.replies = count, future, sent_at, list[Any]()


class SharedConnection:
    """Shares one open connection of redis-py between callers. A caller that leaves keeps only its place in the order.

    Only the reader uses it: it has a call in flight for each request that waits, and leaves at its deadline. With 64 callers a call through
    redis-py's pool takes 3.3 to 5.1 times the CPU and up to 10 times as long; with one caller 1.1 to 1.9 times the CPU and as long
    (`python -m bench index/redis_client`). A pool also loses a connection for each caller that leaves.
    """

    def __init__(self, connection: AbstractConnection, address: Address, timeout: float) -> None:
        """`timeout`: seconds after which a connection that owes a reply counts as dead."""
        self.address = address
        self.is_open = True
        self._connection, self._timeout = connection, timeout
        self._loop = asyncio.get_running_loop()
        self._requests: deque[_Request] = deque()
        self._unsent: list[bytes] = []
        self._has_unsent = asyncio.Event()
        self._replied_at = self._loop.time()
        self._tasks = [self._loop.create_task(self._close_on_error(part)) for part in (self._write(), self._read())]

    async def send(self, commands: Sequence[Command]) -> list[Any]:
        """Send commands without others between them. Return their replies, error replies among them. Raises RedisError or OSError."""
        if not self.is_open:
            raise ConnectionResetError("the connection to redis is closed")
        packed = self._connection.pack_commands(commands)
        request = _Request(len(commands), self._loop.create_future(), self._loop.time())
        self._requests.append(request)
        self._unsent += packed
        self._has_unsent.set()
        try:
            return await request.future
        except asyncio.CancelledError:
            # An early cancellation keeps the connection. After a whole timeout without a reply the connection is dead.
            if self._requests and self._loop.time() - max(self._replied_at, self._requests[0].sent_at) > 0.9 * self._timeout:
                await self.close()
            raise

    async def close(self, error: Exception | None = None) -> None:
        """Close immediately. Waiting callers get `error`, or a ConnectionError."""
        self.is_open = False
        for request in self._requests:
            if not request.future.done():
                request.future.set_exception(error or ConnectionResetError("the connection to redis is closed"))
        self._requests.clear()
        for task in self._tasks:
            task.cancel()
        await self._connection.disconnect(nowait=True)

    async def _write(self) -> None:
        while await self._has_unsent.wait():
            self._has_unsent.clear()
            commands, self._unsent = self._unsent, []  # of all callers since the last write: one system call
            await self._connection.send_packed_command(commands)

    async def _read(self) -> None:
        while True:
            reply = await read_reply(self._connection)
            self._replied_at = self._loop.time()
            if not self._requests:
                raise RedisError("redis sent a reply without a command")
            request = self._requests[0]
            request.replies.append(reply)
            if len(request.replies) == request.count:
                self._requests.popleft()
                if not request.future.done():
                    request.future.set_result(request.replies)

    async def _close_on_error(self, part: Coroutine[Any, Any, None]) -> None:
        try:
            await part
        except Exception as error:  # also a bug: no caller may wait forever
            await self.close(error)
