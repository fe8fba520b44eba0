"""Who acts: a Lease that one process holds, so that two operators (or two versions of one) never write at the same time.

The rules are client-go's: a candidate takes a lease that is free, or that it has seen unchanged for as long as its holder asked for. Only
durations on this machine's own clock since its start are compared, never two machines' times of day. Every write of the lease is bound to
the resourceVersion that was read, so of two candidates one is refused.

What client-go leaves to its callers is fencing. Here every write of the operator asks `check`, when it is made and again when its first
byte is about to be sent: a process that could not renew, or slept for longer than its lease, ends on the spot (`os._exit`), without a
further byte to the API server.
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
    """Seconds. The gap between `deadline` and `duration` is what a write under way may still take."""

    duration: float = 15.0  # others wait this long for a holder that says nothing
    deadline: float = 10.0  # a holder that could not renew for this long ends
    retry: float = 2.0


def identity() -> str:
    """Of this process: a restarted container has the pod's name again, and must not take itself for its predecessor."""
    return f"{socket.gethostname()}_{uuid.uuid4().hex[:8]}"


def uptime() -> float:
    """Seconds of a clock that goes on while the machine is suspended (Linux), where `time.monotonic` stands still."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


def fence(reason: str) -> None:
    """End at once: no cleanup, nothing that could still write."""
    log.critical("ending: %s", reason)
    logging.shutdown()
    os._exit(EXIT_FENCED)


@dataclass(frozen=True)
class ObservedLease:
    """The lease as it was last read, and when that version of it was first seen (seconds of the elector's clock)."""

    body: Mapping[str, Any]
    at: float

    @property
    def holder(self) -> str:
        return str(self.body["spec"].get("holderIdentity") or "")

    @property
    def free_at(self) -> float:
        return self.at + float(self.body["spec"].get("leaseDurationSeconds") or 0)


class LeaderElector:
    """`await lead(taken)` for as long as the process acts, then `await release()`."""

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
        self._is_current = False  # `_seen` is the outcome of a request that was answered
        self._valid_until = float("-inf")  # until when no other process can have the lease
        self._last_response_at = clock()  # when the API server last answered

    @property
    def leading(self) -> bool:
        return self._clock() < self._valid_until

    @property
    def holder(self) -> str:
        return self._lease.holder if self._lease is not None else ""

    @property
    def seconds_since_response(self) -> float:
        """Seconds since the API server has last answered about the lease."""
        return self._clock() - self._last_response_at

    def check(self) -> float:
        """Asked by every write: a process without a valid lease does not come back from here. Returns the seconds that it may take."""
        left = self._valid_until - self._clock()
        if left <= 0:
            self._fence(f"a write was about to be made without the lease {'/'.join(self._key)}")
        return left + self._timing.duration - self._timing.deadline

    async def lead(self, acquired: Callable[[], object]) -> None:
        """`acquire`, tell it by `taken()`, and `keep` without a moment in between, whatever the told one has to do."""
        await self.acquire()
        acquired()
        await self.renew_forever()

    async def acquire(self) -> None:
        """Returns when the lease is ours. Raises what the API server refuses for good (no right to leases)."""
        logged_holder = ""
        while not await self._try():
            if self.holder and self.holder != logged_holder:
                logged_holder = self.holder
                log.info("standing by: %s holds the lease %s/%s", logged_holder, *self._key)
            await asyncio.sleep(self._until_worth_trying())
        log.info("%s leads: lease %s/%s, transition %d", self.holder_identity, *self._key, self._transitions)

    def _until_worth_trying(self) -> float:
        """Seconds: a holder may release its lease at any time, and one that has died has lost it at `free_at`, not up to `retry` later."""
        left = self._lease.free_at - self._clock() if self._lease is not None and self.holder else 0.0
        return min(self._timing.retry, left) if left > 0 else self._timing.retry

    async def renew_forever(self) -> None:
        """Renews for ever; ends the process when the lease is lost or cannot be renewed in time."""
        pause = self._timing.retry
        while True:
            await asyncio.sleep(pause)
            self._still_leading()
            began = self._clock()
            if not await self._try() and self.holder != self.holder_identity:
                self._fence(f"{self.holder or 'nobody'} holds the lease {'/'.join(self._key)} now")
            self._still_leading()
            pause = max(0.0, self._timing.retry - (self._clock() - began))  # an answer that took seconds has used them up already

    def _still_leading(self) -> None:
        if not self.leading:
            self._fence(f"the lease {'/'.join(self._key)} was not renewed for {self._timing.deadline:.0f} s")

    async def release(self) -> None:
        """Gives the lease back, so that another need not wait for its end. Nothing may be written afterwards."""
        if not self.leading or self._lease is None:
            return
        self._valid_until = float("-inf")
        spec = {**self._lease.body["spec"], "holderIdentity": None, "leaseDurationSeconds": 1, "renewTime": _now()}
        try:
            async with asyncio.timeout(RELEASE_TIMEOUT):
                await self._cluster.replace(LEASES, {**self._lease.body, "spec": spec})
            log.info("%s has released the lease %s/%s", self.holder_identity, *self._key)
        except Exception as error:  # it runs out by itself
            log.warning("the lease was not released: %s: %s", type(error).__name__, error)

    @property
    def _transitions(self) -> int:
        return int(self._lease.body["spec"].get("leaseTransitions") or 0) if self._lease is not None else 0

    async def _try(self) -> bool:
        """One attempt to take or renew. False: somebody else has it, or nothing was learnt."""
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
            await self._read()  # somebody was faster
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
    """For people who look at the lease; nothing is decided by it."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def _version(body: Mapping[str, Any]) -> str:
    return str(body["metadata"]["resourceVersion"])
