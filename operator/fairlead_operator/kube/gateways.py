"""Reads the Gateways to which services attach: their listeners and addresses give the external URL.

Many services share one Gateway, of any namespace and without our labels. So each is read by its name, and not watched.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Any

from fairlead_operator.kube.cache import Cache
from fairlead_operator.kube.client import ApiError, Cluster
from fairlead_operator.kube.kinds import GATEWAYS
from fairlead_operator.objects import Body

log = logging.getLogger(__name__)
PERIOD = 30.0  # seconds between two reads
TIMEOUT = 5.0  # seconds for one Gateway
_Name = tuple[str, str]  # namespace, name
NOT_FOUND: Body = {}


class GatewayReader:
    """Calls `on_change()` when a Gateway that a service names has changed."""

    def __init__(self, cluster: Cluster, cache: Cache, on_change: Callable[[], None] = lambda: None) -> None:
        self._cluster, self._cache, self._on_change = cluster, cache, on_change
        self._seen: dict[_Name, Body] = {}
        self._refused: set[_Name] = set()
        self._wanted = asyncio.Event()

    def find(self, namespace: str, name: str) -> Body | None:
        """Return spec and status of a Gateway; `NOT_FOUND` where there is none; None while it is unknown, for example without the right."""
        found = self._seen.get((namespace, name))
        if found is None and (namespace, name) not in self._refused:
            self._wanted.set()
        return found

    async def run(self) -> None:
        while True:
            await self.read()
            try:
                async with asyncio.timeout(PERIOD):
                    await self._wanted.wait()
                await asyncio.sleep(1.0)  # many services may name a Gateway at the same time
            except TimeoutError:
                pass

    async def read(self) -> None:
        """Read every Gateway that a service names. Where a read fails, the last answer stays."""
        self._wanted.clear()
        wanted = {name for body in self._cache.services() if (name := referenced_gateway(body)) is not None}
        before, self._refused = dict(self._seen), self._refused & wanted
        for name in sorted(wanted):
            try:
                async with asyncio.timeout(TIMEOUT):
                    self._seen[name] = _slim(await self._cluster.get(GATEWAYS, *name))
                self._refused.discard(name)
            except Exception as error:
                if name not in self._refused:
                    log.warning("cannot read Gateway %s/%s: %s: %s", *name, type(error).__name__, _with_advice(error))
                self._refused.add(name)
        for name in self._seen.keys() - wanted:
            del self._seen[name]
        if self._seen != before:
            self._on_change()


def referenced_gateway(body: Body) -> _Name | None:
    """Return namespace and name of the Gateway that a service names."""
    gateway: Mapping[str, Any] = (body["spec"].get("exposure") or {}).get("gateway") or {}
    reference = gateway.get("parentRef") or {}
    return (reference.get("namespace") or body["metadata"]["namespace"], reference["name"]) if "name" in reference else None


def _slim(body: Body | None) -> Body:
    """Keep what is used, and what does not change with every heartbeat of a controller."""
    if body is None:
        return NOT_FOUND
    status = body.get("status") or {}
    kept = ("addresses", "conditions", "listeners")
    return {"spec": {"listeners": body["spec"].get("listeners") or []}, "status": {key: status.get(key) or [] for key in kept}}


def _with_advice(error: Exception) -> str:
    if isinstance(error, ApiError) and error.code == 403:
        return f"{error}. The chart's roles are those of its version (helm upgrade); with watch.namespaces they cover these namespaces only"
    return str(error)
