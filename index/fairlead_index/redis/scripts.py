"""Script calls for reader and writer: no hidden retries, by FCALL or EVALSHA."""

import re
import time
from contextlib import suppress
from functools import cache
from hashlib import sha1, sha256
from importlib.resources import files
from typing import Any, Final

from fairlead_index.redis.access import RedisAccess
from fairlead_index.redis.client import RedisClient
from fairlead_index.redis.connection import BadReply, RedisError, ReplyError

SCHEMA: Final = "fl5"
REDIS_ERRORS: Final = (RedisError, OSError, TimeoutError)
"""All failures of a call: Redis is unreachable, too slow, read-only after a failover, loading, or out of memory."""

SCRIPTS: Final = (
    "join", "apply", "evict", "heartbeat", "leave", "recall", "match", "reserve", "sweep", "renew", "workers", "quota",
    "store_response", "delete_response",
)  # fmt: skip
_READ_ONLY: Final = frozenset({"match", "workers"})
_WHEN_FULL: Final = frozenset(SCRIPTS) - _READ_ONLY - {"apply", "store_response"}
"""Scripts that run past maxmemory, as they need little memory or free some. The others are refused, with OOM."""
_TEXT_OF: Final = {"evict": "apply"}
"""`evict` is `apply` for batches that only remove."""
_NAMES: Final = "call, byte, sub, char, floor"
_NAMED: Final = "redis.call, string.byte, string.sub, string.char, math.floor"
"""Local aliases in all scripts."""
_RETRY_SECONDS: Final = 60.0
"""Seconds of EVALSHA after the server had no function for this user."""


class Scripts:
    """The scripts of one namespace over one client: functions of a library, or by EVALSHA.

    An administrator (`access_rules.load_functions`) or a client with that right loads the library. A service's own user has no such right:
    it could replace the code that other users run. Without the library, and on Redis 6.2, scripts run by EVALSHA. A server that does not
    know a script gets its text once.

    Each call passes the prefix, which never exists, as its key. While a Cluster migrates the slot, both nodes refuse such a key (ASK,
    MOVED). So half of a namespace is never taken for all of it, and no writer starts a new one during the migration.
    """

    def __init__(self, redis: RedisAccess | str, namespace: str, *, timeout: float, shared: bool = False) -> None:
        """`shared`: as in RedisClient."""
        self.redis = RedisClient(RedisAccess(redis) if isinstance(redis, str) else redis, timeout, shared=shared)
        self.prefix = key_prefix(namespace)
        self._functions_from = 0.0  # EVALSHA until this time

    async def call(self, name: str, *args: bytes | str | int | float) -> list[Any]:
        """Run one script; return its reply, a list that only readers' may have empty. Raises one of REDIS_ERRORS."""
        if time.monotonic() >= self._functions_from:
            try:
                return _check(name, await self._call_function(name, args))
            except ReplyError as error:
                if not _has_no_function(error):
                    raise
                self._functions_from = time.monotonic() + _RETRY_SECONDS
        return _check(name, await self._call_script(name, args))

    async def _call_function(self, name: str, args: tuple[bytes | str | int | float, ...]) -> Any:
        call = ("FCALL", f"{library_name()}_{name}", 1, self.prefix, *args)
        try:
            return await self.redis.execute(*call)
        except ReplyError as error:
            if "function not found" not in str(error).lower():
                raise
        with suppress(ReplyError):  # no permission, a full server, or another client was first
            await self.redis.execute("FUNCTION", "LOAD", library_source())
        return await self.redis.execute(*call)

    async def _call_script(self, name: str, args: tuple[bytes | str | int | float, ...]) -> Any:
        source, digest = script_source(name), _digest(name)
        try:
            return await self.redis.execute("EVALSHA", digest, 1, self.prefix, *args)
        except ReplyError as error:
            if error.code != "NOSCRIPT":
                raise
        return await self.redis.execute("EVAL", source, 1, self.prefix, *args)

    def key(self, name: str | bytes) -> bytes:
        """Return a key of the namespace, for plain commands."""
        return self.prefix.encode() + (name.encode() if isinstance(name, str) else name)

    async def close(self) -> None:
        await self.redis.close()


