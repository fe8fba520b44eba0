"""Redis users by role: the ACL rules for a worker and a router of one service, and the management of these users.

A script runs its commands with the rights of its caller, so EVAL grants nothing that the user lacks.
"""

import re
from collections.abc import Sequence
from contextlib import suppress
from typing import Final, Literal
from urllib.parse import quote

from fairlead_index.redis.client import RedisClient
from fairlead_index.redis.connection import ReplyError
from fairlead_index.redis.scripts import key_prefix, library_name, library_source

Role = Literal["worker", "router"]

USER_PREFIX: Final = "fairlead:"
_BOTH: Final = "evalsha eval ping select cluster|slots time del exists expire get hget hmget hgetall hset hsetnx hdel zadd zrem zrange xadd"
_COMMANDS: Final[dict[Role, str]] = {
    "worker": f"{_BOTH} info setrange bitcount rename hlen hincrby zcard zpopmin zremrangebyscore",
    "router": f"{_BOTH} set getrange mget pexpire hexists hincrbyfloat xread xrange xrevrange multi exec",
}
_REDIS_7_COMMANDS: Final = "fcall"  # never `function`: loading a library replaces code that other users run


class CannotManageUsers(Exception):
    """The server has no ACL commands for this connection's user: use one shared credential."""


def acl_rules(role: Role, namespace: str, *, redis_7: bool = True) -> list[str]:
    """Return the ACL SETUSER rules for `role` in the service `namespace`: keys and commands, without passwords.

    A worker reads and writes its service's keys except quotas (`q:`). A router reads the keys of its service except stored responses
    (`answers:`, the only ones that begin with `a`), and writes reservations, recalls and quotas only (`r:`, `q:`). `redis_7`: use `%R~`
    and FCALL. Redis 6.2 lacks both, so there a router may also write what it may read. Raises ValueError for a namespace that can never
    work.
    """
    prefix = _escape(key_prefix(namespace))
    if role == "worker":
        keys = [f"~{prefix}[^q]*", f"~{prefix}"]
    elif redis_7:
        keys = [f"%R~{prefix}[^a]*", f"~{prefix}", f"~{prefix}[rq]:*"]
    else:
        keys = [f"~{prefix}[^a]*", f"~{prefix}"]
    commands = f"{_COMMANDS[role]} {_REDIS_7_COMMANDS if redis_7 else ''}".split()
    return ["resetkeys", *keys, "resetchannels", "nocommands", *(f"+{command}" for command in commands)]


def user_name(role: Role, namespace: str, prefix: str = USER_PREFIX) -> str:
    """Return the name of the Redis user for `role` in the service `namespace`. `prefix` distinguishes installations on one server."""
    return f"{prefix}{role}:{quote(namespace, safe='/')}"


async def ensure_user(admin: RedisClient, role: Role, namespace: str, password_hashes: Sequence[str], prefix: str = USER_PREFIX) -> str:
    """Create or replace a service's user on every node of the server; return its name.

    `password_hashes`: SHA-256 of each accepted password, 64 hexadecimal digits; give the current and the previous one while a password is
    rotated. The change is atomic on each node, and connections of the user stay open. Users of a server without an ACL file are lost when
    it restarts: call again at intervals.

    Raises CannotManageUsers if `admin` lacks the right, ValueError for a malformed hash, and one of REDIS_ERRORS.
    """
    if not password_hashes or not all(re.fullmatch(r"[0-9a-f]{64}", each) for each in password_hashes):
        raise ValueError(f"{len(password_hashes)} password hashes: give at least one SHA-256, as 64 lower-case hexadecimal digits")
    name = user_name(role, namespace, prefix)
    access = ["reset", "on", *(f"#{each}" for each in password_hashes)]
    try:
        await _manage(admin, "SETUSER", name, *access, *acl_rules(role, namespace))
    except CannotManageUsers as error:
        if "%R~" not in str(error) and "+fcall" not in str(error):  # Redis 6.2 names the unknown rule
            raise
        await _manage(admin, "SETUSER", name, *access, *acl_rules(role, namespace, redis_7=False))
    return name


async def load_functions(admin: RedisClient) -> None:
    """Load the index's scripts as functions on every node that lacks them, so that users without that right can use FCALL.

    This only saves server time. If it is refused (Redis 6.2, a login without the right, a full server), services use EVALSHA. Raises one
    of REDIS_ERRORS other than ReplyError.
    """
    with suppress(ReplyError):
        if not all(await admin.on_every_node("FUNCTION", "LIST", "LIBRARYNAME", library_name())):
            await admin.on_every_node("FUNCTION", "LOAD", library_source())  # replicas refuse; they get it from their primary


async def delete_user(admin: RedisClient, name: str) -> None:
    """Delete a user on every node; its connections are closed. Raises as `ensure_user`."""
    await _manage(admin, "DELUSER", name)


async def list_users(admin: RedisClient, prefix: str = USER_PREFIX) -> list[set[str]]:
    """Return, for each node, the names of its users that begin with `prefix`. Raises as `ensure_user`."""
    return [{name.decode() for name in names if name.startswith(prefix.encode())} for names in await _manage(admin, "USERS")]


async def _manage(admin: RedisClient, *words: str) -> list[list[bytes]]:
    """Run one ACL command on every node. Return the replies."""
    try:
        return await admin.on_every_node("ACL", *words)
    except ReplyError as error:
        if error.code not in ("NOPERM", "ERR"):
            raise
        raise CannotManageUsers(f"redis does not let this user run ACL {words[0]}: {error}") from error


def _escape(text: str) -> str:
    """Return a pattern that matches `text` only: a name may contain glob characters."""
    return re.sub(r"([*?\[\]\\^])", r"\\\1", text)
