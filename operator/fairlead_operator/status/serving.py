"""Conditions Ready and Available: whether requests are served now, and with which share of the wanted capacity. Pure.

Ready is a proof: a completion went through the router since the service last could not serve. The proof is stored in the condition, so
that a restarted operator sends no other. An edit is proven again once no pod of an earlier revision is left.
"""

import math
from dataclasses import dataclass

from fairlead_operator.api import InferenceService
from fairlead_operator.api.status import Condition
from fairlead_operator.causes import Cause
from fairlead_operator.causes.cause import make_cause
from fairlead_operator.observed import ProbeResult, Replicas
from fairlead_operator.revisions import scales_to_zero
from fairlead_operator.status.conditions import Conditions

RETRY_LONGEST = 15.0  # seconds between probes through a router that does not answer
FAULT_ATTEMPTS = 5  # failed probes in a row, in about 30 s: a router that has just started finds its workers within a few seconds
HOLD_SECONDS, HOLD_WHILE_STARTING = 30, 600.0
"""spec.routing.holdTimeoutSeconds by default, and how long a router then holds requests while workers start without a fault."""


def wakes(service: InferenceService) -> bool:
    """Return whether a service without workers still accepts requests: its routers hold them, and they start a worker."""
    return scales_to_zero(service) or "--ready-without-workers" in service.spec.routing.args


@dataclass(frozen=True)
class Serving:
    """What the service does with a request now."""

    serves: bool  # a worker and a router are ready
    asleep: bool = False  # no worker is wanted, and the next request starts one
    slept: bool = False  # it was asleep or waking until now
    waking_until: float | None = None  # seconds since the epoch: a worker starts, and the routers hold requests until then

    @classmethod
    def of(
        cls, service: InferenceService, workers: Replicas, routers: Replicas, ready: Condition | None, reduced_since: float | None
    ) -> "Serving":
        """Compute it. `ready`: the previous condition. `reduced_since`: when capacity became too small, seconds since the epoch."""
        slept = ready is not None and ready.status == "True" and ready.reason in ("Asleep", "Waking")
        if workers.ready > 0 or routers.ready == 0 or not wakes(service):
            return cls(workers.ready > 0 and routers.ready > 0, slept=slept)
        if workers.desired == 0:
            return cls(False, asleep=True)
        hold = service.spec.routing.hold_timeout_seconds
        longest = HOLD_WHILE_STARTING if hold == HOLD_SECONDS else float(hold)
        return cls(False, slept=slept, waking_until=reduced_since + longest if slept and reduced_since is not None else None)

    def is_waking(self, now: float, blocker: Cause | None) -> bool:
        """Return whether held requests will probably be answered: not with a fault, and not when their time is over."""
        return self.waking_until is not None and now < self.waking_until and not (blocker is not None and blocker.fault)


@dataclass(frozen=True)
class ProbeState:
    """Whether a completion succeeded through the router since the service last could not serve."""

    proven: bool = False  # for this generation
    kept: bool = False  # for an earlier one, while pods are replaced or the probe of this one runs
    proven_before: bool = False  # just now, while pods of an earlier revision are left: no proof for this generation
    failure: str = ""
    attempts: int = 0
    due: bool = False
    wake_at: float | None = None  # seconds since the epoch

    @classmethod
    def of(
        cls,
        ready: Condition | None,
        generation: int,
        probe: ProbeResult | None,
        now: float,
        *,
        serves: bool,
        is_rolled_out: bool,
        is_replaced: bool = False,
    ) -> "ProbeState":
        """Compute it. `ready`: the previous condition. `is_rolled_out`: every pod is of this generation.

        `is_replaced`: there are pods of another revision. That ends a proof for this generation too: new images are no edit.
        """
        if not serves:
            return cls()
        kept = ready is not None and ready.status == "True" and ready.reason == "Serving"
        if kept and ready is not None and ready.observed_generation == generation and not is_replaced:
            return cls(proven=True)
        if kept and not is_rolled_out:
            return cls(kept=True)
        if probe is None or probe.generation != generation:
            return cls(kept=kept, due=True)
        if probe.succeeded:
            return cls(proven=is_rolled_out, proven_before=not is_rolled_out)
        again = probe.at + min(2.0 ** min(probe.attempts, 10), RETRY_LONGEST)
        return cls(failure=probe.message, attempts=probe.attempts, due=now >= again, wake_at=again)

    @property
    def spent(self) -> bool:
        """Return whether the last result must be forgotten: it is stored in Ready, or it says nothing about pods that are still to come."""
        return self.proven or self.proven_before or (self.kept and not self.due)

    def find_fault(self, router: str) -> Cause | None:
        """Return the fault of a service whose pods are ready and whose probe keeps failing. `router`: the routers' Deployment."""
        if not self.failure or self.attempts < FAULT_ATTEMPTS:
            return None
        return _make_failure_cause(self.failure, router)


