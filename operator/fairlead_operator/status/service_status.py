"""Builds the status of a service: counts, conditions, and whether a probe through the router is due. Pure."""

from dataclasses import dataclass
from datetime import datetime

from fairlead_operator import causes, names
from fairlead_operator.api import InferenceService, ServiceStatus
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
from fairlead_operator.status.endpoint import external_url, other_services, router_tls
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


def build_service_status(
    service: InferenceService, observed: Observed, step: Step, now: datetime, canary_plan: CanaryPlan = NO_CANARY, prefetch_job: str = ""
) -> StatusResult:
    seconds, spec, before = now.timestamp(), service.spec, service.status
    revision = f"{service.name}-{canary_plan.status.revision if canary_plan.sides.stable and canary_plan.status else step.revision}"
    memory = StepMemory.of(service, revision, spec.desired_replicas)
    workers = Replicas.of(observed.deployments.get(names.WORKER), spec.desired_replicas, settled=not memory.is_open)
    live_routers = observed.deployments.get(names.ROUTER)
    routers = Replicas.of(live_routers, router_replicas(service, live_routers), settled=not memory.is_open)
    memory = memory.joined(workers, routers)
    unresponsive_cause, unresponsive_at = unresponsive.find_cause(observed.deployments.values(), observed.pods, now, observed.pod_events)
    observed = observed.stable  # the canary plan alone describes a canary
    loading = loading_status.build_status(before.loading, observed.pods, observed.loading)
    shortfall = Shortfall.of(before.reduced_since, workers, routers, now, drains=not step.surge, alone=serving.wakes(service))
    ended_after = _find_start(service, memory, shortfall, seconds) - capacity.SLACK
    obstacles = Obstacles.find(service, observed, workers, routers, step, unresponsive_cause, ended_after)
    tls_fault = router_tls.find_fault(service, observed)
    obstacle = router_tls.explain(loading_status.add_progress(obstacles.worst, loading), tls_fault)

    conditions = Conditions(before.conditions, service.generation, now)
    ready_before = find(before.conditions, "Ready")
    is_rolled_out = (
        workers.current
        and routers.current
        and workers.total == workers.updated
        and routers.total == routers.updated
        and not (obstacles.refused or step.problem or canary_plan.cause)
    )
    state = serving.Serving.of(service, workers, routers, ready_before, shortfall.since_seconds)
    probe = serving.ProbeState.of(
        ready_before,
        service.generation,
        observed.probe,
        seconds,
        serves=state.serves,
        is_rolled_out=is_rolled_out,
        # The revision changes even if no pod of the earlier one was ever seen.
        is_replaced=workers.total > workers.updated or routers.total > routers.updated or before.revision not in ("", revision),
    )
    router = names.deployment(service, names.ROUTER)
    serving.set_ready(conditions, state, probe, obstacle, service.generation, router, seconds)
    floor, block = serving.find_floor(service, workers.desired), serving.find_eviction_block(service, workers.desired)
    serving.set_available(conditions, floor, workers, routers, find(conditions.items, "Ready"), block)

    stalled = Cause(DEADLINE, describe_stall(service, workers, routers, step), True) if workers.stalled or routers.stalled else None
    worst = causes.find_worst_cause(observed.pods, shortfall.component, step.revision, observed.pod_events, ended_after)
    late = shortfall.find_fault(spec.rollout.progress_deadline_seconds, seconds, DEADLINE, worst)
    is_off = workers.desired == 0 and not serving.wakes(service)
    progress = Progress.of(
        service,
        memory,
        workers,
        routers,
        step,
        canary_plan,
        stop=obstacles.stop or stalled or late[0],
        converged=workers.complete and routers.rolled_out and (routers.ready > 0 or is_off) and obstacles.refused is None,
        proven=probe.proven or workers.desired == 0,
    )
    progress.set_conditions(conditions)
    if progress.is_complete:
        stalled, late = None, shortfall.find_fault(capacity.GRACE, seconds, "CapacityReduced", worst)
    reduced, reduced_at = late
    pod_conditions.set_weights_ready(conditions, observed, workers, step.revision)
    routable = routers.ready > 0
    conditions.set("Routable", routable, "RouterReady" if routable else "NoRouter", f"{routers.ready} of {routers.desired} routers ready")
    pod_conditions.set_template_valid(conditions, obstacle)
    measured, measured_at = traffic.build_status(before.traffic, observed.traffic, now, serving=state.serves)
    index = index_status.build_status(before.index, observed.index, routers.ready, now, observed.redis)
    index_fault, index_fault_at = index_status.find_fault(index, now)
    gateway_condition = gateway_status.build_condition(service, observed)
    if gateway_condition is not None:
        conditions.set("GatewayReady", *gateway_condition)
    batch_condition = batch_status.build_condition(service, observed)
    if batch_condition is not None:
        conditions.set("BatchReady", *batch_condition)
    prefetch_condition = prefetch.build_condition(service, observed, prefetch_job)
    if prefetch_condition is not None:
        conditions.set("ModelCached", *prefetch_condition)
    conflict, conflict_until = field_conflicts.find_cause(service, observed.field_conflicts)
    optional_faults = (
        gateway_status.find_fault(gateway_condition),
        batch_status.find_fault(service, observed),
        prefetch.find_fault(service, observed, prefetch_job),
        tls_fault,
        other_services.find_fault(service, observed),
        fallback.find_fault(before, observed.pods, observed.fallbacks),
    )
    pod_faults = (obstacle, canary_plan.cause, step.problem, unresponsive_cause, stalled, probe.find_fault(router), reduced)
    fault = next((one for one in (*pod_faults, conflict, index_fault, *optional_faults) if one is not None and one.fault), None)
    conditions.set("Degraded", fault is not None, fault.reason if fault else "AsExpected", fault.message if fault else "")

    status = ServiceStatus(
        observed_generation=service.generation,
        url=names.url(service),
        external_url=external_url.build_url(service, observed),
        model_name=service.served_model_name,
        desired_replicas=workers.desired,
        replicas=workers.total,
        ready_replicas=workers.ready,
        updated_replicas=workers.updated,
        routers=router_status.build_status(service, observed, routers),
        selector=names.selector_text(service),
        revision=revision,
        reduced_since=shortfall.since,
        loading=loading,
        index=index,
        traffic=measured,
        canary=canary_plan.status,
        conditions=conditions.items,
    )
    waking_until = state.waking_until if state.is_waking(seconds, obstacle) else None
    times = (probe.wake_at, index_fault_at, unresponsive_at, measured_at, conflict_until, reduced_at, waking_until)
    wake_at = min((at for at in times if at is not None), default=None)
    return StatusResult(status, state.serves, probe.due, probe.spent, wake_at)


def _find_start(service: InferenceService, memory: StepMemory, shortfall: Shortfall, now: float) -> float:
    """Return when the present trouble began, in seconds since the epoch: pods that ended earlier explain nothing."""
    progressing = find(service.status.conditions, "Progressing")
    if shortfall.since_seconds is not None:
        return shortfall.since_seconds
    return parse_time(progressing.last_transition_time) if memory.is_open and progressing and progressing.status == "True" else now
