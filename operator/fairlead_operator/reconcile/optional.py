"""Kinds that a cluster may lack: which of them it serves, and what of ours there is of them.

They come and go with other people's installs, so they are asked for every half minute while a service wants or has one: one GET for each
kind, and one list of our own objects.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Any

from fairlead_operator.reconcile.client import ApiRefused, Cluster
from fairlead_operator.reconcile.kinds import OPTIONAL, Kind
from fairlead_operator.reconcile.store import Store
from fairlead_operator.reconcile.watches import relist

log = logging.getLogger(__name__)
PERIOD = 30.0  # seconds between two looks
_NAMES = ", ".join(kind.kind for kind in OPTIONAL)
TIMEOUT = 5.0  # seconds for one: no loop starts before the first


class OptionalKinds:
    """`served` holds the names of kinds, once `looked` is set; `changed()` is called when it has become another."""

    def __init__(self, cluster: Cluster, store: Store, namespace: str, changed: Callable[[], None] = lambda: None) -> None:
        self._cluster = cluster
        self._store = store
        self._namespace = namespace
        self._changed = changed
        self.served: frozenset[str] = frozenset()
        self.looked = asyncio.Event()

    async def run(self) -> None:
        await self.look()
        self.looked.set()
        while True:
            await asyncio.sleep(PERIOD)
            if self._wanted():
                await self.look()

    async def look(self) -> None:
        """`once`, in bounded time; a failure (an older chart's rules, say) is logged, and what was known stays."""
        try:
            async with asyncio.timeout(TIMEOUT):
                await self.once()
        except Exception as error:
            log.warning("cannot tell which of %s the cluster serves: %s: %s", _NAMES, type(error).__name__, error)

    async def once(self) -> None:
        """Raises what the API server or the transport raises; what was known then stays."""
        found = frozenset([kind.kind for kind in OPTIONAL if await self._is_served(kind) and await self._listed(kind)])
        for kind in OPTIONAL:
            if kind.kind in self.served - found:
                self._store.forget(kind)
        if found != self.served:
            log.info("optional kinds that the cluster serves: %s", ", ".join(sorted(found)) or "none")
            self.served = found
            self._changed()

    async def _is_served(self, kind: Kind) -> bool:
        try:
            page = await self._cluster.resources(kind.api_version)
        except ApiRefused as refusal:
            if refusal.code == 404:
                return False
            raise
        return any(resource["name"] == kind.plural for resource in page)

    async def _listed(self, kind: Kind) -> bool:
        """Takes in what there is of it. What the operator has no right to (an older chart's roles) is what it was: absent at first."""
        try:
            await relist(self._cluster, self._store, kind, self._namespace)
        except ApiRefused as refusal:
            if refusal.code != 403:
                raise
            log.warning("%s cannot be listed: %s. The chart's roles are those of its version (helm upgrade)", kind.kind, refusal)
            return kind.kind in self.served
        return True

    def _wanted(self) -> bool:
        """By a service, or held for one that was deleted or has given its gateway up: only a list tells that those are gone."""
        if any(self._store.holds(kind) for kind in OPTIONAL):
            return True
        return any(_wants(body["spec"]) for body in self._store.services())


def _wants(spec: Mapping[str, Any]) -> bool:
    """A gateway, or workers over several nodes."""
    return bool((spec.get("exposure") or {}).get("gateway")) or int((spec.get("engine") or {}).get("nodes") or 1) > 1
