"""A client of the Redis node that serves one namespace: behind a Service, in a Cluster, or behind Sentinels.

All keys of a namespace share one hash tag, so one node is right at a time. Another node of a Cluster replies MOVED; the client follows and
stays there. While the Cluster slot migrates, scripts get TRYAGAIN (see `Scripts`) and nothing is written anywhere.
"""

import asyncio
import contextlib
from collections.abc import Iterable, Sequence
from typing import Any, Final

from fairlead_index.redis.access import Address, RedisAccess
from fairlead_index.redis.connection import Command, Connection, OnLate, RedisError, ReplyError, connect

REDIRECTIONS: Final = 3
_WRONG_NODE: Final = frozenset({"READONLY", "NOAUTH", "WRONGPASS", "NOREPLICAS"})
"""This node is not, or no longer, the right one. Connect again: the address may lead to another node, or the password may have changed."""


class RedisClient:
    """One connection, opened on demand. Each call, redirections included, ends within `timeout` seconds: with a reply, a RedisError,
    an OSError or a TimeoutError."""

    def __init__(self, access: RedisAccess, timeout: float) -> None:
        self._access, self._timeout = access, timeout
        self._connection: Connection | None = None
        self._connecting: asyncio.Task[Connection] | None = None
        self._node: Address | None = None  # the target of the last MOVED
        self._peers: tuple[Address, ...] = ()  # the other nodes of that Cluster, to try when ours is gone
        self._first_node = 0  # the index of the node to try first

    async def execute(self, *command: bytes | str | int | float, on_late: OnLate | None = None) -> Any:
        """Send one command. Return its reply. `on_late`: as in `Connection.send`."""
        [reply] = await self._send([command], on_late)
        return reply

    async def pipeline(self, commands: Sequence[Command]) -> list[Any]:
        """Send commands together. Return their replies."""
        return await self._send(commands) if commands else []

    async def transaction(self, commands: Sequence[Command]) -> list[Any]:
        """Run commands in one MULTI/EXEC. Return their replies."""
        replies: list[Any] = (await self._send([("MULTI",), *commands, ("EXEC",)]))[-1]
        _raise_first_error(replies)
        return replies

    async def on_every_node(self, *command: bytes | str | int | float) -> list[Any]:
        """Run a command on every primary and replica of a Cluster, otherwise on the current server. Return one reply per node."""
        try:
            shards = await self.execute("CLUSTER", "SLOTS")
        except ReplyError:  # no Cluster
            return [await self.execute(*command)]
        assert self._connection is not None  # it has just replied, and nothing was awaited since
        nodes = _parse_nodes(shards, self._connection.address[0])
        replies: list[Any] = []
        for node in sorted(nodes):
            async with asyncio.timeout(self._timeout):
                connection = await self._open(node)
                try:
                    replies += await connection.send([command])
                finally:
                    connection.abort()
        _raise_first_error(replies)
        return replies

    def drop(self) -> None:
        """Close the connection. The next call opens another."""
        if self._connection is not None:
            self._connection.abort()
            self._connection = None
        self._first_node += 1

    async def close(self) -> None:
        if self._connecting is not None:
            self._connecting.cancel()
            await asyncio.wait({self._connecting})
        self.drop()

    async def _send(self, commands: Sequence[Command], on_late: OnLate | None = None) -> list[Any]:
        async with asyncio.timeout(self._timeout):
            return await self._send_following_redirects(commands, on_late)

    async def _send_following_redirects(self, commands: Sequence[Command], on_late: OnLate | None) -> list[Any]:
        for _ in range(REDIRECTIONS):
            connection = self._connection
            if connection is None or not connection.is_open:
                connection = await self._ensure_connected()
            try:
                replies = await self._send_on(connection, commands, on_late)
                _raise_first_error(replies)
                return replies
            except ReplyError as error:
                if error.code == "MOVED":
                    await self._follow(connection, str(error))
                    continue
                if error.code in _WRONG_NODE and self._connection is connection:
                    self._node = None
                    self.drop()
                raise
        raise RedisError(f"the cluster redirected a command {REDIRECTIONS} times: its nodes disagree about the slot's owner")

    async def _send_on(self, connection: Connection, commands: Sequence[Command], on_late: OnLate | None = None) -> list[Any]:
        future = connection.send(commands, on_late)
        try:
            return await future
        except asyncio.CancelledError:
            if on_late is not None and future.done() and not future.cancelled() and future.exception() is None:
                on_late(future.result()[-1])  # the reply and the cancellation came in the same iteration of the event loop
            # An early cancellation keeps the connection. After a whole timeout without a byte the connection is dead.
            if connection.silent_seconds > 0.9 * self._timeout:
                connection.abort()
            raise

    async def _ensure_connected(self) -> Connection:
        """Join the connection attempt in progress: a thousand callers open one connection, and a cancelled caller stops no other."""
        if self._connecting is None:
            self._connecting = asyncio.get_running_loop().create_task(self._connect(), name="redis-connect")
            self._connecting.add_done_callback(self._on_connect_done)
        return await asyncio.shield(self._connecting)

    def _on_connect_done(self, task: "asyncio.Task[Connection]") -> None:
        self._connecting = None
        if task.cancelled() or task.exception() is not None:
            self._node = None
            self._first_node += 1
        else:
            self._connection = task.result()

    async def _connect(self) -> Connection:
        nodes = [self._node] if self._node else []
        others = [*self._access.location.nodes, *self._peers]
        nodes += [node for node in _rotate(others, self._first_node) if node not in nodes]
        failure: Exception = RedisError("no node")
        async with asyncio.timeout(self._timeout):
            for node in nodes:
                try:
                    return await self._open(node)
                except OSError as error:
                    failure = error
        raise failure

    async def _open(self, node: Address) -> Connection:
        if self._access.location.sentinel:
            node = await self._primary(node)
        connection = await connect(node, self._access.tls())
        try:
            user, password = self._access.credentials()
            greeting: list[Command] = [("AUTH", *([user] if user else []), password)] if password else []
            if self._access.location.database:
                greeting.append(("SELECT", self._access.location.database))
            if greeting:
                _raise_first_error(await connection.send(greeting))
        except BaseException:
            connection.abort()
            raise
        return connection

    async def _primary(self, sentinel: Address) -> Address:
        name = self._access.location.sentinel
        connection = await connect(sentinel, self._access.tls())
        try:
            [found] = await connection.send([("SENTINEL", "GET-MASTER-ADDR-BY-NAME", name)])
        finally:
            connection.abort()
        if isinstance(found, ReplyError) or not found:
            raise OSError(f"sentinel {sentinel[0]}:{sentinel[1]} knows no primary {name!r}: {found or 'none of that name'}")
        return found[0].decode(), int(found[1])

    async def _follow(self, connection: Connection, moved: str) -> None:
        """Follow `MOVED 3999 10.0.0.7:6381`. An empty host means the replying node."""
        host, _, port = moved.split()[2].rpartition(":")
        node = (host or connection.address[0], int(port))
        with contextlib.suppress(ReplyError):  # without the right to CLUSTER SLOTS only the URL's nodes are known
            [shards] = await self._send_on(connection, [("CLUSTER", "SLOTS")])
            _raise_first_error([shards])
            self._peers = tuple(_parse_nodes(shards, connection.address[0]))
        if self._connection is connection:  # otherwise another caller has followed already
            self._node = node
            self.drop()


def _parse_nodes(shards: Any, replying_host: str) -> set[Address]:
    """Return the nodes that CLUSTER SLOTS lists. An empty host means the replying node."""
    return {(each[0].decode() or replying_host, int(each[1])) for shard in shards for each in shard[2:]}


def _rotate(nodes: Sequence[Address], first: int) -> Iterable[Address]:
    return (nodes[(first + at) % len(nodes)] for at in range(len(nodes)))


def _raise_first_error(replies: list[Any]) -> None:
    for reply in replies:
        if isinstance(reply, ReplyError):
            raise reply
