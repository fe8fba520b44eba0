"""The operator's own connection to Redis, as the administrator."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from fairlead_index.redis.access import RedisAccess
from fairlead_index.redis.client import RedisClient
from fairlead_index.redis.connection import ReplyError

TIMEOUT = 5.0  # seconds for one command
_REFUSED = frozenset({"WRONGPASS", "NOAUTH"})


class LoginRefused(Exception):
    """Redis rejects all of the administrator's passwords."""


@dataclass(frozen=True)
class Login:
    """How the operator connects. `passwords` are tried in order: during a rotation a restarted server may know only the older one."""

    access: RedisAccess  # without a password file
    passwords: tuple[str, ...] = field(repr=False)


async def log_in(login: Login, folder: Path) -> RedisClient:
    """Return a client with the first password that Redis accepts.

    `folder` is private to this process, because RedisAccess reads files. Raises LoginRefused, and errors of the connection.
    """
    refusal = ""
    file = folder / "password"
    file.touch(mode=0o600)
    for password in login.passwords:
        file.write_text(password, encoding="utf-8")
        client = RedisClient(replace(login.access, password_file=str(file)), TIMEOUT)
        try:
            await client.execute("PING")
            return client
        except BaseException as error:
            await client.close()
            if not isinstance(error, ReplyError) or error.code not in _REFUSED:
                raise
            refusal = str(error)
    raise LoginRefused(f"Redis refuses the administrator's password: {refusal}")


def hashes_of(passwords: Sequence[str]) -> list[str]:
    """Return the SHA-256 hashes that ACL SETUSER accepts in place of `passwords`, so that no password is sent."""
    return [hashlib.sha256(password.encode()).hexdigest() for password in passwords]


async def set_own_passwords(client: RedisClient, username: str, passwords: Sequence[str]) -> None:
    """Make the administrator's user accept exactly `passwords`. Open connections stay open."""
    await client.on_every_node("ACL", "SETUSER", username, "resetpass", *(f"#{each}" for each in hashes_of(passwords)))


async def reload_certificate(client: RedisClient) -> None:
    """Make the server reload its certificate files: setting the same path again does that (Redis 6.2 and later)."""
    _, path = await client.execute("CONFIG", "GET", "tls-cert-file")
    await client.execute("CONFIG", "SET", "tls-cert-file", path)
