"""Kinds that a cluster may lack: which of them it serves, and what of ours there is of them.

They come and go with other people's installs, so they are asked for every half minute while a service wants or has one: one GET for each
kind, and one list of our own objects. A kind of which an answer has never come is neither there nor missing: nothing is taken away for it.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Any

from fairlead_operator.kube.cache import Cache
from fairlead_operator.kube.client import ApiError, Cluster
from fairlead_operator.kube.kinds import OPTIONAL, Kind
from fairlead_operator.kube.reflector import NotServed, relist

log = logging.getLogger(__name__)
PERIOD = 30.0  # seconds between two looks
TIMEOUT = 5.0  # seconds for one kind
FIRST, RETRY = 3, 1.0  # looks before loops start without knowing of every kind, seconds between them


class KindDiscovery:
    """`served` holds the names of kinds, once `looked` is set; `unsure` those of which no answer has come. `changed()` is called when
    either has become another."""

    def __init__(self, cluster: Cluster, cache: Cache, namespace: str, on_change: Callable[[], None] = lambda: None) -> None:
        self._cluster = cluster
        self._cache = cache
        self._namespace = namespace
        self._on_change = on_change
        self.served: frozenset[str] = frozenset()
        self.unknown = frozenset(kind.kind for kind in OPTIONAL)
        self.discovered = asyncio.Event()

    async def run(self) -> None:
        for _ in range(FIRST):
            await self.discover()
            if not self.unknown:
                break
            await asyncio.sleep(RETRY)
        self.discovered.set()
        while True:
            await asyncio.sleep(PERIOD)
            if self._is_wanted():
                await self.discover()

    async def discover(self) -> None:
        """In bounded time. Of a kind whose look fails (an older chart's rules, an API server that is busy) what was known stays."""
        served, unknown = set(self.served), set(self.unknown)
        for kind in OPTIONAL:
            try:
                async with asyncio.timeout(TIMEOUT):
                    is_served = await self._is_served(kind) and await self._list_objects(kind)
            except Exception as error:
                log.warning("cannot tell whether the cluster serves %s: %s: %s", kind.kind, type(error).__name__, error)
                continue
            unknown.discard(kind.kind)
            if is_served:
                served.add(kind.kind)
            elif kind.kind in served:
                served.discard(kind.kind)
                self._cache.forget(kind)
        if served != self.served or unknown != self.unknown:
            log.info("optional kinds that the cluster serves: %s", ", ".join(sorted(served)) or "none")
            self.served, self.unknown = frozenset(served), frozenset(unknown)
            self._on_change()

    async def _is_served(self, kind: Kind) -> bool:
        try:
            page = await self._cluster.resources(kind.api_version)
        except ApiError as refusal:
            if refusal.code == 404:
                return False
            raise
        return any(resource["name"] == kind.plural for resource in page)

    async def _list_objects(self, kind: Kind) -> bool:
        """Takes in what there is of it."""
        try:
            await relist(self._cluster, self._cache, kind, self._namespace)
        except NotServed:
            return False
        except ApiError as refusal:
            if refusal.code != 403:
                raise
            raise PermissionError(f"{refusal}. The chart's roles are those of its version (helm upgrade)") from None
        return True

    def _is_wanted(self) -> bool:
        """By a service, or held for one that was deleted or has given its gateway up: only a list tells that those are gone."""
        if any(self._cache.has_children_of_kind(kind) for kind in OPTIONAL):
            return True
        return any(needs_optional_kind(body["spec"]) for body in self._cache.services())


def needs_optional_kind(spec: Mapping[str, Any]) -> bool:
    """A gateway, or workers over several nodes."""
    return bool((spec.get("exposure") or {}).get("gateway")) or int((spec.get("engine") or {}).get("nodes") or 1) > 1
