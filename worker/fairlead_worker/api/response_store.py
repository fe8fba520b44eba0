"""Stored responses (`store: true` of the Responses API) in Redis: encrypted, each for a limited time, and bounded for each tenant.

Each response has its own key (`fairlead_common.response_keys`). Redis holds the text under AES-256-GCM, and its name is a MAC of the id.
So a credential of Redis reads no conversation and learns no id, and a record that was forged or moved is not found. Only a tenant's own
responses make room for its next one (`store_response.lua`). After a failure of Redis no request waits for it until the backoff is over,
then one request tries.
"""

import logging
import secrets
from collections.abc import Awaitable, Callable
from typing import Any, Final

import msgspec
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from fairlead_common.response_keys import ResponseKeys, expand
from fairlead_common.truncate import quote
from fairlead_index.redis.access import RedisAccess
from fairlead_index.redis.backoff import Backoff
from fairlead_index.redis.connection import ReplyError
from fairlead_index.redis.scripts import REDIS_ERRORS, Scripts
from fairlead_worker.api.errors import ApiError
from fairlead_worker.api.request_cpu import RequestCpu
from fairlead_worker.config.limits import Limits

logger = logging.getLogger(__name__)

TIMEOUT_SECONDS = 2.0
"""Longest time that an answer waits for Redis."""
FIRST_BACKOFF_SECONDS, LONGEST_BACKOFF_SECONDS = 1.0, 30.0
NONCE_BYTES: Final = 12
MAX_RESPONSE_BYTES: Final = 256 << 10
"""Of a response with the conversation before it."""
MAX_TENANT_BYTES: Final = 8 << 20
MAX_SERVICE_BYTES: Final = 64 << 20
"""A tenant gets at most an equal share, and makes room by its own responses only."""
KEPT_SECONDS: Final = 86_400


class StoredResponse(msgspec.Struct, frozen=True):
    """A response with the whole conversation before it."""

    response: dict[str, Any]
    input: list[Any]


class ResponseStore:
    """The stored responses of a service. `own_secret`: for requests that come neither through a router nor with an API key."""

    def __init__(self, redis: RedisAccess, namespace: str, limits: Limits, backoff: Backoff | None = None) -> None:
        self._scripts = Scripts(redis, namespace, timeout=TIMEOUT_SECONDS, shared=True)  # a client that leaves must not end others' calls
        self._backoff = backoff or Backoff(FIRST_BACKOFF_SECONDS, LONGEST_BACKOFF_SECONDS)
        self._limits = limits
        self.own_secret = secrets.token_bytes(32)

    async def save(self, keys: ResponseKeys, stored: StoredResponse) -> bool:
        """Store a response under its own id, whose key is in `keys`. Return whether it is stored."""
        id = stored.response["id"]
        body, key = msgspec.json.encode(stored), keys.keys[id]
        if len(body) > MAX_RESPONSE_BYTES:
            logger.warning("a response of %d bytes is not stored: the limit is %d", len(body), MAX_RESPONSE_BYTES)
            return False
        text = _encrypt(key, _context(keys, id), body)
        bounds = (KEPT_SECONDS, self._limits.stored_responses, MAX_TENANT_BYTES, MAX_SERVICE_BYTES)
        try:
            reply = await self._try(lambda: self._scripts.call("store_response", _name(key), keys.tag, text, *bounds))
        except REDIS_ERRORS as error:
            logger.warning("a response is not stored: %s: %s", type(error).__name__, error)
            return False
        if reply != [b"OK"]:
            logger.warning("a response of %d bytes is not stored: the stored responses of its tenant or service have no room", len(text))
        return bool(reply == [b"OK"])

    async def load(self, id: str, keys: ResponseKeys, cpu: RequestCpu, param: str | None = None) -> StoredResponse:
        """Return a stored response. Raise ApiError: 404 that names `param`, or 503 while Redis is away. `cpu` gets the CPU time."""
        if (key := keys.keys.get(id)) is not None:
            text = await self._ask(lambda: self._scripts.redis.execute("HGET", self._scripts.key(f"answers:r{_name(key)}"), "text"))
            with cpu.measure():
                if isinstance(text, bytes) and (body := _decrypt(key, _context(keys, id), text)) is not None:
                    return msgspec.json.decode(body, type=StoredResponse)
        raise ApiError(404, f"there is no stored response {quote(id)}; it may have expired", param=param, code="not_found")

    async def delete(self, id: str, keys: ResponseKeys, cpu: RequestCpu) -> None:
        """Delete a stored response. Raise ApiError as `load`."""
        await self.load(id, keys, cpu)
        await self._ask(lambda: self._scripts.call("delete_response", _name(keys.keys[id])))

    async def _ask(self, call: Callable[[], Awaitable[Any]]) -> Any:
        """Return the reply. Raise ApiError 503 while Redis is away."""
        try:
            return await self._try(call)
        except REDIS_ERRORS as error:
            message = f"stored responses are not available: Redis does not answer ({type(error).__name__})"
            raise ApiError(503, message, type="server_error", code="unavailable", headers={"retry-after": "2"}) from error

    async def _try(self, call: Callable[[], Awaitable[Any]]) -> Any:
        """Return the reply. Raise one of REDIS_ERRORS, without waiting while Redis is in backoff. An error reply, as at `maxmemory`, starts
        none: Redis answered.
        """
        if not self._backoff.may_try():
            raise ConnectionError(f"the latest attempt failed: {self._backoff.reason}")
        try:
            reply = await call()
        except ReplyError:
            self._backoff.reset()
            raise
        except REDIS_ERRORS as error:
            seconds = self._backoff.record_failure(f"{type(error).__name__}: {error}")
            logger.warning("Redis fails; responses are neither stored nor read for %g s: %s", seconds, self._backoff.reason)
            raise
        self._backoff.reset()
        return reply


def _name(key: bytes) -> str:
    """Return the name of a record: only who has the key can find it."""
    return expand(key, b"name")[:16].hex()


def _context(keys: ResponseKeys, id: str) -> bytes:
    return f"{keys.tag} {id}".encode()


def _encrypt(key: bytes, context: bytes, body: bytes) -> bytes:
    nonce = secrets.token_bytes(NONCE_BYTES)
    return nonce + AESGCM(expand(key, b"encryption")).encrypt(nonce, body, context)


def _decrypt(key: bytes, context: bytes, text: bytes) -> bytes | None:
    """Return the body; None for a text that was not encrypted with this key for this context."""
    try:
        return AESGCM(expand(key, b"encryption")).decrypt(text[:NONCE_BYTES], text[NONCE_BYTES:], context)
    except (InvalidTag, ValueError) as error:  # ValueError: a nonce that is too short
        logger.warning("a stored response was changed in Redis and counts as not found: %s", type(error).__name__)
        return None
