"""The children's watches. Each kind is listed into the cache, then watched. The list is repeated only when the watch cannot resume."""

import asyncio
import logging
import random
import time
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass

from fairlead_operator.kube.cache import Cache
from fairlead_operator.kube.client import ApiError, Cluster
from fairlead_operator.kube.kinds import CHILDREN, PROFILES, UNLABELLED, Kind

log = logging.getLogger(__name__)
BACKOFF_FIRST, BACKOFF_LONGEST = 1.0, 30.0  # seconds between two requests of a failing watch
SHORT_WATCH = 1.0  # seconds: a watch that ends sooner and without an event has failed, as in client-go
NOT_SERVED_RETRY = 60.0  # seconds until a kind that the API server does not serve is requested again


class NotServed(Exception):
    """The API server does not know this kind: its CRD is not installed."""


@dataclass(frozen=True)
class ListResult:
    version: int  # resourceVersion of the list
    missed_deletions: int  # deletions that no watch had delivered


async def relist(cluster: Cluster, cache: Cache, kind: Kind, namespace: str) -> ListResult:
    """Make the cache agree with the API server for one kind, in one namespace or in all (empty).

    Raises NotServed, and other errors of the API server.
    """
    present: set[str] = set()
    version = 0
    with cache.read() as read:
        try:
            async with aclosing(cluster.pages(kind, namespace, labelled=kind not in UNLABELLED)) as pages:
                async for bodies, at in pages:
                    version = at
                    for body in bodies:
                        present.add(body["metadata"]["uid"])
                        read.put(body)
        except ApiError as refusal:
            if refusal.code != 404:
                raise
            cache.forget(kind)
            raise NotServed(f"{kind.kind} of {kind.api_version}") from None
    return ListResult(version, cache.retain(kind, present, version, namespace))


class Reflector:
    """Lists and watches one kind in one namespace, or in all (empty).

    `synced` is set when the cache has all of it; `last_response_at` is the time of the last answer.
    """

    def __init__(self, cluster: Cluster, cache: Cache, kind: Kind, namespace: str, listing: asyncio.Lock) -> None:
        """`listing`: only one kind is listed at a time, since a page is the largest object that is ever in memory."""
        self._cluster, self._cache, self._listing = cluster, cache, listing
        self._kind, self._namespace = kind, namespace
        self._version = 0  # resourceVersion of the last event; 0: a list is due
        self.synced = asyncio.Event()
        self.last_response_at = time.monotonic()

    async def run(self) -> None:
        self._record_response()
        failures = 0
        while True:
            before = self.last_response_at
            try:
                pause = await self._list_and_watch()
                failures = 0
            except Exception as error:
                failures = failures + 1 if self.last_response_at == before else 1
                pause = min(BACKOFF_FIRST * 2.0 ** min(failures - 1, 10), BACKOFF_LONGEST) * random.uniform(0.8, 1.2)
                if isinstance(error, ApiError) and error.code == 410:
                    self._version, pause = 0, random.uniform(0, 0.2)  # the changes since then are no longer available
                where = f" in {self._namespace}" if self._namespace else ""
                log.warning("watch of %s%s, again in %.1f s: %s: %s", self._kind.plural, where, pause, type(error).__name__, error)
            await asyncio.sleep(pause)

    async def _list_and_watch(self) -> float:
        """List if a list is due, and run one watch request to its end. Returns the seconds to wait before the next one."""
        if not self._version:
            try:
                async with self._listing:
                    self._version = (await relist(self._cluster, self._cache, self._kind, self._namespace)).version
            except NotServed:
                self._record_response()
                self.synced.set()
                return NOT_SERVED_RETRY
            self._record_response()
            self.synced.set()
        started, received = time.monotonic(), False
        async with aclosing(self._cluster.watch(self._kind, self._namespace, self._version)) as events:
            async for event_type, body in events:
                if event_type == "DELETED":
                    self._cache.remove(body)
                elif event_type != "BOOKMARK":
                    self._cache.put(body)
                self._version, received = int(body["metadata"]["resourceVersion"]), True
                self._record_response()
        self._record_response()
        return 0.0 if received or time.monotonic() - started >= SHORT_WATCH else BACKOFF_FIRST

    def _record_response(self) -> None:
        self.last_response_at = time.monotonic()


class Reflectors:
    """The reflectors of profiles and of all kinds of children: one for each kind in each namespace, or in all."""

    def __init__(self, cluster: Cluster, cache: Cache, namespaces: Sequence[str] = ("",)) -> None:
        listing = asyncio.Lock()
        kinds = (PROFILES, *CHILDREN)
        self._reflectors = [Reflector(cluster, cache, kind, namespace, listing) for namespace in namespaces for kind in kinds]

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            for reflector in self._reflectors:
                group.create_task(reflector.run())

    async def wait_synced(self) -> None:
        """Return when the cache has every child."""
        for reflector in self._reflectors:
            await reflector.synced.wait()

    @property
    def has_synced(self) -> bool:
        """Return whether the cache has, or has had, every child."""
        return all(reflector.synced.is_set() for reflector in self._reflectors)

    @property
    def seconds_since_response(self) -> float:
        """Seconds since the last answer, of the kind that has waited longest for one."""
        return time.monotonic() - min(reflector.last_response_at for reflector in self._reflectors)
