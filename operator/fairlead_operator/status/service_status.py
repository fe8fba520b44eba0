"""Builds the status of a service: counts, conditions, and whether a probe through the router is due. Pure."""

from dataclasses import dataclass
from datetime import datetime

from fairlead_operator import causes, names
from fairlead_operator.api import InferenceService, ServiceStatus
from fairlead_operator.causes import Cause, creation, field_conflicts, unresponsive
from fairlead_operator.observed import Observed, Replicas
from fairlead_operator.revisions import router_revision
from fairlead_operator.rollout.canary import NO_CANARY, CanaryPlan
from fairlead_operator.rollout.step import Step
from fairlead_operator.router_size import router_replicas
from fairlead_operator.status import batch as batch_status
from fairlead_operator.status import external_url, other_services, prefetch, refusals, router_tls, traffic
from fairlead_operator.status import gateway as gateway_status
from fairlead_operator.status import index as index_status
from fairlead_operator.status import loading as loading_status
from fairlead_operator.status import pods as pod_conditions
from fairlead_operator.status import routers as router_status
from fairlead_operator.status.conditions import Conditions, find

RETRY_LONGEST = 15.0  # seconds between probes through a router that does not answer


@dataclass(frozen=True)
class StatusResult:
    """The status to write, and what must happen before it can change."""

    status: ServiceStatus
    servable: bool  # every pod is as desired: only a completed probe is missing for Ready
    probe_due: bool
    wake_at: float | None  # seconds since the epoch; None: only a change of the cluster changes the status


def build_service_status(
    service: InferenceService, observed: Observed, step: Step, now: datetime, canary_plan: CanaryPlan = NO_CANARY, prefetch_job: str = ""
) -> StatusResult:
    before = find(service.status.conditions, "Ready")
    settled = before is not None and before.status == "True" and before.observed_generation == service.generation
    workers = Replicas.of(observed.deployments.get(names.WORKER), service.spec.desired_replicas, settled=settled)
    live_routers = observed.deployments.get(names.ROUTER)
    routers = Replicas.of(live_routers, router_replicas(service, live_routers), settled=settled)
    unresponsive_cause, unresponsive_at = unresponsive.find_cause(observed.deployments.values(), observed.pods, now, observed.pod_events)
    observed = observed.stable  # the canary plan alone describes a canary
    loading = loading_status.build_status(service.status.loading, observed.pods, observed.loading)
    obstacle = _find_obstacle(service, observed, workers, routers, step, unresponsive_cause)
    obstacle = loading_status.add_progress(obstacle, loading) or canary_plan.cause
    tls_fault = router_tls.find_fault(service, observed)
    obstacle = router_tls.explain(obstacle, tls_fault)
    probe_state = _ProbeState.of(service, observed, now.timestamp(), servable=obstacle is None)

    conditions = Conditions(service.status.conditions, service.generation, now)
    if obstacle is not None:
        conditions.set("Ready", False, obstacle.reason, obstacle.message)
    elif probe_state.proven:
        conditions.set("Ready", True, "Serving", "A completion went through the router")
    elif probe_state.failure:
        look = f"See kubectl logs deployment/{names.deployment(service, names.ROUTER)}; the probe is repeated automatically."
        conditions.set("Ready", False, "RequestFailed", f"{probe_state.failure.rstrip('.')}. {look}")
    elif probe_state.was_ready:
        conditions.keep("Ready")  # of the previous generation, while the probe for this one runs
    else:
        conditions.set("Ready", False, "Probing", "All pods are ready; a completion through the router is under way")
    serving = workers.ready > 0 and routers.ready > 0
    conditions.set(
        "Available",
        serving,
        "Serving" if serving else "ScaledToZero" if workers.desired == 0 else "NoWorker" if workers.ready == 0 else "NoRouter",
        f"{workers.ready} workers, {routers.ready} routers ready",
    )
    _set_progressing(conditions, service, workers, routers, step, canary_plan)
    pod_conditions.set_weights_ready(conditions, observed, workers, step.revision)
    routable = routers.ready > 0
    conditions.set("Routable", routable, "RouterReady" if routable else "NoRouter", f"{routers.ready} of {routers.desired} routers ready")
    pod_conditions.set_template_valid(conditions, obstacle)
    measured, measured_at = traffic.build_status(service.status.traffic, observed.traffic, now, serving=serving)
    index = index_status.build_status(service.status.index, observed.index, routers.ready, now, observed.redis)
    index_fault, index_fault_at = index_status.find_fault(index, now)
    stalled = (
        Cause("ProgressDeadlineExceeded", _describe_stall(service, workers, routers, step), fault=True)
        if workers.stalled or routers.stalled
        else None
    )
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
    )
    faults = (obstacle, step.problem, stalled, unresponsive_cause, conflict, index_fault, *optional_faults)
    fault = next((one for one in faults if one is not None and one.fault), None)
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
        revision=f"{service.name}-{canary_plan.status.revision if canary_plan.sides.stable and canary_plan.status else step.revision}",
        loading=loading,
        index=index,
        traffic=measured,
        canary=canary_plan.status,
        conditions=conditions.items,
    )
    wake_at = min(
        (at for at in (probe_state.wake_at, index_fault_at, unresponsive_at, measured_at, conflict_until) if at is not None), default=None
    )
    return StatusResult(status, servable=obstacle is None, probe_due=probe_state.due, wake_at=wake_at)


