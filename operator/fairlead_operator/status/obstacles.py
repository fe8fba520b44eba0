"""What keeps the pods of a service from being as desired: the most specific cause, for the workers and for the routers. Pure."""

from dataclasses import dataclass

from fairlead_operator import causes, names
from fairlead_operator.api import InferenceService
from fairlead_operator.api.pod_template import PodTemplate
from fairlead_operator.causes import Cause, creation
from fairlead_operator.causes.cause import make_cause
from fairlead_operator.kube.kinds import DEPLOYMENTS, WORKER_SETS
from fairlead_operator.observed import Observed, Replicas
from fairlead_operator.revisions import router_revision
from fairlead_operator.rollout.node_capacity import is_multi_attach
from fairlead_operator.rollout.step import Step
from fairlead_operator.status.serving import wakes

_WITH_WORKERS = (DEPLOYMENTS.kind, WORKER_SETS.kind)


@dataclass(frozen=True)
class Obstacles:
    """The causes, from the first that must go. None: there is none."""

    refused: Cause | None = None  # the API server refuses an object, or pods
    workers: Cause | None = None
    routers: Cause | None = None  # also of a router that is missing beside others that serve

    @classmethod
    def find(
        cls,
        service: InferenceService,
        observed: Observed,
        workers: Replicas,
        routers: Replicas,
        step: Step,
        unresponsive_cause: Cause | None,
        ended_after: float,
    ) -> "Obstacles":
        """Find them. `ended_after`: pods that ended earlier explain nothing (seconds since the epoch)."""
        return cls(
            _find_refusal(service, observed, workers, routers, step),
            _find_worker_obstacle(service, observed, workers, step, unresponsive_cause, ended_after),
            _find_router_obstacle(service, observed, routers, unresponsive_cause, ended_after),
        )

    @property
    def worst(self) -> Cause | None:
        """The first fault, or else the first cause."""
        found = [one for one in (self.refused, self.workers, self.routers) if one is not None]
        return next((one for one in found if one.fault), found[0] if found else None)

    @property
    def stop(self) -> Cause | None:
        """What holds a rollout back until a user acts: a refused template, or a Deployment that was paused by hand."""
        if self.refused is not None and self.refused.template:
            return self.refused
        return next((one for one in (self.workers, self.routers) if one is not None and one.reason == creation.PAUSED), None)


def _find_refusal(service: InferenceService, observed: Observed, workers: Replicas, routers: Replicas, step: Step) -> Cause | None:
    if observed.refusals:
        child, words = min(observed.refusals.items())
        return explain_refusal(service, child, words)
    for replicas, component in ((workers, names.WORKER), (routers, names.ROUTER)):
        # An older ReplicaSet may still be refused pods when all pods of the present template exist.
        if replicas.failure is not None and replicas.updated < replicas.desired and not (step.capacity_expected and replicas is workers):
            return creation.make_failure_cause(*replicas.failure, component, observed.deployments.get(component))
    return None


def explain_refusal(service: InferenceService, child: str, words: str) -> Cause:
    """Return the cause of a refusal by the API server, which names the field to change.

    `child`: as in `Deployment/qwen-worker`; `words`: the API server's message.
    """
    workers = child in (f"{kind}/{names.deployment(service, names.WORKER)}" for kind in _WITH_WORKERS)
    # Without the feature gate the server drops the volume's source, and then reports it as missing. Older servers do not know the field.
    if workers and service.spec.model.uri.startswith("oci://") and "volumes" in words:
        return make_cause(
            "PodTemplateInvalid",
            f"spec.model.uri is oci://, an image volume, and this cluster has none ({child}: {words})",
            "It takes Kubernetes 1.31 or newer with the feature gate ImageVolume (on by default from 1.35); or use hf://, s3://, gs:// or pvc://.",
            template=True,
        )
    component, template = _find_template(service, child)
    return creation.make_refusal_cause(child, words, component=component, template=template is not None)


def _find_template(service: InferenceService, child: str) -> tuple[str, PodTemplate | None]:
    """Return the component whose pods the child has, and the template that the user merges into them."""
    spec, kind, name = service.spec, *child.split("/", 1)
    if kind == "Job":
        return names.PREFETCH, spec.pod_template
    if kind not in _WITH_WORKERS:
        return names.WORKER, None
    if name == names.deployment(service, names.ROUTER):
        return names.ROUTER, spec.router.pod_template
    if name == names.deployment(service, names.BATCH):
        return names.BATCH, spec.batch.pod_template if spec.batch is not None else None
    return names.WORKER, spec.pod_template


def _find_worker_obstacle(
    service: InferenceService, observed: Observed, workers: Replicas, step: Step, unresponsive_cause: Cause | None, ended_after: float
) -> Cause | None:
    if workers.complete:
        return None if workers.desired or wakes(service) else Cause("ScaledToZero", "spec.replicas is 0: nothing serves", fault=False)
    cause = causes.find_worst_cause(observed.pods, names.WORKER, step.revision, observed.pod_events, ended_after)
    if cause is not None and cause.fault and not (step.capacity_expected and _waits_for_capacity(cause)):
        return cause
    if unresponsive_cause is not None:
        return unresponsive_cause
    if workers.updated < workers.desired and not service.spec.rollout.paused and _is_paused(observed, names.WORKER):
        return creation.make_pause_cause(names.deployment(service, names.WORKER))
    if (workers.current and workers.updated < workers.desired) or workers.total > workers.desired:
        kept = workers.total - workers.updated
        if not kept and workers.updated > workers.desired:
            return Cause("RollingOut", f"{workers.total} workers exist, {workers.desired} are desired", fault=False)
        held = "Paused" if service.spec.rollout.paused else "RollingOut"
        return Cause(held, f"{workers.updated} of {workers.desired} workers are of the desired revision, {kept} of another", fault=False)
    return cause or Cause("Starting", f"{workers.ready} of {workers.desired} workers are ready", fault=False)


def _waits_for_capacity(cause: Cause) -> bool:
    """Return whether the cause goes once another worker has left."""
    return cause.reason == "FailedScheduling" or (cause.reason == "FailedMount" and is_multi_attach(cause.message))


def _find_router_obstacle(
    service: InferenceService, observed: Observed, routers: Replicas, unresponsive_cause: Cause | None, ended_after: float
) -> Cause | None:
    if routers.rolled_out and routers.ready >= routers.desired:
        return None
    cause = causes.find_worst_cause(observed.pods, names.ROUTER, router_revision(service), observed.pod_events, ended_after)
    if cause is not None and cause.fault:
        return cause
    if routers.ready and routers.rolled_out:
        return None  # the others serve, and status.reducedSince counts the time
    if unresponsive_cause is not None:
        return unresponsive_cause
    if _is_paused(observed, names.ROUTER):
        return creation.make_pause_cause(names.deployment(service, names.ROUTER))
    if routers.ready and routers.current:
        held = "Paused" if service.spec.rollout.paused else "RollingOut"
        return Cause(held, f"{routers.updated} of {routers.desired} routers are of the desired revision", fault=False)
    return Cause("RouterNotReady", f"{routers.ready} of {routers.desired} routers are ready", fault=False)


def _is_paused(observed: Observed, component: str) -> bool:
    """Return whether a user has paused the Deployment itself. The next apply resumes it, unless the API server refuses that."""
    deployment = observed.deployments.get(component)
    return deployment is not None and bool((deployment.get("spec") or {}).get("paused"))
