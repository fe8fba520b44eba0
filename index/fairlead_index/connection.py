"""One way to reach Redis for both halves: short timeouts, no hidden retries, and the scripts, as Functions or by their digests."""

import hashlib
from functools import cache
from importlib.resources import files
from typing import Any, Final, cast

from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import NoScriptError, ReadOnlyError, RedisError, ResponseError

SCHEMA: Final = "fl1"
REDIS_ERRORS: Final = (RedisError, OSError, TimeoutError)
"""Everything that means "Redis did not do it": away, too slow, read-only after a failover, loading, out of memory."""

_READ_ONLY: Final = frozenset({"match", "workers"})
_SCRIPTS: Final = ("join", "apply", "heartbeat", "leave", "match", "route", "release", "sweep", "workers", "quota")
_USE_MATCH: Final = frozenset({"match", "route"})


class Scripts:
    """The scripts of one namespace over one connection pool.

    Redis 7 keeps them as Functions, which survive restarts and failovers. Older servers, and users who may not load functions, get EVALSHA.
    Either way a server that does not know them (empty, flushed, new) is told once, and the call repeated.
    """

    def __init__(self, url: str, namespace: str, *, timeout: float, connections: int) -> None:
        if not namespace or any(mark in namespace for mark in "{}"):
            raise ValueError(f"index namespace {namespace!r}: give NAMESPACE/NAME, without braces")
        try:
            pool = BlockingConnectionPool.from_url(
                url,
                max_connections=connections,
                timeout=timeout,
                socket_timeout=timeout,
                socket_connect_timeout=timeout,
                retry=Retry(NoBackoff(), 0),
                protocol=2,
            )
        except ValueError as error:
            raise ValueError(f"redis url {url.rsplit('@', 1)[-1]!r}: {error}") from error
        self.redis: Any = Redis.from_pool(pool)  # redis-py leaves execute_command untyped
        self.prefix = f"{SCHEMA}:{{{namespace}}}:"  # braces: one cluster slot for the namespace
        self._functions = True

    async def call(self, name: str, *args: bytes | str | int | float) -> list[Any]:
        """Runs one script. Raises one of REDIS_ERRORS."""
        try:
            if self._functions:
                try:
                    return await self._call_function(name, args)
                except ResponseError as error:
                    if not _no_functions(error):
                        raise
                    self._functions = False
            return await self._call_script(name, args)
        except ReadOnlyError:
            await self.redis.connection_pool.disconnect()  # a replica now: the address may lead to the new primary
            raise

    async def _call_function(self, name: str, args: tuple[bytes | str | int | float, ...]) -> list[Any]:
        command = "FCALL_RO" if name in _READ_ONLY else "FCALL"
        call = (command, f"{_library_name()}_{name}", 1, self.prefix, *args)
        try:
            return cast(list[Any], await self.redis.execute_command(*call))
        except ResponseError as error:
            if "function not found" not in str(error).lower():
                raise
        await self.redis.execute_command("FUNCTION", "LOAD", "REPLACE", library_source())
        return cast(list[Any], await self.redis.execute_command(*call))

    async def _call_script(self, name: str, args: tuple[bytes | str | int | float, ...]) -> list[Any]:
        source = script_source(name)
        try:
            return cast(list[Any], await self.redis.execute_command("EVALSHA", _sha1(source), 1, self.prefix, *args))
        except NoScriptError:
            return cast(list[Any], await self.redis.execute_command("EVAL", source, 1, self.prefix, *args))

    def key(self, name: str | bytes) -> bytes:
        """A key of the namespace, for what needs no script."""
        return self.prefix.encode() + (name.encode() if isinstance(name, str) else name)

    async def close(self) -> None:
        await self.redis.aclose()
        await self.redis.connection_pool.disconnect()


def _no_functions(error: ResponseError) -> bool:
    text = str(error).lower()
    return "unknown command" in text or "unknown subcommand" in text or "noperm" in text or "no permissions" in text


@cache
def script_source(name: str) -> str:
    """The whole Lua text of one script, as EVAL takes it."""
    parts = ["common", *(["match_core"] if name in _USE_MATCH else []), name]
    return "\n".join((files("fairlead_index") / "scripts" / f"{part}.lua").read_text(encoding="utf-8") for part in parts)


@cache
def library_source() -> str:
    """All scripts as one library of functions. Its name holds a digest of the text: versions live side by side through a rollout."""
    functions = []
    for name in _SCRIPTS:
        flags = "flags = { 'no-writes' }," if name in _READ_ONLY else ""
        body = script_source(name)  # whole in each function: redis.call does not exist while a library loads
        functions.append(
            f"redis.register_function{{ function_name = '{_library_name()}_{name}', {flags} callback = function(KEYS, ARGV)\n{body}\nend }}"
        )
    return f"#!lua name={_library_name()}\n" + "\n".join(functions)


@cache
def _library_name() -> str:
    digest = hashlib.sha256("".join(script_source(name) for name in _SCRIPTS).encode()).hexdigest()
    return f"fairlead_{digest[:12]}"


@cache
def _sha1(source: str) -> str:
    return hashlib.sha1(source.encode(), usedforsecurity=False).hexdigest()
