"""Everything that should exist for one service, and what should be said about it: a pure function of what is wanted and what is seen."""

from dataclasses import dataclass
from datetime import datetime

from fairlead_operator.api import InferenceService, ServiceStatus
from fairlead_operator.children import Object, router, worker
from fairlead_operator.observed import Observed
from fairlead_operator.scaling.decision import Decision
from fairlead_operator.scaling.sizing import sized, with_size
from fairlead_operator.settings import Settings
from fairlead_operator.status import verdict


@dataclass(frozen=True)
class Desired:
    objects: list[Object]  # for server-side apply, in this order
    status: ServiceStatus
    servable: bool  # every pod is as wanted
    probe_due: bool  # ask for a completion through the router, and come back with the result
    decision: Decision | None  # of our own autoscaler, where it changes the size
    wake_at: float | None  # seconds since the epoch at which to look again, even if nothing has changed


def desired(service: InferenceService, observed: Observed, settings: Settings, now: datetime) -> Desired:
    """Same inputs, same objects: no I/O, no clock, no randomness, and no memory beside what the cluster shows."""
    service, decision = sized(service, observed)
    said = verdict(service, observed, now)
    return Desired(
        objects=[*worker.objects(service, settings, observed.revisions), *router.objects(service, settings, observed.revisions)],
        status=with_size(said.status, service, observed, decision),
        servable=said.servable,
        probe_due=said.probe_due,
        decision=decision if decision is not None and decision.reason else None,
        wake_at=said.wake_at,
    )
