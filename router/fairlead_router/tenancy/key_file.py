"""API key file, reloaded while the router runs: a Secret's new version takes effect within seconds, an invalid one never."""

import asyncio
import logging
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path

from fairlead_common.truncate import quote
from fairlead_router.errors import ApiError, Headers, unavailable
from fairlead_router.file_follower import FileFollower
from fairlead_router.metrics import Metrics
from fairlead_router.supervision import stop_tasks, supervise
from fairlead_router.tenancy.tenants import ANONYMOUS, LOWEST, Caller, KeyFileError, digest, read_credential, read_keys

logger = logging.getLogger(__name__)

MAX_BYTES = 4 << 20
"""Limit of the file; a Secret holds at most 1 MiB."""


class KeyStore:
    """Authentication by API key. Without a file all requests are accepted; while a file was never valid, all are refused."""

    def __init__(self, path: str, metrics: Metrics, classes: Collection[str] = ()) -> None:
        """`classes`: names of the service classes, which the file may name."""
        self._path, self._classes, self._metrics = Path(path), classes, metrics
        self._file: FileFollower[Mapping[bytes, Caller] | None] | None = None
        self._following: asyncio.Task[None] | None = None
        if path:
            without = "no request is served until it is repaired"
            self._file = FileFollower(f"key file {path}", self._read, self._path, default=None, without=without, on_change=self._log_keys)
            metrics.key_file_ok.set_function(lambda: not self.problem)

    @property
    def is_required(self) -> bool:
        return self._file is not None

    @property
    def is_usable(self) -> bool:
        """Whether there are keys to check against, from the newest or an earlier version."""
        return self._file is None or self._file.content is not None

    @property
    def problem(self) -> str:
        """Problem of the file's newest version; empty when that version is in use."""
        return "" if self._file is None else self._file.problem

    def start(self) -> None:
        if self._file is not None:
            self._following = supervise("key file", self._file.follow, self._metrics.task_failures)

    async def close(self) -> None:
        await stop_tasks(self._following)

    def authenticate(self, credential: bytes) -> Caller:
        """Return the key's caller. Raises ApiError 401; 503 while there is no valid list of keys."""
        if self._file is None:
            return ANONYMOUS
        if self._file.content is None:
            raise unavailable("The router has no usable list of API keys. Its operator has to repair the key file.", retry_after=10)
        found = self._file.content.get(digest(credential)) if credential else None
        if found is not None:
            return found
        self._metrics.count_refusal("key")
        message = (
            "Incorrect API key provided."  # the message must never quote the key
            if credential
            else "No API key was given. Send it as `Authorization: Bearer KEY` (or `x-api-key: KEY`)."
        )
        raise ApiError(401, message, code="invalid_api_key", headers=[(b"www-authenticate", b"Bearer")])

    def find(self, key_digest: bytes) -> Caller | None:
        """Return the caller of the key with this digest; None if there is none."""
        return self._callers().get(key_digest)

    def tenant_of(self, headers: Headers) -> str:
        """Return the tenant of a request; "" without a known key."""
        found = self.find(digest(read_credential(headers)))
        return found.tenant.name if found is not None else ""

    def act_for(self, tenant: str) -> Caller:
        """Return the caller for a tenant's batches, which go after all its other requests. Raises ApiError 403 for an unknown tenant."""
        callers = self._callers().values() if self.is_required else (ANONYMOUS,)
        found = next((caller for caller in callers if caller.tenant.name == tenant), None)
        if found is None:
            raise ApiError(403, f"The key file has no tenant {quote(tenant)}.", code="unknown_tenant")
        return replace(found, key="batch", priority=LOWEST, slo_class="batch")

    def _callers(self) -> Mapping[bytes, Caller]:
        return (self._file.content if self._file is not None else None) or {}

    def _read(self) -> Mapping[bytes, Caller]:
        if self._path.stat().st_size > MAX_BYTES:
            raise KeyFileError(f"it is larger than {MAX_BYTES} bytes")
        return read_keys(self._path.read_bytes(), self._classes)

    def _log_keys(self, callers: Mapping[bytes, Caller] | None) -> None:
        tenants = {caller.tenant.name for caller in (callers or {}).values()}
        logger.info("key file %s: %d keys of %d tenants", self._path, len(callers or ()), len(tenants))
