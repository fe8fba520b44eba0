"""The Redis that holds one namespace, wherever it is just now: behind a Service, in a Cluster, behind Sentinels.

All keys of a namespace share one hash tag, so there is one right node at a time. A Cluster's node that is not it says MOVED, and the
client goes there and stays. While the slot is on the move scripts are answered TRYAGAIN (see `Scripts`), and nothing is written anywhere.
"""

import asyncio
import contextlib
from collections.abc import Iterable, Sequence
from typing import Any, Final

from fairlead_index.redis.access import Address, RedisAccess
from fairlead_index.redis.connection import Command, Connection, RedisError, ReplyError, connect

REDIRECTIONS: Final = 3
_LEFT_BEHIND: Final = frozenset({"READONLY", "NOAUTH", "WRONGPASS", "NOREPLICAS"})
"""Not, or no longer, the node for us: connect again, the address may lead to another, the Secret hold another password."""


class RedisClient:
    """One connection, made when it is needed. Calls end within `timeout` seconds, with all redirections: a reply, a RedisError, an OSError
    or TimeoutError."""

    def __init__(self, access: RedisAccess, timeout: float) -> None:
        self._access, self._timeout = access, timeout
        self._connection: Connection | None = None
        self._connecting: asyncio.Task[Connection] | None = None
        self._node: Address | None = None  # where a Cluster sent us
        self._peers: tuple[Address, ...] = ()  # the other nodes of that Cluster: one of them knows more when ours is gone
        self._turn = 0  # which node to begin with

    async def execute(self, *command: bytes | str | int | float) -> Any:
        """The reply to one command."""
        [reply] = await self._replies([command])
        return reply

    async def pipeline(self, commands: Sequence[Command]) -> list[Any]:
        """Replies to commands sent together."""
        return await self._replies(commands) if commands else []

    async def transaction(self, commands: Sequence[Command]) -> list[Any]:
        """Replies to commands that nothing comes between."""
        replies: list[Any] = (await self._replies([("MULTI",), *commands, ("EXEC",)]))[-1]
        _raise_first(replies)
        return replies

    async def on_every_node(self, *command: bytes | str | int | float) -> list[Any]:
        """One reply of each node: of a Cluster all primaries and replicas, else the server that calls go to. For administrators."""
        try:
            shards = await self.execute("CLUSTER", "SLOTS")
        except ReplyError:  # no Cluster
            return [await self.execute(*command)]
        assert self._connection is not None  # it has just answered, and nothing was awaited since
        nodes = _nodes_in(shards, self._connection.address[0])
        replies: list[Any] = []
        for node in sorted(nodes):
            async with asyncio.timeout(self._timeout):
                connection = await self._open(node)
                try:
                    replies += await connection.send([command])
                finally:
                    connection.abort()
        _raise_first(replies)
        return replies

    def drop(self) -> None:
        """Closes the connection; the next call makes another."""
        if self._connection is not None:
            self._connection.abort()
            self._connection = None
        self._turn += 1

    async def close(self) -> None:
        if self._connecting is not None:
            self._connecting.cancel()
            await asyncio.wait({self._connecting})
        self.drop()

    async def _replies(self, commands: Sequence[Command]) -> list[Any]:
        async with asyncio.timeout(self._timeout):
            return await self._redirected(commands)

    async def _redirected(self, commands: Sequence[Command]) -> list[Any]:
        for _ in range(REDIRECTIONS):
            connection = self._connection
            if connection is None or not connection.open:
                connection = await self._connected()
            try:
                replies = await self._answer(connection, commands)
                _raise_first(replies)
                return replies
            except ReplyError as error:
                if error.code == "MOVED":
                    await self._follow(connection, str(error))
                    continue
                if error.code in _LEFT_BEHIND and self._connection is connection:
                    self._node = None
                    self.drop()
                raise
        raise RedisError("the nodes of the cluster send us round in circles")

    async def _answer(self, connection: Connection, commands: Sequence[Command]) -> list[Any]:
        clock = asyncio.get_running_loop().time
        sent = clock()
        try:
            return await connection.send(commands)
        except asyncio.CancelledError:
            # A caller that gives up early takes nothing along; one that heard nothing all its time leaves no dead line to the next.
            if clock() - max(sent, connection.heard) > 0.9 * self._timeout:
                connection.abort()
            raise

    async def _connected(self) -> Connection:
        """Joins the attempt under way: a thousand callers make one connection, and one that is cancelled stops none of the others."""
        if self._connecting is None:
            self._connecting = asyncio.get_running_loop().create_task(self._connect(), name="redis-connect")
            self._connecting.add_done_callback(self._has_connected)
        return await asyncio.shield(self._connecting)

    def _has_connected(self, task: "asyncio.Task[Connection]") -> None:
        self._connecting = None
        if task.cancelled() or task.exception() is not None:
            self._node = None
            self._turn += 1
        else:
            self._connection = task.result()

    async def _connect(self) -> Connection:
        nodes = [self._node] if self._node else []
        others = [*self._access.location.nodes, *self._peers]
        nodes += [node for node in _from(others, self._turn) if node not in nodes]
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
                _raise_first(await connection.send(greeting))
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
        """`MOVED 3999 10.0.0.7:6381`; an empty host means the one that said so."""
        host, _, port = moved.split()[2].rpartition(":")
        node = (host or connection.address[0], int(port))
        with contextlib.suppress(ReplyError):  # a user who may not ask that has the nodes of the URL
            [shards] = await self._answer(connection, [("CLUSTER", "SLOTS")])
            _raise_first([shards])
            self._peers = tuple(_nodes_in(shards, connection.address[0]))
        if self._connection is connection:  # else another caller went ahead of us
            self._node = node
            self.drop()


def _nodes_in(shards: Any, asked: str) -> set[Address]:
    """The nodes that CLUSTER SLOTS names; an empty host is the one that was asked."""
    return {(each[0].decode() or asked, int(each[1])) for shard in shards for each in shard[2:]}


def _from(nodes: Sequence[Address], turn: int) -> Iterable[Address]:
    return (nodes[(turn + at) % len(nodes)] for at in range(len(nodes)))


def _raise_first(replies: list[Any]) -> None:
    for reply in replies:
        if isinstance(reply, ReplyError):
            raise reply
