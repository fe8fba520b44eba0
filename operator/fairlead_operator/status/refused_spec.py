"""The status of a service whose spec cannot be followed: the error, and the state of the running children. Pure.

Nothing is created or changed for such a spec. The running children come from an earlier spec, so their own objects give the wanted counts.
"""

from datetime import datetime

from fairlead_operator import causes, names
from fairlead_operator.api import InferenceService, ServiceStatus
from fairlead_operator.api.status import Condition, ImageUpdateStatus
from fairlead_operator.causes import Cause, creation, unresponsive
from fairlead_operator.observed import Observed, Replicas
from fairlead_operator.rollout.images import UPDATING, has_surge
from fairlead_operator.rollout.strategy import revision_of
from fairlead_operator.status import groups as group_view
from fairlead_operator.status import index as index_status
from fairlead_operator.status import loading as loading_status
from fairlead_operator.status import pods as pod_conditions
from fairlead_operator.status import revisions as revision_status
from fairlead_operator.status import traffic
from fairlead_operator.status.capacity import GRACE, SLACK, Shortfall
from fairlead_operator.status.conditions import Conditions, find
from fairlead_operator.status.endpoint import gateway as gateway_status
from fairlead_operator.status.serving import set_available


def build_status(service: InferenceService, problem: Cause, observed: Observed, now: datetime) -> tuple[ServiceStatus, float | None]:
    """Return the status, and when the next one may be due without any change (seconds since the epoch; None: never).

    `service`: its identity and its previous status are used, its spec is not.
    """
    before, observed = service.status, group_view.with_live_group_as_deployment(observed)
    surges, observed = has_surge(observed), observed.stable
    conditions = Conditions(before.conditions, service.generation, now)
    update = _hold_update(before.image_update, problem, surges)
    if not observed.deployments:  # no child was ever created
        for type_, truth in (("Ready", False), ("Degraded", True), ("Stalled", True)):
            conditions.set(type_, truth, problem.reason, problem.message)
        conditions.keep("UpToDate")
        return before.model_copy(update={"observed_generation": service.generation, "conditions": conditions.items}), None
    workers, routers = _count_running(observed, names.WORKER), _count_running(observed, names.ROUTER)
    serves = workers.ready > 0 and routers.ready > 0
    _set_ready(conditions, problem, find(before.conditions, "Ready"), workers, routers)
    set_available(conditions, min(1, workers.desired), workers, routers, find(conditions.items, "Ready"))
    _set_progressing(conditions, problem, workers, routers)
    pod_conditions.set_weights_ready(conditions, observed, workers, _revision(observed, names.WORKER))
    routable = routers.ready > 0
    conditions.set("Routable", routable, "RouterReady" if routable else "NoRouter", f"{routers.ready} of {routers.desired} routers ready")
    conditions.keep("PodTemplateValid")  # this describes the running pods: the template of this spec was not tried
    gateway_condition = gateway_status.build_live_route_condition(observed)
    if gateway_condition is not None:
        conditions.set("GatewayReady", *gateway_condition)
    else:
        conditions.keep("GatewayReady")
    conditions.keep("BatchReady")
    conditions.keep("ModelCached")
    if update is None or update == before.image_update:
        conditions.keep("UpToDate")
    else:
        conditions.items.append(revision_status.build_condition(service, update, observed.fleet, now))
    index = index_status.build_status(before.index, observed.index, routers.ready, now, observed.redis)
    index_fault, index_fault_at = index_status.find_fault(index, now)
    unresponsive_cause, unresponsive_at = unresponsive.find_cause(observed.deployments.values(), observed.pods, now, observed.pod_events)
    shortfall = Shortfall.of(before.reduced_since, workers, routers, now, drains=True)
    reduced, reduced_at = shortfall.find_fault(GRACE, now.timestamp(), "CapacityReduced", None)
    pod_cause = _find_pod_cause(observed, workers, routers, (shortfall.since_seconds or now.timestamp()) - SLACK)
    faults = (pod_cause, unresponsive_cause, reduced, index_fault, gateway_status.find_fault(gateway_condition))
    fault = next((one for one in faults if one is not None and one.fault), problem)
    conditions.set("Degraded", True, fault.reason, fault.message)
    measured, measured_at = traffic.build_status(before.traffic, observed.traffic, now, serving=serves)
    status = before.model_copy(
        update={
            "observed_generation": service.generation,
            "desired_replicas": workers.desired,
            "replicas": workers.total,
            "ready_replicas": workers.ready,
            "updated_replicas": workers.updated,
            "reduced_since": shortfall.since,
            "loading": loading_status.build_status(before.loading, observed.pods, observed.loading),
            "index": index,
            "traffic": measured,
            "image_update": update,
            "conditions": conditions.items,
        }
    )
    return status, min((at for at in (index_fault_at, unresponsive_at, measured_at, reduced_at) if at is not None), default=None)


