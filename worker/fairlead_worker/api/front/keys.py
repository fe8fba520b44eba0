"""`--api-key-file`: API keys of a worker that clients reach without a router. A router has tenants and quotas in its own key file."""

import logging
from collections.abc import Collection
from hashlib import sha256
from pathlib import Path

from starlette.types import ASGIApp, Receive, Scope, Send

from fairlead_worker.api.errors import ApiError
from fairlead_worker.api.http import RequestContext
from fairlead_worker.config.api_files import read_keys

logger = logging.getLogger(__name__)

OPEN_PATHS = frozenset(("/health", "/livez", "/ready", "/ping", "/version", "/openapi.json", "/docs"))
"""Paths without a key: probes and the API's description."""
MONITORING = frozenset(("/metrics", "/load"))
"""Paths without a key on the admin port, which clients do not reach."""


class KeyFile:
    """The keys of a file that may change: a mounted Secret is replaced while the worker runs."""

    def __init__(self, path: str) -> None:
        """Raises ValueError for a file without usable keys."""
        self._path = path
        self._seen = _modified(path)
        self._digests = _digests(path)

    def accepts(self, key: str) -> bool:
        """Return whether `key` is in the file. A file that has become unusable leaves the last keys in force."""
        if (modified := _modified(self._path)) != self._seen:
            self._seen = modified
            try:
                self._digests = _digests(self._path)
            except ValueError as error:
                logger.error("--api-key-file %s %s: the earlier keys stay valid", self._path, error)
        # A look-up by digest reveals nothing of the keys in its time.
        return sha256(key.encode()).digest() in self._digests


class RequireKey:
    """ASGI middleware that answers 401 without a valid key in `Authorization: Bearer` or `X-Api-Key` (Anthropic's)."""

    def __init__(self, app: ASGIApp, keys: KeyFile, pod: str, open_paths: Collection[str]) -> None:
        """`open_paths`: need no key."""
        self._app, self._keys, self._pod, self._open_paths = app, keys, pod, open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in self._open_paths:
            await self._app(scope, receive, send)
            return
        context = RequestContext(scope, receive, send, self._pod)
        scheme, _, key = context.headers.get(b"authorization", b"").decode("latin-1").partition(" ")
        if scheme.lower() != "bearer":
            key = context.headers.get(b"x-api-key", b"").decode("latin-1")
        key = key.strip()
        if key and self._keys.accepts(key):
            await self._app({**scope, "fairlead.key": sha256(key.encode()).hexdigest()}, receive, send)
            return
        message = "the API key is not valid" if key else "this server needs an API key: send Authorization: Bearer KEY"
        headers = {"www-authenticate": "Bearer"}
        await context.respond_error(ApiError(401, message, type="authentication_error", code="invalid_api_key", headers=headers))


def _modified(path: str) -> int:
    try:
        return Path(path).stat().st_mtime_ns
    except OSError:
        return 0


def _digests(path: str) -> frozenset[bytes]:
    return frozenset(sha256(key.encode()).digest() for key in read_keys(path))
