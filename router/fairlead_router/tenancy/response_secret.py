"""The secret from which routers derive the keys of stored responses (`fairlead_common.response_keys`). Workers and Redis never have it."""

import logging
import secrets
from pathlib import Path

from fairlead_common.response_keys import HEADER, ID, derive_keys
from fairlead_router.errors import Headers
from fairlead_router.file_follower import FileFollower
from fairlead_router.tenancy.shared_secret import SharedSecret

logger = logging.getLogger(__name__)


class ResponseSecret:
    """The secret in a file, read again when it changes: then earlier responses are not found. Without a file it is of this process."""

    def __init__(self, path: str) -> None:
        self._secret = secrets.token_bytes(32)
        self._file = FileFollower(SharedSecret(path).read, Path(path)) if path else None
        self._problem = ""

    def headers(self, tenant: str, *ids: str) -> Headers:
        """Return the header with the keys of the responses `ids` of a tenant. Others than ids of responses get no key."""
        self._refresh()
        known = [id for id in ids if ID.fullmatch(id)]
        return [(HEADER, derive_keys(self._secret, tenant, *known).encode())] if known else []

    def _refresh(self) -> None:
        """Read a changed file. One that cannot be used leaves the last secret in force."""
        if self._file is None:
            return
        try:
            self._secret = self._file.poll() or self._secret
            problem = ""
        except OSError as error:
            problem = error.strerror or type(error).__name__
        except ValueError as error:  # once for each version
            problem = str(error)
        if problem and problem != self._problem:
            logger.error("--responses-secret-file cannot be used: %s; the last secret stays in use, at first one of this process", problem)
        self._problem = problem
