"""Builds the status of a service: counts, conditions, and whether a probe through the router is due. Pure."""

from dataclasses import dataclass
from datetime import datetime

from fairlead_operator import causes, names
from fairlead_operator.api import InferenceService, ServiceStatus
from fairlead_operator.api.status import LoadingStatus
from fairlead_operator.causes import Cause, field_conflicts, unresponsive
from fairlead_operator.objects import parse_time
from fairlead_operator.observed import Observed, Replicas
from fairlead_operator.rollout.canary import NO_CANARY, CanaryPlan
from fairlead_operator.rollout.step import Step
from fairlead_operator.router_size import router_replicas
from fairlead_operator.status import batch as batch_status
from fairlead_operator.status import capacity, fallback, prefetch, serving, traffic
from fairlead_operator.status import index as index_status
from fairlead_operator.status import loading as loading_status
from fairlead_operator.status import pods as pod_conditions
from fairlead_operator.status.capacity import Shortfall
from fairlead_operator.status.conditions import Conditions, find
from fairlead_operator.status.endpoint import external_url
from fairlead_operator.status.endpoint import gateway as gateway_status
from fairlead_operator.status.endpoint import routers as router_status
from fairlead_operator.status.obstacles import Obstacles
from fairlead_operator.status.progress import DEADLINE, Progress, StepMemory, describe_stall


@dataclass(frozen=True)
class StatusResult:
    """The status to write, and what must happen before it can change."""

    status: ServiceStatus
    servable: bool  # a worker and a router are ready: a probe may be sent
    probe_due: bool
    probe_spent: bool  # the last result is stored, or is no proof for pods that are still to come
    wake_at: float | None  # seconds since the epoch; None: only a change of the cluster changes the status


@dataclass(frozen=True)
class _View:
    """What all parts of the status are computed from."""

    service: InferenceService
    observed: Observed  # without the canary, which its plan alone describes
    step: Step
    canary: CanaryPlan
    now: datetime
    revision: str
    memory: StepMemory
    workers: Replicas
    routers: Replicas
    shortfall: Shortfall
    loading: LoadingStatus | None
    obstacles: Obstacles
    obstacle: Cause | None  # the worst one, with the progress of a load
    tls_fault: Cause | None
    unresponsive: Cause | None
    unresponsive_at: float | None
    ended_after: float  # seconds since the epoch: pods that ended before explain nothing

    @classmethod
    def of(cls, service: InferenceService, observed: Observed, step: Step, now: datetime, canary: CanaryPlan) -> "_View":
        seconds, spec, before = now.timestamp(), service.spec, service.status
        revision = f"{service.name}-{canary.status.revision if canary.sides.stable and canary.status else step.revision}"
        memory = StepMemory.of(service, revision, spec.desired_replicas)
        workers = Replicas.of(observed.deployments.get(names.WORKER), spec.desired_replicas, settled=not memory.is_open)
        live = observed.deployments.get(names.ROUTER)
        routers = Replicas.of(live, router_replicas(service, live), settled=not memory.is_open)
        memory = memory.joined(workers, routers)
        cause, cause_at = unresponsive.find_cause(observed.deployments.values(), observed.pods, now, observed.pod_events)
        observed = observed.stable
        loading = loading_status.build_status(before.loading, observed.pods, observed.loading)
        shortfall = Shortfall.of(before.reduced_since, workers, routers, now, drains=not step.surge, alone=serving.wakes(service))
        ended_after = _find_start(service, memory, shortfall, seconds) - capacity.SLACK
        obstacles = Obstacles.find(service, observed, workers, routers, step, cause, ended_after)
        tls_fault = router_status.find_certificate_fault(service, observed)
        obstacle = router_status.explain_missing_secret(loading_status.add_progress(obstacles.worst, loading), tls_fault)
        found = (memory, workers, routers, shortfall, loading, obstacles, obstacle, tls_fault, cause, cause_at, ended_after)
        return cls(service, observed, step, canary, now, revision, *found)

    @property
    def seconds(self) -> float:
        return self.now.timestamp()

    @property
    def router_deployment(self) -> str:
        return names.deployment(self.service, names.ROUTER)

    @property
    def is_rolled_out(self) -> bool:
        current = self.workers.current and self.routers.current
        updated = self.workers.total == self.workers.updated and self.routers.total == self.routers.updated
        return current and updated and not (self.obstacles.refused or self.step.problem or self.canary.cause)

    @property
    def is_replaced(self) -> bool:
        """Whether other pods than those of the last proof serve. The revision changes even if no pod of the earlier one was ever seen."""
        old = self.workers.total > self.workers.updated or self.routers.total > self.routers.updated
        return old or self.service.status.revision not in ("", self.revision)


