"""Secret that the routers share with the batch server. With it either side says for which tenant it acts.

The operator creates the Secret, and only these two Deployments mount it. The file is read at each use: it has 64
bytes, and a pod on a node without the earlier one sees a replaced Secret.
"""

import hmac
from pathlib import Path
from typing import Final

TENANT_HEADER: Final = "x-fairlead-tenant"
"""Tenant for which a request acts; empty where there are no API keys. It counts only with the secret."""
MIN_BYTES: Final = 16


class SharedSecret:
    """The secret in a file. With an empty path there is none, and `matches` accepts nothing."""

    def __init__(self, path: str) -> None:
        self._path = Path(path) if path else None

    @property
    def is_required(self) -> bool:
        return self._path is not None

    def read(self) -> bytes:
        """Return the secret. Raises OSError or ValueError."""
        assert self._path is not None
        secret = self._path.read_bytes().strip()
        if len(secret) < MIN_BYTES:
            raise ValueError(f"{self._path} holds fewer than {MIN_BYTES} bytes")
        return secret

    def matches(self, credential: bytes) -> bool:
        """Return whether a request's credential is the secret. A file that cannot be read matches nothing."""
        if self._path is None or not credential:
            return False
        try:
            return hmac.compare_digest(credential, self.read())
        except (OSError, ValueError):
            return False

    def headers(self, tenant: str) -> dict[str, str]:
        """Return the headers of a request for `tenant`. Raises OSError or ValueError."""
        return {TENANT_HEADER: tenant, **({"authorization": f"Bearer {self.read().decode()}"} if self._path is not None else {})}
