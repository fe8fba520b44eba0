"""The status of a service whose spec cannot be followed: what is wrong with it, and how that which runs still fares. Pure.

Nothing is made or changed for such a spec. So what runs is what an earlier one asked for, and its own objects say how much that is.
"""

from datetime import datetime

from fairlead_operator import causes, names
from fairlead_operator.api import InferenceService, ServiceStatus
from fairlead_operator.causes import Cause, creation, silence
from fairlead_operator.observed import Observed, Replicas
from fairlead_operator.rollout.strategy import revision_of
from fairlead_operator.status import gateway as gateway_status
from fairlead_operator.status import groups as group_view
from fairlead_operator.status import index as index_status
from fairlead_operator.status import loading as loading_status
from fairlead_operator.status import pods as pod_conditions
from fairlead_operator.status import traffic
from fairlead_operator.status.conditions import Conditions


def said(service: InferenceService, problem: Cause, observed: Observed, now: datetime) -> tuple[ServiceStatus, float | None]:
    """The status, and when another may be due although nothing changes (seconds since the epoch). `service`: who it is and what was said
    of it; its spec is not looked at."""
    before, observed = service.status, group_view.standing(observed).stable
    say = Conditions(before.conditions, service.generation, now)
    say.say("Ready", False, problem.reason, problem.message)
    if not observed.deployments:  # nothing was ever made of it
        say.say("Degraded", True, problem.reason, problem.message)
        return before.model_copy(update={"observed_generation": service.generation, "conditions": say.made}), None
    workers, routers = _running(observed, names.WORKER), _running(observed, names.ROUTER)
    serving = workers.ready > 0 and routers.ready > 0
    why = "Serving" if serving else "ScaledToZero" if workers.wanted == 0 else "NoWorker" if workers.ready == 0 else "NoRouter"
    say.say("Available", serving, why, f"{workers.ready} workers, {routers.ready} routers ready")
    _progressing(say, problem, workers, routers)
    pod_conditions.weights_ready(say, observed, workers, _revision(observed, names.WORKER))
    routable = routers.ready > 0
    say.say("Routable", routable, "RouterReady" if routable else "NoRouter", f"{routers.ready} of {routers.wanted} routers ready")
    say.keep("PodTemplateValid")  # of the pods that run: this spec's were not tried
    exposed = gateway_status.standing(observed)
    if exposed is not None:
        say.say("GatewayReady", *exposed)
    else:
        say.keep("GatewayReady")
    index = index_status.said(before.index, observed.index, routers.ready, now, observed.redis)
    unsteered, unsteered_at = index_status.fault(index, now)
    silent, silent_at = silence.of(observed.deployments.values(), observed.pods, now)
    faults = (_of_pods(observed, workers, routers), silent, unsteered, gateway_status.fault(exposed))
    fault = next((one for one in faults if one is not None and one.fault), problem)
    say.say("Degraded", True, fault.reason, fault.message)
    measured, measured_at = traffic.said(before.traffic, observed.traffic, now, serving=serving)
    status = before.model_copy(
        update={
            "observed_generation": service.generation,
            "desired_replicas": workers.wanted,
            "replicas": workers.total,
            "ready_replicas": workers.ready,
            "updated_replicas": workers.updated,
            "loading": loading_status.said(before.loading, observed.pods, observed.loading),
            "index": index,
            "traffic": measured,
            "conditions": say.made,
        }
    )
    return status, min((at for at in (unsteered_at, silent_at, measured_at) if at is not None), default=None)


def _running(observed: Observed, component: str) -> Replicas:
    """As many are wanted as the Deployment says."""
    deployment = observed.deployments.get(component)
    return Replicas.of(deployment, int(deployment["spec"].get("replicas") or 0) if deployment is not None else 0)


def _revision(observed: Observed, component: str) -> str:
    return revision_of((observed.deployments.get(component) or {}).get("spec", {}).get("template") or {})


def _progressing(say: Conditions, problem: Cause, workers: Replicas, routers: Replicas) -> None:
    stalled = workers.stalled or routers.stalled
    if stalled:
        say.say("Progressing", False, "ProgressDeadlineExceeded", stalled)
    elif workers.total > workers.updated or routers.total > routers.updated:
        counted = f"{workers.updated} of {workers.wanted} workers are of the revision before this edit"
        say.say("Progressing", True, "RollingOut", f"{counted}; nothing is made of the edit itself")
    else:
        say.say("Progressing", False, problem.reason, "What runs stays as it is until the spec is corrected")


def _of_pods(observed: Observed, workers: Replicas, routers: Replicas) -> Cause | None:
    """What keeps pods of what runs from being made, or from serving."""
    for replicas in (workers, routers):
        if replicas.failure is not None and replicas.updated < replicas.wanted:
            return creation.of_failure(*replicas.failure)
    for component, replicas in ((names.WORKER, workers), (names.ROUTER, routers)):
        if not replicas.complete:
            cause = causes.of_pods(observed.pods, component, _revision(observed, component), observed.pod_events)
            if cause is not None and cause.fault:
                return cause
    return None