def _hold_update(update: ImageUpdateStatus | None, problem: Cause, surges: bool) -> ImageUpdateStatus | None:
    """Return `status.imageUpdate` with the problem: a waiting service may not begin, and one whose update has begun frees its place."""
    if update is None or update.phase not in (*UPDATING, "Waiting"):
        return update
    begun = update.phase in UPDATING
    gpus = update.surge_gpus if surges or not begun else 0
    return update.model_copy(update={"held": begun, "surge_gpus": gpus, "message": problem.message[:512]})


def _count_running(observed: Observed, component: str) -> Replicas:
    """Return the counts; the Deployment gives the wanted number."""
    deployment = observed.deployments.get(component)
    return Replicas.of(deployment, int(deployment["spec"].get("replicas") or 0) if deployment is not None else 0)


def _revision(observed: Observed, component: str) -> str:
    return revision_of((observed.deployments.get(component) or {}).get("spec", {}).get("template") or {})


def _set_ready(conditions: Conditions, problem: Cause, before: Condition | None, workers: Replicas, routers: Replicas) -> None:
    """Keep Ready, with the generation that was proven, while the pods of an earlier spec serve. No probe is sent for this spec."""
    asleep = before is not None and before.reason in ("Asleep", "Waking") and workers.desired == 0
    if before is not None and before.status == "True" and routers.ready > 0 and (workers.ready > 0 or asleep):
        conditions.keep("Ready")
    else:
        conditions.set("Ready", False, problem.reason, problem.message)


def _set_progressing(conditions: Conditions, problem: Cause, workers: Replicas, routers: Replicas) -> None:
    conditions.set("Stalled", True, problem.reason, problem.message)
    stalled = workers.stalled or routers.stalled
    if stalled:
        conditions.set("Progressing", False, "ProgressDeadlineExceeded", stalled)
    elif workers.total > workers.updated or routers.total > routers.updated:
        counted = f"{workers.updated} of {workers.desired} workers are of the revision before this edit"
        conditions.set("Progressing", True, "RollingOut", f"{counted}; the edit itself has no effect")
    else:
        conditions.set("Progressing", False, problem.reason, "The running pods stay unchanged until the spec is corrected")


def _find_pod_cause(observed: Observed, workers: Replicas, routers: Replicas, ended_after: float) -> Cause | None:
    """Return the cause that prevents running children from creating pods, or their pods from serving."""
    for replicas, component in ((workers, names.WORKER), (routers, names.ROUTER)):
        if replicas.failure is not None and replicas.updated < replicas.desired:
            return creation.make_failure_cause(*replicas.failure, component, observed.deployments.get(component))
    for component, replicas in ((names.WORKER, workers), (names.ROUTER, routers)):
        if not replicas.complete:
            cause = causes.find_worst_cause(observed.pods, component, _revision(observed, component), observed.pod_events, ended_after)
            if cause is not None and cause.fault:
                return cause
    return None
