"""Leader election by a Lease, so that two operators (or two versions of one) never write at the same time.

The rules are client-go's: a candidate takes a lease that is free, or that it has observed unchanged for its whole duration. Only durations
on this machine's clock since boot are compared, never the times of day of two machines. Every write of the lease carries the
resourceVersion that was read, so of two candidates one is refused.

client-go leaves fencing to its callers. Here every write of the operator calls `check`, when it starts and again when its first byte is
about to be sent. A process that could not renew its lease, or was suspended for longer, exits immediately (`os._exit`) without sending
another byte to the API server.
"""

import asyncio
import logging
import os
import socket
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from fairlead_operator.kube.client import ApiError, Cluster
from fairlead_operator.kube.kinds import LEASES

log = logging.getLogger(__name__)
EXIT_FENCED = 3  # exit code of a process that has lost its lease
RELEASE_TIMEOUT = 5.0  # seconds


@dataclass(frozen=True)
class Timing:
    """Durations of the lease in seconds. A write in progress may take the difference between `duration` and `deadline`."""

    duration: float = 15.0  # candidates wait this long for a holder that does not renew
    deadline: float = 10.0  # a holder that could not renew for this long exits
    retry: float = 2.0


def identity() -> str:
    """Return a new identity of this process. The pod name alone is not enough: a restarted container keeps it."""
    return f"{socket.gethostname()}_{uuid.uuid4().hex[:8]}"


