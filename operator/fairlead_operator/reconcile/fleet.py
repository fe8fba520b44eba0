"""The rollout of images over all services: the one place that admits services to a wave (`rollout.waves`).

It keeps what the statuses of the services say, and the services that it has admitted and that have not yet stored that. After a restart it
reads the statuses again. An admission that was not stored had no effect.
"""

import asyncio
import logging
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from fairlead_operator.api import ServiceStatus
from fairlead_operator.kube.cache import Cache, Owner
from fairlead_operator.kube.client import Cluster
from fairlead_operator.kube.kinds import SERVICES
from fairlead_operator.kube.reflector import relist
from fairlead_operator.observed import FleetView
from fairlead_operator.rollout.waves import Member, Wave, plan_wave
from fairlead_operator.settings import WaveLimits

log = logging.getLogger(__name__)
SETTLE = 0.2  # seconds: reports that arrive together are planned together
RETRY = 10.0  # seconds
STOPPED = (
    "the rollout of the newest images stopped, because the update of a service failed and went back: "
    "kubectl fairlead outdated -A says where, why and how to continue"
)


class FleetRollout:
    """`report` is called with every stored status, and `view` before every reconcile."""

    def __init__(self, limits: WaveLimits, cache: Cache, wake: Callable[[Owner], None]) -> None:
        """`wake`: called with each service for which `view` has changed."""
        self._limits, self._cache, self._wake = limits, cache, wake
        self._members: dict[Owner, Member] = {}
        self._granted: set[Owner] = set()
        self._wave: Wave | None = None  # None: nothing was planned yet
        self._changed = asyncio.Event()

    @property
    def members(self) -> tuple[Member, ...]:
        return tuple(self._members.values())

    @property
    def stopped(self) -> str | None:
        """Return why no service may begin its update; empty: waves go on; None: nothing was planned yet.

        The text names no service: every waiting service stores it, and more failures must not write all of them again.
        """
        if self._wave is None:
            return None
        if self._wave.failed:
            return STOPPED
        return "the chart's rollout.paused holds all updates back" if self._limits.paused else ""

    def view(self, owner: Owner) -> FleetView:
        return FleetView(owner in self._granted and self.stopped == "", self.stopped)

    def report(self, owner: Owner, status: ServiceStatus) -> None:
        """Take up a status that is stored. A service that has begun, or may no longer begin, gives its admission back."""
        member = Member.of(owner, status)
        if not member.admissible:
            self._granted.discard(owner)
        if self._members.get(owner) != member:
            self._members[owner] = member
            self._changed.set()

    def forget(self, owner: Owner) -> None:
        """Drop a service that was deleted: its place is free, and its failure no longer stops the rollout."""
        self._granted.discard(owner)
        if self._members.pop(owner, None) is not None:
            self._changed.set()

    async def run(self, cluster: Cluster, namespaces: Sequence[str]) -> None:
        """Plan whenever something has changed. The services are listed before the first plan: it must count every update under way."""
        listed = False
        while True:
            await self._changed.wait()
            await asyncio.sleep(SETTLE)
            self._changed.clear()
            if not self._is_waiting:
                continue
            if not listed:
                try:
                    for namespace in namespaces:
                        await relist(cluster, self._cache, SERVICES, namespace)
                    listed = True
                except Exception as error:  # NotServed too: the CRD may be installed later
                    log.warning("services not listed, again in %.0f s: %s: %s", RETRY, type(error).__name__, error)
                    await asyncio.sleep(RETRY * random.uniform(0.8, 1.2))
                    self._changed.set()
                    continue
            self.plan()

    @property
    def _is_waiting(self) -> bool:
        return any(one.phase == "Waiting" for one in self._members.values())

    def plan(self) -> None:
        """Admit the services that may begin now, and wake those to which something changed."""
        owners = self._cache.owners()
        for owner in owners:
            if owner not in self._members:
                body = self._cache.service(owner) or {}
                if not (body.get("metadata") or {}).get("deletionTimestamp"):  # of those, `forget` was called
                    self._members[owner] = Member.of(owner, _read_status(body))
        present = set(owners)
        self._members = {owner: one for owner, one in self._members.items() if owner in present}
        self._granted &= present
        before = self.stopped
        self._wave = plan_wave(self._members.values(), self._granted, self._limits)
        woken = set(self._wave.admitted)
        self._granted |= self._wave.admitted
        for namespace, name in sorted(woken):
            log.info("images: the update of %s/%s begins", namespace, name)
        if self.stopped != before:
            failed = ", ".join("/".join(owner) for owner in self._wave.failed[:10])
            log.log(logging.WARNING if self.stopped else logging.INFO, "images: %s %s", self.stopped or "waves go on", failed)
            woken |= {one.owner for one in self._members.values() if one.phase == "Waiting"}
        for owner in sorted(woken):
            self._wake(owner)


def _read_status(body: Mapping[str, Any]) -> ServiceStatus:
    """Return the status of a service that has not reported. One that cannot be read takes no part."""
    try:
        return ServiceStatus.model_validate(body.get("status") or {})
    except ValidationError:
        return ServiceStatus()