def build_service_status(
    service: InferenceService, observed: Observed, step: Step, now: datetime, canary_plan: CanaryPlan = NO_CANARY, prefetch_job: str = ""
) -> StatusResult:
    """Return the status and what it waits for. The conditions are set in the order in which they depend on each other."""
    view, before = _View.of(service, observed, step, now, canary_plan), service.status
    conditions = Conditions(before.conditions, service.generation, now)
    state, probe = _set_ready(conditions, view)
    stalled, (reduced, reduced_at) = _set_progress(conditions, view, probe)
    pod_conditions.set_weights_ready(conditions, view.observed, view.workers, step.revision)
    ready, wanted = view.routers.ready, view.routers.desired
    conditions.set("Routable", ready > 0, "RouterReady" if ready > 0 else "NoRouter", f"{ready} of {wanted} routers ready")
    pod_conditions.set_template_valid(conditions, view.obstacle)
    measured, measured_at = traffic.build_status(before.traffic, view.observed.traffic, now, serving=state.serves)
    index = index_status.build_status(before.index, view.observed.index, ready, now, view.observed.redis)
    index_fault, index_fault_at = index_status.find_fault(index, now)
    part_faults = _set_parts(conditions, view, prefetch_job)
    conflict, conflict_until = field_conflicts.find_cause(service, view.observed.field_conflicts)
    pod_faults = (
        view.obstacle,
        canary_plan.cause,
        step.problem,
        view.unresponsive,
        stalled,
        probe.find_fault(view.router_deployment),
        reduced,
    )
    fault = next((one for one in (*pod_faults, conflict, index_fault, *part_faults) if one is not None and one.fault), None)
    conditions.set("Degraded", fault is not None, fault.reason if fault else "AsExpected", fault.message if fault else "")
    status = ServiceStatus(
        observed_generation=service.generation,
        url=names.url(service),
        external_url=external_url.build_url(service, view.observed),
        model_name=service.served_model_name,
        desired_replicas=view.workers.desired,
        replicas=view.workers.total,
        ready_replicas=view.workers.ready,
        updated_replicas=view.workers.updated,
        routers=router_status.build_status(service, view.observed, view.routers),
        selector=names.selector_text(service),
        revision=view.revision,
        reduced_since=view.shortfall.since,
        loading=view.loading,
        index=index,
        traffic=measured,
        canary=canary_plan.status,
        conditions=conditions.items,
    )
    waking_until = state.waking_until if state.is_waking(view.seconds, view.obstacle) else None
    times = (probe.wake_at, index_fault_at, view.unresponsive_at, measured_at, conflict_until, reduced_at, waking_until)
    wake_at = min((at for at in times if at is not None), default=None)
    return StatusResult(status, state.serves, probe.due, probe.spent, wake_at)


def _set_ready(conditions: Conditions, view: _View) -> tuple[serving.Serving, serving.ProbeState]:
    """Set Ready and Available."""
    service, workers, routers = view.service, view.workers, view.routers
    before = find(service.status.conditions, "Ready")
    state = serving.Serving.of(service, workers, routers, before, view.shortfall.since_seconds)
    rolled_out, replaced = view.is_rolled_out, view.is_replaced
    result = view.observed.probe
    probe = serving.ProbeState.of(
        before, service.generation, result, view.seconds, serves=state.serves, is_rolled_out=rolled_out, is_replaced=replaced
    )
    serving.set_ready(conditions, state, probe, view.obstacle, service.generation, view.router_deployment, view.seconds)
    floor, block = serving.find_floor(service, workers.desired), serving.find_eviction_block(service, workers.desired)
    serving.set_available(conditions, floor, workers, routers, find(conditions.items, "Ready"), block)
    return state, probe


def _set_progress(conditions: Conditions, view: _View, probe: serving.ProbeState) -> tuple[Cause | None, tuple[Cause | None, float | None]]:
    """Set the conditions of progress. Return why it is stalled, and lost capacity with the time at which it becomes a fault."""
    service, workers, routers, step, shortfall = view.service, view.workers, view.routers, view.step, view.shortfall
    stalled = Cause(DEADLINE, describe_stall(service, workers, routers, step), True) if workers.stalled or routers.stalled else None
    worst = causes.find_worst_cause(view.observed.pods, shortfall.component, step.revision, view.observed.pod_events, view.ended_after)
    late = shortfall.find_fault(service.spec.rollout.progress_deadline_seconds, view.seconds, DEADLINE, worst)
    is_off = workers.desired == 0 and not serving.wakes(service)
    progress = Progress.of(
        service,
        view.memory,
        workers,
        routers,
        step,
        view.canary,
        stop=view.obstacles.stop or stalled or late[0],
        converged=workers.complete and routers.rolled_out and (routers.ready > 0 or is_off) and view.obstacles.refused is None,
        proven=probe.proven or workers.desired == 0,
    )
    progress.set_conditions(conditions)
    if progress.is_complete:
        return None, shortfall.find_fault(capacity.GRACE, view.seconds, "CapacityReduced", worst)
    return stalled, late


def _set_parts(conditions: Conditions, view: _View, prefetch_job: str) -> tuple[Cause | None, ...]:
    """Set the conditions of optional parts of a service. Return their faults."""
    service, observed = view.service, view.observed
    gateway = gateway_status.build_condition(service, observed)
    batch, batch_fault = batch_status.judge(service, observed)
    cached, prefetch_fault = prefetch.judge(service, observed, prefetch_job)
    for name, condition in (("GatewayReady", gateway), ("BatchReady", batch), ("ModelCached", cached)):
        if condition is not None:
            conditions.set(name, *condition)
    return (
        gateway_status.find_fault(gateway),
        batch_fault,
        prefetch_fault,
        view.tls_fault,
        router_status.find_other_service_fault(service, observed),
        fallback.find_fault(service.status, observed.pods, observed.fallbacks),
    )


def _find_start(service: InferenceService, memory: StepMemory, shortfall: Shortfall, now: float) -> float:
    """Return when the present trouble began, in seconds since the epoch: pods that ended earlier explain nothing."""
    progressing = find(service.status.conditions, "Progressing")
    if shortfall.since_seconds is not None:
        return shortfall.since_seconds
    return parse_time(progressing.last_transition_time) if memory.is_open and progressing and progressing.status == "True" else now