def uptime() -> float:
    """Return seconds on a clock that continues while the machine is suspended (Linux); `time.monotonic` stops."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


def fence(reason: str) -> None:
    """Exit immediately, without cleanup that could still write."""
    log.critical("ending: %s", reason)
    logging.shutdown()
    os._exit(EXIT_FENCED)


@dataclass(frozen=True)
class ObservedLease:
    """The lease as last read, and when this version was first observed (seconds of the elector's clock)."""

    body: Mapping[str, Any]
    at: float

    @property
    def holder(self) -> str:
        return str(self.body["spec"].get("holderIdentity") or "")

    @property
    def free_at(self) -> float:
        return self.at + float(self.body["spec"].get("leaseDurationSeconds") or 0)


class LeaderElector:
    """`await lead(acquired)` while the process acts as leader, then `await release()`."""

    def __init__(
        self,
        cluster: Cluster,
        namespace: str,
        name: str,
        *,
        holder_identity: str | None = None,
        timing: Timing = Timing(),
        fence: Callable[[str], None] = fence,
        clock: Callable[[], float] = uptime,
    ) -> None:
        self.holder_identity = holder_identity or identity()
        self._cluster = cluster
        self._key = (namespace, name)
        self._timing = timing
        self._fence = fence
        self._clock = clock
        self._lease: ObservedLease | None = None
        self._is_current = False  # `_lease` is the result of a request that was answered
        self._valid_until = float("-inf")  # until then no other process can hold the lease
        self._last_response_at = clock()  # when the API server last answered

    @property
    def leading(self) -> bool:
        return self._clock() < self._valid_until

    @property
    def holder(self) -> str:
        return self._lease.holder if self._lease is not None else ""

    @property
    def seconds_since_response(self) -> float:
        """Seconds since the API server last answered a request for the lease."""
        return self._clock() - self._last_response_at

    def check(self) -> float:
        """Return the seconds that a write may take. Without a valid lease this call ends the process. Called before every write."""
        left = self._valid_until - self._clock()
        if left <= 0:
            self._fence(f"a write was about to be made without the lease {'/'.join(self._key)}")
        return left + self._timing.duration - self._timing.deadline

    async def lead(self, acquired: Callable[[], object]) -> None:
        """Acquire the lease, call `acquired()`, and start to renew it immediately, however long the caller's work takes."""
        await self.acquire()
        acquired()
        await self.renew_forever()

    async def acquire(self) -> None:
        """Return when this process holds the lease. Raises permanent refusals of the API server (no right to leases)."""
        logged_holder = ""
        while not await self._try():
            if self.holder and self.holder != logged_holder:
                logged_holder = self.holder
                log.info("standing by: %s holds the lease %s/%s", logged_holder, *self._key)
            await asyncio.sleep(self._retry_delay())
        log.info("%s leads: lease %s/%s, transition %d", self.holder_identity, *self._key, self._transitions)

    def _retry_delay(self) -> float:
        """Return the seconds until the next attempt: at most `retry`, as a holder may release its lease at any time, or until `free_at`."""
        left = self._lease.free_at - self._clock() if self._lease is not None and self.holder else 0.0
        return min(self._timing.retry, left) if left > 0 else self._timing.retry

    async def renew_forever(self) -> None:
        """Renew forever. End the process when the lease is lost or cannot be renewed in time."""
        pause = self._timing.retry
        while True:
            await asyncio.sleep(pause)
            self._check_leading()
            began = self._clock()
            if not await self._try() and self.holder != self.holder_identity:
                self._fence(f"{self.holder or 'no process'} holds the lease {'/'.join(self._key)} now")
            self._check_leading()
            pause = max(0.0, self._timing.retry - (self._clock() - began))  # the time that the request took counts as part of the pause

    def _check_leading(self) -> None:
        if not self.leading:
            self._fence(f"the lease {'/'.join(self._key)} was not renewed for {self._timing.deadline:.0f} s")

    async def release(self) -> None:
        """Release the lease, so that another process need not wait for its expiry. Nothing may be written afterwards."""
        if not self.leading or self._lease is None:
            return
        self._valid_until = float("-inf")
        spec = {**self._lease.body["spec"], "holderIdentity": None, "leaseDurationSeconds": 1, "renewTime": _now()}
        try:
            async with asyncio.timeout(RELEASE_TIMEOUT):
                await self._cluster.replace(LEASES, {**self._lease.body, "spec": spec})
            log.info("%s has released the lease %s/%s", self.holder_identity, *self._key)
        except Exception as error:  # the lease expires by itself
            log.warning("the lease was not released: %s: %s", type(error).__name__, error)

    @property
    def _transitions(self) -> int:
        return int(self._lease.body["spec"].get("leaseTransitions") or 0) if self._lease is not None else 0

    async def _try(self) -> bool:
        """Try once to acquire or renew. Return False if another process holds the lease, or if the API server does not answer."""
        started = self._clock()
        try:
            async with asyncio.timeout(self._timing.deadline / 2):
                return await self._attempt(started)
        except ApiError as refusal:
            self._last_response_at = self._clock()
            if refusal.code in (401, 403) and not self.leading:
                raise
            log.warning("lease %s/%s: %s", *self._key, refusal)
        except Exception as error:
            log.warning("lease %s/%s: %s: %s", *self._key, type(error).__name__, error)
        self._is_current = False
        return False

    async def _attempt(self, started: float) -> bool:
        lease = self._lease if self._is_current and self.holder == self.holder_identity else await self._read()
        if lease is not None and lease.holder not in ("", self.holder_identity) and self._clock() < lease.free_at:
            return False
        acquired = lease is None or lease.holder != self.holder_identity
        if lease is not None and acquired and lease.holder:
            log.info("%s has not renewed the lease %s/%s in its time", lease.holder, *self._key)
        try:
            written = await self._write(lease, acquired=acquired)
        except ApiError as refusal:
            if refusal.code != 409:
                raise
            await self._read()  # another candidate was faster
            return False
        self._last_response_at = self._clock()
        self._lease, self._is_current = ObservedLease(written, started), True
        self._valid_until = started + self._timing.deadline
        return True

    async def _write(self, lease: ObservedLease | None, *, acquired: bool) -> Mapping[str, Any]:
        if lease is not None:
            return await self._cluster.replace(LEASES, {**lease.body, "spec": self._spec(lease.body["spec"], acquired=acquired)})
        namespace, name = self._key
        body = {"apiVersion": LEASES.api_version, "kind": LEASES.kind, "metadata": {"namespace": namespace, "name": name}}
        return await self._cluster.create(LEASES, {**body, "spec": self._spec({}, acquired=acquired)})

    async def _read(self) -> ObservedLease | None:
        body = await self._cluster.get(LEASES, *self._key)
        self._last_response_at = self._clock()
        if body is None:
            self._lease = None
        elif self._lease is None or _version(self._lease.body) != _version(body):
            self._lease = ObservedLease(body, self._clock())
        self._is_current = True
        return self._lease

    def _spec(self, before: Mapping[str, Any], *, acquired: bool) -> dict[str, Any]:
        now = _now()
        return {
            **before,
            "holderIdentity": self.holder_identity,
            "leaseDurationSeconds": round(self._timing.duration),
            "acquireTime": now if acquired else before.get("acquireTime") or now,
            "renewTime": now,
            "leaseTransitions": int(before.get("leaseTransitions") or 0) + acquired,
        }


def _now() -> str:
    """Return the time of day, for users that read the lease. No decision depends on it."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def _version(body: Mapping[str, Any]) -> str:
    return str(body["metadata"]["resourceVersion"])
