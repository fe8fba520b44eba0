"""Discovers the optional kinds that the cluster serves, and follows our objects of them.

These kinds come and go with other installations. They are queried every 30 seconds while a service needs or has one. Our objects of those
that are served are listed and watched as other children are; a kind whose watch does not answer is listed with each query. A kind without
any answer so far is unknown: no object is deleted for it.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fairlead_operator.kube.cache import Cache
from fairlead_operator.kube.client import ApiError, Cluster
from fairlead_operator.kube.kinds import OPTIONAL, Kind
from fairlead_operator.kube.reflector import NotServed, Reflector, relist

log = logging.getLogger(__name__)
PERIOD = 30.0  # seconds between two queries
TIMEOUT = 5.0  # seconds for one kind
WATCH_TIMEOUT = 75.0  # seconds without an answer after which a watch counts as lost; a bookmark comes every minute
FIRST, RETRY = 3, 1.0  # queries before reconcilers start without knowing every kind; seconds between these queries


class KindDiscovery:
    """`served`: names of the kinds that the cluster serves, valid once `discovered` is set. `unknown`: kinds without any answer yet.

    Calls `on_change()` when either changes.
    """

    def __init__(self, cluster: Cluster, cache: Cache, namespaces: Sequence[str], on_change: Callable[[], None] = lambda: None) -> None:
        self._cluster = cluster
        self._cache = cache
        self._namespaces = namespaces
        self._on_change = on_change
        self.served: frozenset[str] = frozenset()
        self.unknown = frozenset(kind.kind for kind in OPTIONAL)
        self.discovered = asyncio.Event()
        self._listing = asyncio.Lock()
        self._watches: dict[Kind, list[tuple[Reflector, asyncio.Task[None]]]] = {}

    async def run(self) -> None:
        try:
            for _ in range(FIRST):
                await self.discover()
                if not self.unknown:
                    break
                await asyncio.sleep(RETRY)
            self.discovered.set()
            while True:
                await asyncio.sleep(PERIOD)
                if self._is_needed():
                    await self.discover()
                    self._watch_served()
                else:
                    self._stop_watching()
        finally:
            self._stop_watching()

    def _watch_served(self) -> None:
        """Watch the kinds that are served."""
        for kind in OPTIONAL:
            if kind.kind in self.served and kind not in self._watches:
                reflectors = [Reflector(self._cluster, self._cache, kind, namespace, self._listing) for namespace in self._namespaces]
                self._watches[kind] = [(one, asyncio.create_task(one.run(), name=f"watch of {kind.plural}")) for one in reflectors]

    def _stop_watching(self, kinds: Sequence[Kind] = OPTIONAL) -> None:
        for kind in kinds:
            for _, task in self._watches.pop(kind, []):
                task.cancel()

    def _is_watched(self, kind: Kind) -> bool:
        """Return whether watches deliver the objects of this kind."""
        watches, now = self._watches.get(kind, []), time.monotonic()
        return bool(watches) and all(one.synced.is_set() and now - one.last_response_at < WATCH_TIMEOUT for one, _ in watches)

    async def discover(self) -> None:
        """Query all kinds, in bounded time. Where a query fails (an older chart's roles, a busy API server) the last answer stays."""
        served, unknown = set(self.served), set(self.unknown)
        for kind in OPTIONAL:
            try:
                async with asyncio.timeout(TIMEOUT):
                    is_served = await self._is_served(kind) and (self._is_watched(kind) or await self._list_objects(kind))
            except Exception as error:
                log.warning("cannot tell whether the cluster serves %s: %s: %s", kind.kind, type(error).__name__, error)
                continue
            unknown.discard(kind.kind)
            if is_served:
                served.add(kind.kind)
            elif kind.kind in served:
                served.discard(kind.kind)
                self._stop_watching((kind,))  # a late event would put an object back
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
        """List our objects of this kind into the cache. Returns False where the kind is not served."""
        try:
            for namespace in self._namespaces:
                await relist(self._cluster, self._cache, kind, namespace)
        except NotServed:
            return False
        except ApiError as refusal:
            if refusal.code != 403:
                raise
            raise PermissionError(f"{refusal}. The chart's roles are those of its version (helm upgrade)") from None
        return True

    def _is_needed(self) -> bool:
        """Return whether a service needs an optional kind, or the cache has an object of one.

        Such an object may belong to a deleted service, or to one that removed its gateway: only a list shows that it is gone.
        """
        if any(self._cache.has_children_of_kind(kind) for kind in OPTIONAL):
            return True
        return any(needs_optional_kind(body["spec"]) or needs_optional_kind(self._defaults(body)) for body in self._cache.services())

    def _defaults(self, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the spec of the service's profile; empty without one.

        The two need not be merged: a field of the profile that the service replaces costs only a query.
        """
        name = (body["spec"].get("profileRef") or {}).get("name")
        profile = self._cache.profile(body["metadata"]["namespace"], name) if name else None
        return (profile or {}).get("spec") or {}


def needs_optional_kind(spec: Mapping[str, Any]) -> bool:
    """Return whether a spec needs an optional kind: a gateway, workers over several nodes, more routers by load, or a certificate."""
    router = spec.get("router") or {}
    wanted = (spec.get("exposure") or {}).get("gateway") or router.get("autoscaling") or (router.get("tls") or {}).get("issuerRef")
    return bool(wanted) or int((spec.get("engine") or {}).get("nodes") or 1) > 1
