"""Writes Secrets without reading them: `children.secrets` describes the two kinds."""

import logging
import secrets
import time
from collections.abc import Callable, Mapping
from typing import Any

from fairlead_operator.children.secrets import GENERATED, encode
from fairlead_operator.kube.client import ApiError, Cluster
from fairlead_operator.kube.kinds import SECRETS
from fairlead_operator.names import digest

log = logging.getLogger(__name__)
REWRITE_PERIOD = 300.0  # seconds after which a Secret is written again: no watch shows that one was deleted
RANDOM_BYTES = 32


class SecretWriter:
    """Writes the Secrets of one service. Remembers a digest of what was written last, and when."""

    def __init__(self, cluster: Cluster, clock: Callable[[], float] = time.monotonic) -> None:
        self._cluster = cluster
        self._clock = clock
        self._written: dict[str, tuple[str, float]] = {}

    async def write(self, desired: Mapping[str, Any], is_mounted: Callable[[str], bool] = lambda name: False) -> None:
        """Create an immutable Secret if none of its name exists; apply any other. Raises ApiError.

        `is_mounted`: whether a live child mounts the Secret of a name. An earlier process has created such a Secret, before its child: an
        operator that has just started does not write one for each service.
        """
        name, now, wanted = desired["metadata"]["name"], self._clock(), digest(desired)
        before, at = self._written.get(name, ("", 0.0))
        if before == wanted and now - at < REWRITE_PERIOD:
            return
        if desired.get("immutable"):
            if before or not is_mounted(name):
                await self._create(desired)
        else:
            await self._cluster.apply(desired)
            if before != wanted:
                log.info("applied Secret %s/%s", desired["metadata"]["namespace"], name)
        self._written[name] = (wanted, now)

    async def _create(self, desired: Mapping[str, Any]) -> None:
        random = {key: encode(secrets.token_urlsafe(RANDOM_BYTES)) for key, value in desired["data"].items() if value == GENERATED}
        try:
            await self._cluster.create(SECRETS, {**desired, "data": {**desired["data"], **random}})
        except ApiError as refusal:
            if refusal.code != 409:
                raise
            return
        log.info("created Secret %s/%s", desired["metadata"]["namespace"], desired["metadata"]["name"])
