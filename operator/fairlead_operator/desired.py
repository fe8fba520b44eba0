"""All objects that should exist for one service, and its status: a pure function of the spec and the observed cluster."""

from dataclasses import dataclass
from datetime import datetime

from fairlead_common.canary_split import Split
from fairlead_operator import names
from fairlead_operator.api import InferenceService, ServiceStatus
from fairlead_operator.children import batch, gateway, network_policy, prefetch, redis, router, worker
from fairlead_operator.objects import Object
from fairlead_operator.observed import Observed, SizeDecision
from fairlead_operator.revisions import router_revision, worker_revision
from fairlead_operator.rollout import canary
from fairlead_operator.rollout.image_update import Health, next_update
from fairlead_operator.rollout.images import apply_images
from fairlead_operator.rollout.model_commit import find_commit
from fairlead_operator.rollout.step import Step
from fairlead_operator.rollout.strategy import next_step
from fairlead_operator.scaling.schedules import ScheduledMinimum
from fairlead_operator.scaling.sizing import add_scaling_status, apply_size
from fairlead_operator.settings import Settings
from fairlead_operator.status import revisions as revision_status
from fairlead_operator.status.conditions import find
from fairlead_operator.status.service_status import build_service_status

OTHER_SERVICES_PERIOD = 15.0  # seconds


@dataclass(frozen=True)
class Desired:
    objects: list[Object]  # for server-side apply, in this order
    status: ServiceStatus
    servable: bool  # a worker and a router are ready
    probe_due: bool  # send a probe through the router, and reconcile again with its result
    probe_spent: bool  # forget the result of the last probe
    split: Split  # the canary split for the routers
    minimum: ScheduledMinimum  # of workers, which a schedule asks for now
    decision: SizeDecision | None  # of the operator's autoscaler, where it changes the size
    wake_at: float | None  # seconds since the epoch of the next reconcile, even without a change


def desired(service: InferenceService, observed: Observed, settings: Settings, now: datetime) -> Desired:
    """Return the same objects for the same inputs: no I/O, no clock, no randomness, and no state beside what the cluster shows."""
    service, decision, minimum = apply_size(service, observed, now)
    written, service = service, apply_images(service, observed, settings)
    canary_plan = canary.plan_canary(service, observed, now)
    step = next_step(service, observed, canary_plan.sides.stable or worker_revision(service), now)
    commit = find_commit(service, observed)
    jobs = prefetch.objects(service, settings, observed, commit, own_image=written.spec.engine.image or "")
    job = jobs[0]["metadata"]["name"] if jobs else ""
    built = build_service_status(service, observed, step, now, canary_plan, job)
    status, update_at = _add_revisions(built.status, written, service, observed, settings, step, now)
    # Nothing else wakes this service when the models of another one change.
    others_at = now.timestamp() + OTHER_SERVICES_PERIOD if service.spec.exposure.other_services else None
    due = (built.wake_at, step.wake_at, canary_plan.wake_at, observed.progress_deadline_at, minimum.ends_at, others_at, update_at)
    return Desired(
        objects=[
            *network_policy.objects(service, settings, observed),  # before the pods that they protect
            *redis.objects(service, settings, observed.redis),  # before the pods: otherwise the kubelet would mount them a minute later
            *worker.objects(service, settings, observed.revisions, step, canary_plan.sides, commit),
            *jobs,  # after the workers' ServiceAccount, which their pods use
            *batch.objects(service, settings, observed),  # before the routers, which mount its secret
            *router.objects(service, settings, observed),
            *gateway.objects(service, observed),
        ],
        status=add_scaling_status(status, service, observed, decision, minimum),
        servable=built.servable,
        probe_due=built.probe_due,
        probe_spent=built.probe_spent,
        split=canary_plan.sides.split,
        minimum=minimum,
        decision=decision if decision is not None and decision.reason else None,
        wake_at=min((at for at in due if at is not None), default=None),
    )


def _add_revisions(
    status: ServiceStatus,
    written: InferenceService,
    service: InferenceService,
    observed: Observed,
    settings: Settings,
    step: Step,
    now: datetime,
) -> tuple[ServiceStatus, float | None]:
    """Return the status with revisions and images, and when it may change. `written`: the service as the user wrote it."""
    ready, degraded, progressing = (find(status.conditions, type_) for type_ in ("Ready", "Degraded", "Progressing"))
    health = Health(ready, degraded, progressing, status.canary)
    update, due_at = next_update(written, observed, settings, health, now)
    wanted = {names.WORKER: step.revision, names.ROUTER: router_revision(service)}
    added = {
        "revisions": revision_status.build_revisions(service, observed, wanted),
        "image_update": update,
        "model_commit": revision_status.build_model_commit(service, observed, step.revision, service.status.model_commit),
        "conditions": [*status.conditions, revision_status.build_condition(written, update, observed.fleet, now)],
    }
    return status.model_copy(update=added), due_at
