"""One way to reach Redis for both halves: one shared connection, no hidden retries, and the scripts by their digests."""

import re
from functools import cache
from hashlib import sha1
from importlib.resources import files
from typing import Any, Final, cast

from fairlead_index.access import RedisAccess
from fairlead_index.client import RedisClient
from fairlead_index.resp import RedisError, ReplyError

SCHEMA: Final = "fl4"
REDIS_ERRORS: Final = (RedisError, OSError, TimeoutError)
"""Everything that means "Redis did not do it": away, too slow, read-only after a failover, loading, out of memory."""

SCRIPTS: Final = (
    "join", "apply", "evict", "heartbeat", "leave", "recall", "match", "route", "release", "claim", "sweep", "renew", "workers", "quota",
)  # fmt: skip
_USE_MATCH: Final = frozenset({"match", "route"})
_WHEN_FULL: Final = frozenset(SCRIPTS) - {"match", "workers", "apply"}
"""What a Redis past its maxmemory does all the same: it needs next to nothing, or gives back. `apply` alone is refused, with OOM."""
_TEXT_OF: Final = {"evict": "apply"}
"""`evict` is `apply` for batches that only remove."""
_NAMES: Final = "local call, byte, sub, char, floor = redis.call, string.byte, string.sub, string.char, math.floor"
"""What the scripts call by a name of their own."""


class Scripts:
    """The scripts of one namespace over one connection, by EVALSHA. A server that does not know a script is sent its text, once.

    No Redis Functions: a user who may load a library replaces the code that the other users of the server run. A digest names its text.

    Each call names the prefix as its key, which never exists. While a Cluster moves the slot both nodes refuse such a key (ASK, MOVED), so
    no half of a namespace is ever taken for all of it, and no writer begins a new one in the middle of the move.
    """

    def __init__(self, redis: RedisAccess | str, namespace: str, *, timeout: float) -> None:
        self.redis = RedisClient(RedisAccess(redis) if isinstance(redis, str) else redis, timeout)
        self.prefix = key_prefix(namespace)

    async def call(self, name: str, *args: bytes | str | int | float) -> list[Any]:
        """Runs one script. Raises one of REDIS_ERRORS."""
        source, digest = script_source(name), _digest(name)
        try:
            return cast(list[Any], await self.redis.execute("EVALSHA", digest, 1, self.prefix, *args))
        except ReplyError as error:
            if error.code != "NOSCRIPT":
                raise
        return cast(list[Any], await self.redis.execute("EVAL", source, 1, self.prefix, *args))

    def key(self, name: str | bytes) -> bytes:
        """A key of the namespace, for what needs no script."""
        return self.prefix.encode() + (name.encode() if isinstance(name, str) else name)

    async def close(self) -> None:
        await self.redis.close()


def key_prefix(namespace: str) -> str:
    """What all keys of a namespace begin with. The braces keep it on one Cluster slot. Raises ValueError."""
    if not namespace or any(mark in namespace for mark in "{}"):
        raise ValueError(f"index namespace {namespace!r}: give NAMESPACE/NAME, without braces")
    return f"{SCHEMA}:{{{namespace}}}:"


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


@cache
def script_source(name: str) -> str:
    """The whole Lua text of one script, as EVAL takes it: the parts of common.lua that it uses, and its own."""
    body = "\n".join([*([_text("match_core")] if name in _USE_MATCH else []), _text(_TEXT_OF.get(name, name))])
    # A full server refuses a script's first write if that needs memory, and lets all pass after one that does not.
    first = "redis.call('DEL', KEYS[1])\n" if name in _WHEN_FULL else ""
    return "\n".join([f"{first}{_NAMES}", *_used_parts(body), body])


def _used_parts(body: str) -> list[str]:
    """The definitions of common.lua that `body` needs, in their order. Each call of a script makes its functions anew, so those that it does
    not need would cost time."""
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
    """A file's text without its comments."""
    text = (files("fairlead_index") / "scripts" / f"{name}.lua").read_text(encoding="utf-8")
    return re.sub(r"\s*--[^\n]*", "", text).lstrip("\n")


@cache
def _digest(name: str) -> str:
    return sha1(script_source(name).encode(), usedforsecurity=False).hexdigest()
