"""The secret from which routers derive the keys of stored responses (`fairlead_common.response_keys`). Workers and Redis never have it."""

import secrets
from pathlib import Path

from fairlead_common.response_keys import HEADER, ID, derive_keys
from fairlead_router.errors import Headers
from fairlead_router.file_follower import FileFollower
from fairlead_router.tenancy.shared_secret import SharedSecret


class ResponseSecret:
    """The secret in a file, read again when it changes: then earlier responses are not found. Without a file it is of this process."""

    def __init__(self, path: str) -> None:
        self._own = secrets.token_bytes(32)
        self._file: FileFollower[bytes] | None = None
        if path:
            without = "a secret of this process is in use"
            self._file = FileFollower("--responses-secret-file", SharedSecret(path).read, Path(path), default=self._own, without=without)

    def headers(self, tenant: str, *ids: str) -> Headers:
        """Return the header with the keys of the responses `ids` of a tenant. Others than ids of responses get no key."""
        if self._file is not None:
            self._file.reload()
        secret = self._own if self._file is None else self._file.content
        known = [id for id in ids if ID.fullmatch(id)]
        return [(HEADER, derive_keys(secret, tenant, *known).encode())] if known else []