def key_prefix(namespace: str) -> str:
    """Return the prefix of a namespace's keys. The braces keep it on one Cluster slot. Raises ValueError."""
    if not namespace or any(mark in namespace for mark in "{}"):
        raise ValueError(f"index namespace {namespace!r}: give NAMESPACE/NAME, without braces")
    return f"{SCHEMA}:{{{namespace}}}:"


async def eviction_advice(redis: RedisClient) -> str:
    """Return advice for a server that may evict keys of the index; empty if it does not, or does not report its policy."""
    try:
        reply: bytes = await redis.execute("INFO", "memory")
    except ReplyError:  # no permission for INFO
        return ""
    fields = dict(line.split(":", 1) for line in reply.decode().splitlines() if ":" in line)
    policy = fields.get("maxmemory_policy", "noeviction")
    if policy == "noeviction":
        return ""
    return (
        f"redis has maxmemory-policy {policy}: past its maxmemory it would drop parts of the index without a word, and answers would name "
        "workers that no longer hold a prefix. Set maxmemory-policy noeviction (a managed service: in its parameter group)"
    )


def _check(name: str, reply: Any) -> list[Any]:
    """Return the reply of a script. Raises BadReply."""
    if not isinstance(reply, list) or not (reply or name in _READ_ONLY):
        raise BadReply(f"the reply of {name} is {'empty' if reply == [] else type(reply).__name__}: is it the index's Redis?")
    return reply


def _has_no_function(error: ReplyError) -> bool:
    text = str(error).lower()
    return "function not found" in text or "unknown command" in text or "'fcall'" in text  # the last: no permission to run it


@cache
def script_source(name: str) -> str:
    """Return the Lua text of one script for EVAL: the parts of common.lua that it uses, and its own."""
    body = "\n".join([*([_text("match_core")] if name == "match" else []), _text(_TEXT_OF.get(name, name))])
    # A full server refuses a script whose first write needs memory. After a first write that needs none, all pass. (Functions: a flag.)
    first = "redis.call('DEL', KEYS[1])\n" if name in _WHEN_FULL else ""
    return "\n".join([f"{first}local {_NAMES} = {_NAMED}", *_used_parts(body), body])


@cache
def library_source() -> str:
    """Return all scripts as one function library for FUNCTION LOAD."""
    return f"#!lua name={library_name()}\n" + _build_functions(library_name())


@cache
def library_name() -> str:
    """Return the library's name. It contains a digest of the text, so versions coexist during a rollout."""
    return f"fairlead_{sha256(_build_functions('').encode()).hexdigest()[:12]}"


def _build_functions(library: str) -> str:
    # Shared parts are created once, at load. `redis.call` does not exist then, so each callback sets the aliases.
    functions = []
    for name in SCRIPTS:
        flags = "flags = { 'no-writes' }, " if name in _READ_ONLY else "flags = { 'allow-oom' }, " if name in _WHEN_FULL else ""
        functions.append(
            f"redis.register_function{{ function_name = '{library}_{name}', {flags}callback = function(KEYS, ARGV)\n"
            f"{_NAMES} = {_NAMED}\n{_text(_TEXT_OF.get(name, name))}\nend }}"
        )
    return "\n".join([f"local {_NAMES}", _text("common"), _text("match_core"), *functions])


def _used_parts(body: str) -> list[str]:
    """Return the definitions of common.lua that `body` needs, in order. Each script call creates its functions again, so unused ones cost
    time."""
    parts = re.split(r"\n(?=local )", _text("common"))
    needed = body
    used: list[str] = []
    for part in reversed(parts):
        name = re.match(r"local (?:function )?(\w+)", part.lstrip())
        if name is not None and re.search(rf"\b{name[1]}\b", needed):
            used.append(part)
            needed += part
    return used[::-1]


@cache
def _text(name: str) -> str:
    """Return a file's text without comments."""
    text = (files("fairlead_index") / "scripts" / f"{name}.lua").read_text(encoding="utf-8")
    return re.sub(r"\s*--[^\n]*", "", text).lstrip("\n")


@cache
def _digest(name: str) -> str:
    return sha1(script_source(name).encode(), usedforsecurity=False).hexdigest()
