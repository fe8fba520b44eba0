"""The children's watches: each kind is listed into the store, then followed; a list is repeated only when the watch has lost its place."""

import asyncio
import logging
import random
import time
from contextlib import aclosing
from dataclasses import dataclass

from fairlead_operator.kube.cache import Store
from fairlead_operator.kube.client import ApiRefused, Cluster
from fairlead_operator.kube.kinds import CHILDREN, SERVICES, Kind

log = logging.getLogger(__name__)
BACKOFF_FIRST, BACKOFF_LONGEST = 1.0, 30.0  # seconds between two requests of a watch that fails
ABSENT = 60.0  # seconds until a kind that the API server does not serve is asked for again


class NotServed(Exception):
    """The API server does not know this kind: its CRD is not installed."""


@dataclass(frozen=True)
class Listed:
    version: int  # that the list speaks of
    missed: int  # removals that nobody had told the store


async def relist(cluster: Cluster, store: Store, kind: Kind, namespace: str) -> Listed:
    """Make the store agree with the API server about one kind. Raises NotServed; what the API server refuses passes through."""
    present: set[str] = set()
    version = 0
    try:
        async with aclosing(cluster.pages(kind, namespace, labelled=kind is not SERVICES)) as pages:
            async for bodies, at in pages:
                version = at
                for body in bodies:
                    present.add(body["metadata"]["uid"])
                    store.put(body)
    except ApiRefused as refusal:
        if refusal.code != 404:
            raise
        store.forget(kind)
        raise NotServed(f"{kind.kind} of {kind.api_version}") from None
    return Listed(version, store.retain(kind, present, version))


class Watch:
    """One kind. `listed` is set when the store has all of it; `heard` is when the API server last said something about it."""

    def __init__(self, cluster: Cluster, store: Store, kind: Kind, namespace: str, listing: asyncio.Lock) -> None:
        """`listing`: only one kind is listed at a time: the page that is read is the largest thing that is ever in memory."""
        self._cluster, self._store, self._listing = cluster, store, listing
        self._kind, self._namespace = kind, namespace
        self._version = 0  # of the last event; 0: to be listed
        self.listed = asyncio.Event()
        self.heard = time.monotonic()

    async def run(self) -> None:
        self._heard()
        failures = 0
        while True:
            before = self.heard
            try:
                pause = await self._turn()
                failures = 0
            except Exception as error:
                failures = failures + 1 if self.heard == before else 1
                pause = min(BACKOFF_FIRST * 2.0 ** min(failures - 1, 10), BACKOFF_LONGEST) * random.uniform(0.8, 1.2)
                if isinstance(error, ApiRefused) and error.code == 410:
                    self._version, pause = 0, random.uniform(0, 0.2)  # too long away: what happened in between is gone
                log.warning("watch of %s, again in %.1f s: %s: %s", self._kind.plural, pause, type(error).__name__, error)
            await asyncio.sleep(pause)

    async def _turn(self) -> float:
        """One list if it is due, and one watch request to its end. Returns the seconds to wait before the next."""
        if not self._version:
            try:
                async with self._listing:
                    self._version = (await relist(self._cluster, self._store, self._kind, self._namespace)).version
            except NotServed:
                self._heard()
                self.listed.set()
                return ABSENT
            self._heard()
            self.listed.set()
        async with aclosing(self._cluster.watch(self._kind, self._namespace, self._version)) as events:
            async for happened, body in events:
                if happened == "DELETED":
                    self._store.remove(body)
                elif happened != "BOOKMARK":
                    self._store.put(body)
                self._version = int(body["metadata"]["resourceVersion"])
                self._heard()
        self._heard()
        return 0.0

    def _heard(self) -> None:
        self.heard = time.monotonic()


class Watches:
    """Of all kinds of children."""

    def __init__(self, cluster: Cluster, store: Store, namespace: str = "") -> None:
        listing = asyncio.Lock()
        self._watches = [Watch(cluster, store, kind, namespace, listing) for kind in CHILDREN]

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            for watch in self._watches:
                group.create_task(watch.run())

    async def listed(self) -> None:
        """Returns when the store has every child."""
        for watch in self._watches:
            await watch.listed.wait()

    @property
    def complete(self) -> bool:
        """The store has, or has had, every child."""
        return all(watch.listed.is_set() for watch in self._watches)

    @property
    def silent_for(self) -> float:
        """Seconds since the API server last said something about the kind of which it has said nothing for longest."""
        return time.monotonic() - min(watch.heard for watch in self._watches)
