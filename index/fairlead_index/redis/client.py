"""A client of the Redis node that serves one namespace: behind a Service, in a Cluster, or behind Sentinels.

All keys of a namespace share one hash tag, so one node is right at a time. Another node of a Cluster replies MOVED; the client follows and
stays there. While the Cluster slot migrates, scripts get TRYAGAIN (see `Scripts`) and nothing is written anywhere. redis-py's RedisCluster
would follow ASK as well, and take half of a namespace for all of it; its Sentinel needs `SENTINEL MASTERS`.
"""

import asyncio
import contextlib
from collections.abc import Sequence
from typing import Any, Final

from redis.asyncio import BlockingConnectionPool
from redis.exceptions import ConnectionError as RedisConnectionError

from fairlead_index.redis.access import Address, RedisAccess
from fairlead_index.redis.connection import BadReply, Command, RedisError, ReplyError, connect, connection_options, exchange
from fairlead_index.redis.replies import UNREADABLE, as_list, checked, unreadable
from fairlead_index.redis.shared import SharedConnection

REDIRECTIONS: Final = 3
CONNECTIONS: Final = 4  # the mirror has two calls in flight, the others one
_WRONG_NODE: Final = frozenset({"READONLY", "NOAUTH", "WRONGPASS", "NOREPLICAS"})
"""This node is not, or no longer, the right one. Connect again: the address may lead to another node, or the password may have changed."""


class _Pool:
    """redis-py's pool: each call has a connection to itself. A call that fails or is cancelled closes it, so no reply comes late."""

    def __init__(self, access: RedisAccess, address: Address) -> None:
        self.address = address
        self.is_open = True
        self._pool = BlockingConnectionPool(CONNECTIONS, timeout=None, **connection_options(access, address))

    async def connect(self) -> None:
        """Open a connection, so that an unreachable node is noticed before a command is sent."""
        await self._pool.release(await self._pool.get_connection())  # type: ignore[no-untyped-call]

    async def send(self, commands: Sequence[Command]) -> list[Any]:
        try:
            # redis-py connects again if the server has closed the connection meanwhile.
            connection = await self._pool.get_connection()  # type: ignore[no-untyped-call]
            try:
                return await exchange(connection, commands)
            finally:
                await self._pool.release(connection)
        except BaseException:
            self.is_open = False  # the next call may find another node
            raise

    async def close(self) -> None:
        await self._pool.aclose()


_Link = _Pool | SharedConnection
"""Open connections to one node."""