def set_ready(
    conditions: Conditions, serving: Serving, probe: ProbeState, blocker: Cause | None, generation: int, router: str, now: float
) -> None:
    """Set Ready. `blocker`: why requests are not served. `router`: the name of the routers' Deployment."""
    proof = "A completion went through the router"
    if probe.proven:
        conditions.set("Ready", True, "Serving", proof)
    elif probe.proven_before:
        conditions.set("Ready", True, "Serving", proof, generation=max(0, generation - 1))
    elif probe.failure:
        failed = _make_failure_cause(probe.failure, router)
        conditions.set("Ready", False, failed.reason, failed.message)
    elif probe.kept:
        conditions.keep("Ready", before=generation)
    elif serving.asleep:
        conditions.set(
            "Ready", True, "Asleep", "No worker runs, because there are no requests; the next one is held until a worker is ready"
        )
    elif serving.is_waking(now, blocker):
        words = blocker.message if blocker is not None else "a worker is starting"
        conditions.set("Ready", True, "Waking", f"Requests are held until a worker is ready: {words}")
    elif serving.serves:
        words = "A worker and a router are ready; a completion through the router is under way"
        conditions.set("Ready", serving.slept, "Waking" if serving.slept else "Probing", words)
    elif blocker is not None:
        conditions.set("Ready", False, blocker.reason, blocker.message)
    else:
        conditions.set("Ready", False, "Starting", "No worker or no router is ready")


def _make_failure_cause(failure: str, router: str) -> Cause:
    return make_cause("RequestFailed", failure, f"See kubectl logs deployment/{router}; the probe is repeated automatically.")


def find_floor(service: InferenceService, desired: int) -> int:
    """Return the workers below which Available is False: the wanted ones without those that may be evicted, and at least 1.

    With an autoscaler or schedules `minReplicas` are the wanted ones: otherwise each larger step would make the service unavailable.
    """
    scaling = service.spec.scaling
    is_varied = scaling is not None and (scaling.target is not None or bool(scaling.schedules))
    size = min(desired, scaling.min_replicas) if scaling is not None and is_varied else desired
    return max(1, size - _count_unavailable(service.spec.pod_disruption_budget.max_unavailable, size))


def _count_unavailable(allowed: int | str | None, size: int) -> int:
    """Return how many of `size` workers may be unavailable. A percentage is rounded up, as Kubernetes does."""
    if isinstance(allowed, str):
        return math.ceil(size * int(allowed.removesuffix("%")) / 100)
    return allowed or 0


def find_eviction_block(service: InferenceService, size: int) -> str:
    """Return which field lets no worker of `size` be evicted, so that node drains wait; empty: none does."""
    budget, nodes = service.spec.pod_disruption_budget, service.spec.engine.nodes
    if not size:
        return ""
    if budget.min_available is not None:
        least = budget.min_available
        wanted = math.ceil(size * nodes * int(least.removesuffix("%")) / 100) if isinstance(least, str) else least * nodes
        return f"spec.podDisruptionBudget.minAvailable {least}" if wanted >= size * nodes else ""
    return "spec.podDisruptionBudget.maxUnavailable 0" if budget.max_unavailable in (0, "0%") else ""


def set_available(
    conditions: Conditions, floor: int, workers: Replicas, routers: Replicas, ready: Condition | None, eviction_block: str = ""
) -> None:
    """Set Available. `ready`: the new condition Ready, which says whether a service without workers is asleep.

    `eviction_block`: the field that lets no worker be evicted.
    """
    share = f", {100 * min(workers.ready, workers.desired) // workers.desired} % of the capacity" if workers.desired else ""
    counted = f"{workers.ready} of {workers.desired} workers are ready{share}; {routers.ready} of {routers.desired} routers"
    if ready is not None and ready.status == "True" and ready.reason in ("Asleep", "Waking"):
        conditions.set("Available", True, ready.reason, counted)
    elif workers.ready == 0 and workers.desired:
        conditions.set("Available", False, "NoWorker", counted)
    elif workers.ready == 0 and (routers.ready or (ready is not None and ready.reason == "ScaledToZero")):
        conditions.set("Available", False, "ScaledToZero", counted)
    elif routers.ready == 0:
        conditions.set("Available", False, "NoRouter", counted)
    elif workers.desired and workers.ready < floor:
        conditions.set("Available", False, "BelowFloor", f"{counted}. {floor} workers are needed (spec.podDisruptionBudget)")
    elif workers.ready < workers.desired:
        conditions.set("Available", True, "Reduced", counted)
    else:
        blocked = (
            f". Node drains wait, because {eviction_block} lets no worker be evicted: lower it, or add workers" if eviction_block else ""
        )
        conditions.set("Available", True, "Serving", counted + blocked)
