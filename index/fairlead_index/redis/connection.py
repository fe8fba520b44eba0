"""Connections of redis-py to one node: no retries, verified TLS, credentials and certificates that are read for each connection."""

import re
from collections.abc import Sequence
from typing import Any, Final

from redis._parsers import _AsyncHiredisParser
from redis.asyncio.connection import AbstractConnection, Connection, SSLConnection, UnixDomainSocketConnection
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.credentials import CredentialProvider
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError, ResponseError

from fairlead_index.redis.access import Address, RedisAccess

__all__ = ["MAX_REPLY_BYTES", "BadReply", "Command", "RedisError", "ReplyError", "connect", "connection_options", "exchange", "read_reply"]

Command = tuple[bytes | str | int | float, ...]

MAX_REPLY_BYTES: Final = 16 << 20
"""Limit of one reply. The index's largest is a few MB. A server that sends more is broken or hostile, and hiredis would buffer it all."""

_MAX_ELEMENTS: Final = MAX_REPLY_BYTES // 3
"""Most elements that the lists of one reply announce: each takes three bytes or more. hiredis allocates a list when its head arrives, so
`*1000000000` alone costs 8 GB of address space and two seconds to free."""
_LIST_HEAD: Final = re.compile(rb"\n[*~>](\d+)\r")
"""Head of a list; in RESP3 of a set or a push message too, which Redis does not send here. It follows the end of a line."""
_HEAD_BYTES: Final = 13


class BadReply(RedisError):
    """A reply that no Redis gives to the index."""


class ReplyError(ResponseError):
    """An error reply. `code` is its first word: NOPERM, OOM, READONLY, MOVED, NOSCRIPT..."""

    @property
    def code(self) -> str:
        text = str(self)
        if text.startswith("ERR Error running script") and ": -" in text:  # Redis 6.2 wraps the error
            text = text.partition(": -")[2]
        return text.partition(" ")[0]


def connection_options(access: RedisAccess, node: Address, *, to_sentinel: bool = False) -> dict[str, Any]:
    """Return the arguments of a redis-py pool, `connection_class` among them. Its users limit the time of a call."""
    host, port = node
    options: dict[str, Any] = {
        "credential_provider": _Credentials(access, to_sentinel),
        "db": 0 if to_sentinel else access.location.database,
        "parser_class": _Parser,
        "protocol": 2,  # RESP3 needs HELLO, which the ACL rules leave out
        "retry": Retry(NoBackoff(), 0),
        "socket_timeout": None,
        "socket_connect_timeout": None,
        "driver_info": None,  # CLIENT SETINFO would fill the server's ACL LOG
    }
    if not port:
        return options | {"connection_class": UnixDomainSocketConnection, "path": host}
    tls = {"connection_class": _TlsConnection, "access": access} if access.location.tls else {"connection_class": Connection}
    return options | tls | {"host": host, "port": port}


async def connect(access: RedisAccess, node: Address, *, to_sentinel: bool = False) -> AbstractConnection:
    """Open one connection, outside a pool. Raises RedisError or OSError."""
    options = connection_options(access, node, to_sentinel=to_sentinel)
    connection: AbstractConnection = options.pop("connection_class")(**options)
    await connection.connect()  # type: ignore[no-untyped-call]
    return connection


async def exchange(connection: AbstractConnection, commands: Sequence[Command]) -> list[Any]:
    """Send commands together. Return their replies, error replies among them. If it is cancelled, redis-py closes the connection."""
    await connection.send_packed_command(connection.pack_commands(commands))
    return [await read_reply(connection) for _ in commands]


async def read_reply(connection: AbstractConnection) -> Any:
    """Return the next reply, also an error reply."""
    try:
        return await connection.read_response()
    except ReplyError as error:
        return error


class _Parser(_AsyncHiredisParser):
    """Keep error replies whole, and limit the size of a reply.

    redis-py strips the first word of the errors that it knows and raises some of them, LOADING or WRONGPASS, as lost connections.
    """

    _received = 0
    _elements = 0
    _end = b"\n"

    @classmethod
    def parse_error(cls, response: str) -> ReplyError:
        return ReplyError(response)

    async def read_response(self, disable_decoding: bool = False, push_request: bool = False) -> Any:
        self._received, self._elements, self._end = 0, 0, b"\n"
        try:
            return await super().read_response(disable_decoding, push_request)
        except (RedisError, OSError):
            raise
        except Exception as error:  # what hiredis cannot build: a list of 4 billion, a map with a list as a key
            raise BadReply(f"redis sent a reply that cannot be built ({type(error).__name__}): is it a Redis?") from error

    async def read_from_socket(self) -> bool:
        data = await self._stream.read(self._read_size)  # type: ignore[union-attr]
        if not data:
            raise RedisConnectionError("redis closed the connection")
        self._received += len(data)
        for count in _LIST_HEAD.findall(self._end + data):
            self._elements += int(count[:_HEAD_BYTES])
        if self._received > MAX_REPLY_BYTES or self._elements > _MAX_ELEMENTS:
            raise BadReply(f"redis sent more than {MAX_REPLY_BYTES >> 20} MiB for one reply, or announced them: is it a Redis?")
        self._end = data[-_HEAD_BYTES:]
        self._reader.feed(data)  # type: ignore[attr-defined]
        return True


class _TlsConnection(SSLConnection):
    """Read the certificate files for each connection. redis-py reads them once, and trusts the system's authorities beside `ca_file`."""

    def __init__(self, access: RedisAccess, **options: Any) -> None:
        super().__init__(**options)
        self._access = access

    async def connect(self) -> None:
        if not self.is_connected:
            self.ssl_context.context = self._access.tls()
        await super().connect()  # type: ignore[no-untyped-call]


class _Credentials(CredentialProvider):
    """Read the credential files for each connection."""

    def __init__(self, access: RedisAccess, to_sentinel: bool) -> None:
        self._read = access.sentinel_login if to_sentinel else access.login

    async def get_credentials_async(self) -> tuple[str, ...]:  # type: ignore[override]  # empty: no AUTH
        try:
            user, password = self._read()
        except OSError as error:
            raise RedisError(str(error)) from error  # after another type redis-py would keep the connection, without AUTH
        return ((user, password) if user else (password,)) if password else ()
