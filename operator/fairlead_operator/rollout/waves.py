"""Plans waves: which services may begin the update to the operator's newest images. Pure.

A member is read from the status of one service alone, so an operator that takes over continues the rollout where it stands. Services that
are admitted in this process and have not written that yet are passed as `granted`.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from fairlead_operator.api import ServiceStatus
from fairlead_operator.rollout.images import GOING_BACK, UPDATING
from fairlead_operator.settings import WaveLimits

Owner = tuple[str, str]
"""Namespace and name of a service."""


@dataclass(frozen=True)
class Member:
    """A service's part in the rollout of images."""

    owner: Owner
    phase: str = ""  # of status.imageUpdate; empty: the service has no status yet
    surge_gpus: int = 0  # that its update may use in addition; while it waits, those that it would use
    workers: int = 0
    admissible: bool = False  # it waits, and only for its wave
    held: bool = False  # its update has begun, and its spec holds it up

    @classmethod
    def of(cls, owner: Owner, status: ServiceStatus) -> "Member":
        update = status.image_update
        if update is None:
            return cls(owner)
        # A waiting service without a message lacks nothing but its wave.
        admissible = update.phase == "Waiting" and not update.message
        return cls(owner, update.phase, update.surge_gpus, status.desired_replicas, admissible, update.held)


@dataclass(frozen=True)
class Wave:
    """The result of one planning."""

    admitted: frozenset[Owner] = frozenset()  # that may begin now
    failed: tuple[Owner, ...] = ()  # whose update failed: no other service begins


def plan_wave(members: Iterable[Member], granted: Collection[Owner], limits: WaveLimits) -> Wave:
    """Return the services that may begin now, within the limits. A failed service stops the rollout.

    The smallest are first, and those at zero are last: without pods they prove nothing, and would wake up with a bad image.
    """
    everyone = sorted(members, key=lambda one: (not one.workers, one.workers, one.owner))
    failed = tuple(one.owner for one in everyone if one.phase in GOING_BACK)
    if failed or limits.paused:
        return Wave(failed=failed)
    # An observed service keeps its share: it would need the GPUs to go back. A held one keeps only the GPUs that it has.
    busy = [one for one in everyone if one.phase in UPDATING or one.owner in granted]
    free, used = limits.max_services - sum(not one.held for one in busy), sum(one.surge_gpus for one in busy)
    admitted: set[Owner] = set()
    for one in everyone:
        if not one.admissible or one.owner in granted or len(admitted) >= free:
            continue
        if limits.max_surge_gpus is None or used + one.surge_gpus <= limits.max_surge_gpus:
            admitted.add(one.owner)
            used += one.surge_gpus
    return Wave(frozenset(admitted), failed)