class RedisClient:
    """Connections to one node, opened on demand. Each call, redirections included, ends within `timeout` seconds: with a reply, a
    RedisError, an OSError or a TimeoutError. No call is repeated, except after MOVED.

    `shared`: all callers share one connection, for many calls in flight. Otherwise they use redis-py's pool.
    """

    def __init__(self, access: RedisAccess, timeout: float, *, shared: bool = False) -> None:
        self._access, self._timeout, self._shared = access, timeout, shared
        self._link: _Link | None = None
        self._connecting: asyncio.Task[_Link] | None = None
        self._node: Address | None = None  # the target of the last MOVED
        self._peers: tuple[Address, ...] = ()  # the other nodes of that Cluster, to try when ours is gone
        self._first_node = 0  # the index of the node to try first

    async def execute(self, *command: bytes | str | int | float) -> Any:
        """Send one command. Return its reply."""
        [reply] = await self._send([command])
        return reply

    async def pipeline(self, commands: Sequence[Command]) -> list[Any]:
        """Send commands together. Return their replies."""
        return await self._send(commands) if commands else []

    async def transaction(self, commands: Sequence[Command]) -> list[Any]:
        """Run commands in one MULTI/EXEC. Return their replies."""
        replies = as_list((await self._send([("MULTI",), *commands, ("EXEC",)]))[-1], "the reply of EXEC")
        _raise_first_error(replies)
        if len(replies) != len(commands):
            raise BadReply(f"EXEC has {len(replies)} replies to {len(commands)} commands: is it a Redis?")
        return replies

    async def on_every_node(self, *command: bytes | str | int | float) -> list[Any]:
        """Run a command on every primary and replica of a Cluster, otherwise on the current server. Return one reply per node."""
        try:
            shards = await self.execute("CLUSTER", "SLOTS")
        except ReplyError:  # no Cluster
            return [await self.execute(*command)]
        assert self._link is not None  # it has just replied, and nothing was awaited since
        with checked("the reply of CLUSTER SLOTS"):
            nodes = _parse_nodes(shards, self._link.address[0])
        replies: list[Any] = []
        for node in sorted(nodes):
            async with asyncio.timeout(self._timeout):
                with checked(f"a reply of {node[0]}:{node[1]}"):
                    replies += await _ask(self._access, node, command)
        _raise_first_error(replies)
        return replies

    async def drop(self) -> None:
        """Close the connections. The next call opens others."""
        self._first_node += 1
        if (link := self._link) is not None:
            self._link = None
            await link.close()

    async def close(self) -> None:
        if self._connecting is not None:
            self._connecting.cancel()
            await asyncio.wait({self._connecting})
        with contextlib.suppress(TimeoutError):  # a lost server confirms no end of TLS
            async with asyncio.timeout(self._timeout):
                await self.drop()

    async def _send(self, commands: Sequence[Command]) -> list[Any]:
        try:
            async with asyncio.timeout(self._timeout):
                return await self._send_following_redirects(commands)
        except RedisConnectionError as error:
            raise ConnectionError(str(error)) from error  # an OSError, which redis-py's is not
        except UNREADABLE as error:
            raise unreadable("a reply of Redis", error) from error

    async def _send_following_redirects(self, commands: Sequence[Command]) -> list[Any]:
        for _ in range(REDIRECTIONS):
            link = self._link
            if link is None or not link.is_open:
                link = await self._ensure_connected()
            replies = await link.send(commands)
            try:
                _raise_first_error(replies)
                return replies
            except ReplyError as error:
                if error.code == "MOVED":
                    await self._follow(link, str(error))
                    continue
                if error.code in _WRONG_NODE and self._link is link:
                    self._node = None
                    await self.drop()
                raise
        raise RedisError(f"the cluster redirected a command {REDIRECTIONS} times: its nodes disagree about the slot's owner")

    async def _ensure_connected(self) -> _Link:
        """Join the connection attempt in progress: a thousand callers open one connection, and a cancelled caller stops no other."""
        if self._connecting is None:
            self._connecting = asyncio.get_running_loop().create_task(self._connect(), name="redis-connect")
            self._connecting.add_done_callback(self._on_connect_done)
        return await asyncio.shield(self._connecting)

    def _on_connect_done(self, task: "asyncio.Task[_Link]") -> None:
        self._connecting = None
        if task.cancelled() or task.exception() is not None:
            self._node = None
            self._first_node += 1
        else:
            self._link = task.result()

    async def _connect(self) -> _Link:
        nodes = [*self._access.location.nodes, *self._peers]
        first = self._first_node % len(nodes)
        candidates = dict.fromkeys([*([self._node] if self._node else []), *nodes[first:], *nodes[:first]])
        failure: Exception = RedisError("no node")
        async with asyncio.timeout(self._timeout):
            if self._link is not None:  # it failed
                failed, self._link = self._link, None
                await failed.close()
            for node in candidates:
                try:
                    return await self._open(node)
                except (RedisConnectionError, OSError) as error:
                    failure = error
        raise failure

    async def _open(self, node: Address) -> _Link:
        if self._access.location.sentinel:
            node = await self._find_primary(node)
        if self._shared:
            return SharedConnection(await connect(self._access, node), node, self._timeout)
        pool = _Pool(self._access, node)
        await pool.connect()
        return pool

    async def _find_primary(self, sentinel: Address) -> Address:
        name = self._access.location.sentinel
        [found] = await _ask(self._access, sentinel, ("SENTINEL", "GET-MASTER-ADDR-BY-NAME", name), to_sentinel=True)
        if isinstance(found, ReplyError) or not found:
            raise OSError(f"sentinel {sentinel[0]}:{sentinel[1]} knows no primary {name!r}: {found or 'none of that name'}")
        return found[0].decode(), int(found[1])

    async def _follow(self, link: _Link, moved: str) -> None:
        """Follow `MOVED 3999 10.0.0.7:6381`. An empty host means the replying node."""
        host, _, port = moved.split()[2].rpartition(":")
        node = (host or link.address[0], int(port))
        with contextlib.suppress(ReplyError):  # without the right to CLUSTER SLOTS only the URL's nodes are known
            [shards] = await link.send([("CLUSTER", "SLOTS")])
            _raise_first_error([shards])
            self._peers = tuple(_parse_nodes(shards, link.address[0]))
        if self._link is link:  # otherwise another caller has followed already
            self._node = node
            await self.drop()


async def _ask(access: RedisAccess, node: Address, command: Command, *, to_sentinel: bool = False) -> list[Any]:
    """Run one command over a connection of its own. Return its reply in a list."""
    connection = await connect(access, node, to_sentinel=to_sentinel)
    try:
        return await exchange(connection, [command])
    finally:
        await connection.disconnect(nowait=True)


def _parse_nodes(shards: Any, replying_host: str) -> set[Address]:
    """Return the nodes that CLUSTER SLOTS lists. An empty host means the replying node."""
    return {(each[0].decode() or replying_host, int(each[1])) for shard in shards for each in shard[2:]}


def _raise_first_error(replies: list[Any]) -> None:
    for reply in replies:
        if isinstance(reply, ReplyError):
            raise reply
