"""The key file, followed while the router runs: a Secret's new version is used within seconds, a broken one is not used at all."""

import asyncio
import logging
from collections.abc import Mapping
from pathlib import Path

from fairlead_router.errors import ApiError, unavailable
from fairlead_router.metrics import Metrics
from fairlead_router.supervision import supervise
from fairlead_router.tenancy.tenants import ANONYMOUS, Caller, KeyFileError, digest, read_keys

logger = logging.getLogger(__name__)

RELOAD_SECONDS = 1.0
MAX_BYTES = 4 << 20
"""Of the file; a Secret holds 1 MiB."""
_Stamp = tuple[int, int, int]


class KeyStore:
    """Who a request comes from. Without a file everybody may ask; with a file that was never readable, nobody may."""

    def __init__(self, path: str, metrics: Metrics) -> None:
        self._path = Path(path) if path else None
        self._metrics = metrics
        self._callers: Mapping[bytes, Caller] | None = None
        self._seen: _Stamp | None = None
        self._following: asyncio.Task[None] | None = None
        self.problem = ""
        """What is wrong with the newest version of the file; empty when it is the one in use."""
        if self._path is not None:
            self.reload()

    @property
    def is_required(self) -> bool:
        return self._path is not None

    @property
    def is_usable(self) -> bool:
        """There are keys to check with, the newest or those before it."""
        return self._path is None or self._callers is not None

    def start(self) -> None:
        if self._path is not None:
            self._following = supervise("key file", self._follow, self._metrics.task_failures)

    async def close(self) -> None:
        if self._following is not None:
            self._following.cancel()
            await asyncio.gather(self._following, return_exceptions=True)

    def authenticate(self, credential: bytes) -> Caller:
        """Whose key this is. Raises ApiError 401; 503 while there is no list of keys."""
        if self._path is None:
            return ANONYMOUS
        if self._callers is None:
            raise unavailable("The router has no usable list of API keys. Its operator has to repair the key file.", retry_after=10)
        found = self._callers.get(digest(credential)) if credential else None
        if found is not None:
            return found
        self._metrics.refused.labels("key").inc()
        message = (
            "Incorrect API key provided."  # never any part of it
            if credential
            else "No API key was given. Send it as `Authorization: Bearer KEY` (or `x-api-key: KEY`)."
        )
        raise ApiError(401, message, code="invalid_api_key", headers=[(b"www-authenticate", b"Bearer")])

    def reload(self) -> None:
        """Read the file if it is another than the last time. Kubernetes swaps a link over it, so what it leads to is looked at."""
        assert self._path is not None
        try:
            stat = self._path.stat()
            stamp = (stat.st_mtime_ns, stat.st_ino, stat.st_size)
            if stamp == self._seen:
                return
            if stat.st_size > MAX_BYTES:
                raise KeyFileError(f"it is larger than {MAX_BYTES} bytes")
            callers = read_keys(self._path.read_bytes())
        except OSError as error:
            self._seen = None
            self._report_problem(f"{error.strerror or type(error).__name__}")
            return
        except KeyFileError as error:
            self._seen = stamp
            self._report_problem(str(error))
            return
        self._seen, self._callers, self.problem = stamp, callers, ""
        self._metrics.key_file_ok.set(1)
        tenants = {caller.tenant.name for caller in callers.values()}
        logger.info("key file %s: %d keys of %d tenants", self._path, len(callers), len(tenants))

    def _report_problem(self, why: str) -> None:
        self._metrics.key_file_ok.set(0)
        if why != self.problem:
            rest = "the keys read before stay in use" if self._callers is not None else "no request is served until it is repaired"
            logger.error("key file %s cannot be used: %s; %s", self._path, why, rest)
        self.problem = why

    async def _follow(self) -> None:
        while True:
            await asyncio.sleep(RELOAD_SECONDS)
            await asyncio.to_thread(self.reload)  # a Secret of thousands of keys takes longer to read than a stream may pause
