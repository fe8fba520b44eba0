"""Stored responses (`store: true` of the Responses API) in Redis: at most a fixed number of a fixed size, each for a limited time.

The number of the place is part of the response's id. Places are reused in turn, so nothing has to be counted or cleaned up. A response
belongs to the tenant that asked for it: others get the same 404 as for an id that does not exist. After a failure of Redis no request
waits for it until the backoff is over, then one request tries.
"""

import hmac
import logging
import re
import secrets
from typing import Any

import msgspec

from fairlead_index.redis.access import RedisAccess
from fairlead_index.redis.backoff import Backoff
from fairlead_index.redis.client import RedisClient
from fairlead_index.redis.connection import Command, RedisError, ReplyError
from fairlead_index.redis.scripts import key_prefix
from fairlead_worker.api.errors import ApiError
from fairlead_worker.config.limits import Limits

logger = logging.getLogger(__name__)

TIMEOUT_SECONDS = 2.0
"""Longest time that an answer waits for Redis."""
ID = re.compile(r"resp_([0-9]{1,7})_[0-9a-f]{32}")
FAULTS = (RedisError, OSError, TimeoutError)
FIRST_BACKOFF_SECONDS, LONGEST_BACKOFF_SECONDS = 1.0, 30.0


class StoredResponse(msgspec.Struct, frozen=True):
    """A response with the whole conversation before it."""

    response: dict[str, Any]
    input: list[Any]


class ResponseStore:
    """The stored responses of a service."""

    def __init__(self, redis: RedisAccess, namespace: str, limits: Limits, backoff: Backoff | None = None) -> None:
        self._redis = RedisClient(redis, TIMEOUT_SECONDS, shared=True)  # a client that leaves must not end the calls of others
        self._backoff = backoff or Backoff(FIRST_BACKOFF_SECONDS, LONGEST_BACKOFF_SECONDS)
        self._prefix = f"{key_prefix(namespace)}answers"
        self._places, self._max_bytes = limits.stored_responses, limits.stored_response_bytes
        self._seconds = limits.stored_response_seconds

    async def new_id(self) -> str | None:
        """Return the id of a response to store, or None while Redis is away: then it cannot be stored."""
        try:
            [count] = await self._send(("HINCRBY", self._prefix, "count", 1))
        except FAULTS as error:
            logger.warning("a response will not be stored: %s: %s", type(error).__name__, error)
            return None
        return f"resp_{count % self._places}_{secrets.token_hex(16)}"

    async def save(self, tenant: str, stored: StoredResponse) -> bool:
        """Store a response under its own id, which `new_id` made. Return whether it is stored."""
        body = msgspec.json.encode(stored)
        if len(body) > self._max_bytes:
            logger.warning("a response of %d bytes is not stored: --limits stored_response_bytes is %d", len(body), self._max_bytes)
            return False
        id: str = stored.response["id"]
        key = self._key(id)
        try:
            await self._send(("HSET", key, "id", id, "tenant", tenant, "body", body), ("EXPIRE", key, self._seconds))
        except FAULTS as error:
            logger.warning("a response is not stored: %s: %s", type(error).__name__, error)
            return False
        return True

    async def load(self, id: str, tenant: str, param: str | None = None) -> StoredResponse:
        """Return a stored response. Raise ApiError: 404 that names `param`, or 503 while Redis is away."""
        found: list[bytes | None] = await self._read(id, "HMGET", "id", "tenant", "body") if ID.fullmatch(id) else [None] * 3
        stored_id, owner, body = (each or b"" for each in found)
        if not (hmac.compare_digest(stored_id, id.encode()) and hmac.compare_digest(owner, tenant.encode())):
            raise ApiError(404, f"there is no stored response {id!r:.80}; it may have expired", param=param, code="not_found")
        return msgspec.json.decode(body, type=StoredResponse)

    async def delete(self, id: str, tenant: str) -> None:
        """Delete a stored response. Raise ApiError as `load`."""
        await self.load(id, tenant)
        await self._read(id, "DEL")

    async def _read(self, id: str, command: str, *fields: str) -> Any:
        try:
            [reply] = await self._send((command, self._key(id), *fields))
            return reply
        except FAULTS as error:
            message = f"stored responses are not available: Redis does not answer ({type(error).__name__})"
            raise ApiError(503, message, type="server_error", code="unavailable", headers={"retry-after": "2"}) from error

    async def _send(self, *commands: Command) -> list[Any]:
        """Return the replies. Raise one of FAULTS, without waiting while Redis is in backoff. An error reply, as at `maxmemory`, starts
        none: Redis answered.
        """
        if not self._backoff.may_try():
            raise ConnectionError(f"the latest attempt failed: {self._backoff.reason}")
        try:
            replies = await self._redis.pipeline(commands)
        except ReplyError:
            self._backoff.reset()
            raise
        except FAULTS as error:
            seconds = self._backoff.record_failure(f"{type(error).__name__}: {error}")
            logger.warning("Redis fails; responses are neither stored nor read for %g s: %s", seconds, self._backoff.reason)
            raise
        self._backoff.reset()
        return replies

    def _key(self, id: str) -> str:
        """Return the key of an id's place."""
        return f"{self._prefix}:{id.split('_')[1]}"