def _set_progressing(
    conditions: Conditions, service: InferenceService, workers: Replicas, routers: Replicas, step: Step, canary_plan: CanaryPlan
) -> None:
    counted = f"{min(workers.updated, workers.desired)} of {workers.desired} workers are of the desired revision"
    if step.problem is not None:
        conditions.set("Progressing", False, step.problem.reason, step.problem.message)
    elif service.spec.rollout.paused:
        conditions.set("Progressing", False, "Paused", f"{counted}; spec.rollout.paused holds every replacement back")
    elif workers.stalled or routers.stalled:
        conditions.set("Progressing", False, "ProgressDeadlineExceeded", _describe_stall(service, workers, routers, step))
    elif workers.complete and routers.rolled_out and canary_plan.cause is not None:
        conditions.set("Progressing", not canary_plan.cause.fault, canary_plan.cause.reason, canary_plan.cause.message)
    elif workers.complete and routers.rolled_out:
        conditions.set("Progressing", False, "Complete", "All workers are of the desired revision")
    else:
        rolling = step.activity and workers.desired and workers.total > workers.updated
        conditions.set("Progressing", True, "RollingOut", f"{step.activity}; {counted}" if rolling else counted)


def _describe_stall(service: InferenceService, workers: Replicas, routers: Replicas, step: Step) -> str:
    """Return the Deployment controller's message with advice. Without pods of another revision there is no edit to undo."""
    activity = f" ({step.activity})" if workers.stalled and step.activity and workers.total > workers.updated else ""
    kept = f"; {workers.total - workers.updated} workers of the revision before are kept" if workers.total > workers.updated else ""
    advice = "Undo the edit, or name a kept revision in spec.rollout.revision"
    if workers.stalled and not kept and 0 < workers.ready < workers.desired:
        field = (
            "spec.scaling.maxReplicas" if service.spec.scaling is not None and service.spec.scaling.target is not None else "spec.replicas"
        )
        advice = f"Make room for {workers.desired} workers, or set {field} to what fits ({workers.ready} are ready)"
    return f"{workers.stalled or routers.stalled}{activity}{kept}. {advice}"


def _find_obstacle(
    service: InferenceService, observed: Observed, workers: Replicas, routers: Replicas, step: Step, unresponsive_cause: Cause | None
) -> Cause | None:
    """Return the most specific reason why the service is not as desired; None when only a probe is missing."""
    if observed.refusals:
        child, words = min(observed.refusals.items())
        return refusals.find_cause(service, child, words)
    for replicas in (workers, routers):
        # An older ReplicaSet may still be refused pods when all pods of the present template exist.
        if replicas.failure is not None and replicas.updated < replicas.desired and not (step.capacity_expected and replicas is workers):
            return creation.make_failure_cause(*replicas.failure)
    held = "Paused" if service.spec.rollout.paused else "RollingOut"
    if not workers.complete:
        cause = causes.find_worst_cause(observed.pods, names.WORKER, step.revision, observed.pod_events)
        if cause is not None and cause.fault and not (step.capacity_expected and cause.reason == "FailedScheduling"):
            return cause
        if unresponsive_cause is not None:
            return unresponsive_cause
        if workers.updated < workers.desired and not service.spec.rollout.paused and _is_paused(observed, names.WORKER):
            return creation.make_pause_cause(names.deployment(service, names.WORKER))
        if (workers.current and workers.updated < workers.desired) or workers.total > workers.desired:
            kept = workers.total - workers.updated
            if not kept and workers.updated > workers.desired:
                return Cause("RollingOut", f"{workers.total} workers exist, {workers.desired} are desired", fault=False)
            return Cause(
                held, f"{workers.updated} of {workers.desired} workers are of the desired revision, {kept} of another", fault=False
            )
        return cause or Cause("Starting", f"{workers.ready} of {workers.desired} workers are ready", fault=False)
    if workers.desired == 0:
        is_autoscaled = service.spec.scaling is not None and service.spec.scaling.target is not None
        words = "No worker runs; the next request is held until one does" if is_autoscaled else "spec.replicas is 0: nothing serves"
        return Cause("ScaledToZero", words, fault=False)
    if routers.ready == 0 or not routers.rolled_out:
        cause = causes.find_worst_cause(observed.pods, names.ROUTER, router_revision(service), observed.pod_events)
        if cause is not None and cause.fault:
            return cause
        if unresponsive_cause is not None:
            return unresponsive_cause
        if _is_paused(observed, names.ROUTER):
            return creation.make_pause_cause(names.deployment(service, names.ROUTER))
        if routers.ready and routers.current:
            return Cause(held, f"{routers.updated} of {routers.desired} routers are of the desired revision", fault=False)
        return Cause("RouterNotReady", f"{routers.ready} of {routers.desired} routers are ready", fault=False)
    return None


def _is_paused(observed: Observed, component: str) -> bool:
    """Return whether a user has paused the Deployment itself. The next apply resumes it, unless the API server refuses that."""
    deployment = observed.deployments.get(component)
    return deployment is not None and bool((deployment.get("spec") or {}).get("paused"))


@dataclass(frozen=True)
class _ProbeState:
    """Whether a completion succeeded through the router since the service was last not servable."""

    proven: bool = False
    was_ready: bool = False
    failure: str = ""
    due: bool = False
    wake_at: float | None = None

    @classmethod
    def of(cls, service: InferenceService, observed: Observed, now: float, *, servable: bool) -> "_ProbeState":
        if not servable:
            return cls()
        ready = find(service.status.conditions, "Ready")
        was_ready = ready is not None and ready.status == "True"
        if was_ready and ready is not None and ready.observed_generation == service.generation:
            return cls(proven=True)
        probe = observed.probe
        if probe is None or probe.generation != service.generation:
            return cls(was_ready=was_ready, due=True)
        if probe.succeeded:
            return cls(proven=True)
        again = probe.at + min(2.0 ** min(probe.attempts, 10), RETRY_LONGEST)
        return cls(failure=probe.message, due=now >= again, wake_at=again)
