"""One way to reach Redis for both halves: one shared connection, no hidden retries, and the scripts, as Functions or by their digests."""

import hashlib
from functools import cache
from importlib.resources import files
from typing import Any, Final, cast

from fairlead_index.access import RedisAccess
from fairlead_index.client import RedisClient
from fairlead_index.resp import RedisError, ReplyError

SCHEMA: Final = "fl3"
REDIS_ERRORS: Final = (RedisError, OSError, TimeoutError)
"""Everything that means "Redis did not do it": away, too slow, read-only after a failover, loading, out of memory."""

_READ_ONLY: Final = frozenset({"match", "workers"})
_SCRIPTS: Final = (
    "join", "apply", "evict", "heartbeat", "leave", "recall", "listen", "match", "route", "release", "claim", "sweep", "renew",
    "workers", "quota",
)  # fmt: skip
_USE_MATCH: Final = frozenset({"match", "route"})
_WHEN_FULL: Final = frozenset(_SCRIPTS) - _READ_ONLY - {"apply"}
"""What a Redis past its maxmemory does all the same: it needs next to nothing, or gives back. `apply` alone is refused, with OOM."""
_TEXT_OF: Final = {"evict": "apply"}
"""`evict` is `apply` for batches that only remove."""
_NAMES: Final = "call, byte, sub, char, floor"
_NAMED: Final = "redis.call, string.byte, string.sub, string.char, math.floor"
"""What the scripts call by a name of their own."""
_NAME: Final = "<library>"
"""Stands for the library's name until its text is whole."""


class Scripts:
    """The scripts of one namespace over one connection.

    Redis 7 keeps them as Functions, which survive restarts and failovers. Older servers, and users who may not load functions, get EVALSHA.
    Either way a server that does not know them (empty, flushed, new) is told once, and the call repeated.

    Each call names two keys: the prefix, which is no key at all, and `meta`, which is the first to be there. No script needs both, but
    while a Cluster moves the slot it finds one of them missing on either side and says TRYAGAIN: so no half of a namespace is ever taken
    for all of it, and no writer begins a new one in the middle of the move.
    """

    def __init__(self, redis: RedisAccess | str, namespace: str, *, timeout: float) -> None:
        if not namespace or any(mark in namespace for mark in "{}"):
            raise ValueError(f"index namespace {namespace!r}: give NAMESPACE/NAME, without braces")
        self.redis = RedisClient(RedisAccess(redis) if isinstance(redis, str) else redis, timeout)
        self.prefix = f"{SCHEMA}:{{{namespace}}}:"  # braces: one cluster slot for the namespace
        self._keys = (2, self.prefix, self.prefix + "meta")
        self._functions = True

    async def call(self, name: str, *args: bytes | str | int | float) -> list[Any]:
        """Runs one script. Raises one of REDIS_ERRORS."""
        if self._functions:
            try:
                return await self._call_function(name, args)
            except ReplyError as error:
                if not _no_functions(error):
                    raise
                self._functions = False
        return await self._call_script(name, args)

    async def _call_function(self, name: str, args: tuple[bytes | str | int | float, ...]) -> list[Any]:
        command = "FCALL_RO" if name in _READ_ONLY else "FCALL"
        call = (command, f"{_library_name()}_{name}", *self._keys, *args)
        try:
            return cast(list[Any], await self.redis.execute(*call))
        except ReplyError as error:
            if "function not found" not in str(error).lower():
                raise
        try:
            await self.redis.execute("FUNCTION", "LOAD", "REPLACE", library_source())
        except ReplyError as error:
            if error.code != "OOM":
                raise
            return await self._call_script(name, args)  # which a full server takes
        return cast(list[Any], await self.redis.execute(*call))

    async def _call_script(self, name: str, args: tuple[bytes | str | int | float, ...]) -> list[Any]:
        source = script_source(name)
        try:
            return cast(list[Any], await self.redis.execute("EVALSHA", _sha1(source), *self._keys, *args))
        except ReplyError as error:
            if error.code != "NOSCRIPT":
                raise
        return cast(list[Any], await self.redis.execute("EVAL", source, *self._keys, *args))

    def key(self, name: str | bytes) -> bytes:
        """A key of the namespace, for what needs no script."""
        return self.prefix.encode() + (name.encode() if isinstance(name, str) else name)

    async def close(self) -> None:
        await self.redis.close()


async def eviction_advice(redis: RedisClient) -> str:
    """What to change about a server that may evict keys of ours; empty when it does not, or does not say."""
    try:
        told: bytes = await redis.execute("INFO", "memory")
    except ReplyError:  # a user who may not ask
        return ""
    fields = dict(line.split(":", 1) for line in told.decode().splitlines() if ":" in line)
    policy = fields.get("maxmemory_policy", "noeviction")
    if policy == "noeviction":
        return ""
    return (
        f"redis has maxmemory-policy {policy}: past its maxmemory it would drop parts of the index without a word, and answers would name "
        "workers that no longer hold a prefix. Set maxmemory-policy noeviction (a managed service: in its parameter group)"
    )


def _no_functions(error: ReplyError) -> bool:
    text = str(error).lower()
    return "unknown command" in text or "unknown subcommand" in text or "noperm" in text or "no permissions" in text


@cache
def script_source(name: str) -> str:
    """The whole Lua text of one script, as EVAL takes it."""
    parts = ["common", *(["match_core"] if name in _USE_MATCH else []), name]
    # A full server refuses a script's first write if that needs memory, and lets all pass after one that does not. (Functions have a flag.)
    first = "redis.call('DEL', KEYS[1])\n" if name in _WHEN_FULL else ""
    return f"{first}local {_NAMES} = {_NAMED}\n" + "\n".join(map(_body, parts))


@cache
def _body(name: str) -> str:
    return (files("fairlead_index") / "scripts" / f"{_TEXT_OF.get(name, name)}.lua").read_text(encoding="utf-8")


@cache
def library_source() -> str:
    """All scripts as one library of functions. Its name holds a digest of the text: versions live side by side through a rollout."""
    return f"#!lua name={_library_name()}\n" + _functions().replace(_NAME, _library_name())


@cache
def _functions() -> str:
    # What they share is made once, when the library loads, and not with every call: so much the shorter is each. What Redis and Lua offer
    # is not there yet at that moment.
    functions = []
    for name in _SCRIPTS:
        flags = "flags = { 'no-writes' }," if name in _READ_ONLY else "flags = { 'allow-oom' }," if name in _WHEN_FULL else ""
        functions.append(
            f"redis.register_function{{ function_name = '{_NAME}_{name}', {flags} callback = function(KEYS, ARGV)\n"
            f"{_NAMES} = {_NAMED}\n{_body(name)}\nend }}"
        )
    return "\n".join([f"local {_NAMES}", _body("common"), _body("match_core"), *functions])


@cache
def _library_name() -> str:
    digest = hashlib.sha256(_functions().encode()).hexdigest()
    return f"fairlead_{digest[:12]}"


@cache
def _sha1(source: str) -> str:
    return hashlib.sha1(source.encode(), usedforsecurity=False).hexdigest()
