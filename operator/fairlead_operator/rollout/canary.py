"""Plans a canary: run, promote or roll back. Pure, and without memory.

All state is read from the children. The main Deployment runs the old revision; once it runs the desired one, the canary was promoted. The
analysis starts when the canary's pods became ready. Routers count its results from when they learned of this revision. A rollback is
stored on its ControllerRevision. So an operator may stop at any step, and the next one continues.
"""

from dataclasses import dataclass, field, replace
from datetime import UTC, datetime

from fairlead_common.canary_split import Split
from fairlead_operator import causes, names
from fairlead_operator.api import InferenceService
from fairlead_operator.api.status import CanaryStatus
from fairlead_operator.causes import Cause
from fairlead_operator.objects import Body, component_of, conditions_of, format_time, is_canary, parse_time, ready_at
from fairlead_operator.observed import Observed, Replicas
from fairlead_operator.revisions import CanaryFailure, belongs_to, failure_of, find_revision, router_revision, worker_revision
from fairlead_operator.rollout.canary_analysis import compare_error_rates, compare_ttft, describe_results
from fairlead_operator.rollout.step import STABLE_ONLY, Sides
from fairlead_operator.rollout.strategy import revision_of
from fairlead_operator.router_size import router_replicas


@dataclass(frozen=True)
class CanaryPlan:
    """The canary's part in one reconcile."""

    sides: Sides = STABLE_ONLY
    cause: Cause | None = None  # why not all workers run the desired revision yet
    status: CanaryStatus | None = None
    wake_at: float | None = None  # seconds since the epoch


NO_CANARY = CanaryPlan()


def plan_canary(service: InferenceService, observed: Observed, now: datetime) -> CanaryPlan:
    """Plan the canary. It starts when the main Deployment runs another revision than the desired one, and ends by its results."""
    canary_spec, main = service.spec.rollout.canary, observed.deployments.get(names.WORKER)
    trial = _Trial.of(service, observed)
    if canary_spec is None or not trial.running or service.spec.rollout.revision is not None:
        return NO_CANARY
    if trial.running == trial.desired:
        complete = Replicas.of(main, _size(main)).complete
        return NO_CANARY if complete or not trial.present else trial.promote()
    if canary_spec.promoted_revision == trial.desired:
        return trial.promote()
    failure = failure_of(find_revision(service, names.WORKER, trial.desired, observed.revisions))
    if failure and failure.retry == (canary_spec.retry_token or ""):
        return trial.fail(failure.reason)
    if main is None:
        return NO_CANARY
    if service.spec.rollout.paused:
        return trial.hold("Waiting", "spec.rollout.paused holds it back", keep=trial.present)
    if _serves_already(observed, trial.desired) or not (trial.started or _established(main)):
        return NO_CANARY
    if not trial.started and not _routers_know(service, observed):
        return trial.hold("Waiting", "the routers are being replaced, so that they can split requests", keep=False)
    return _under_way(service, observed, trial, now.timestamp())


def _under_way(service: InferenceService, observed: Observed, trial: "_Trial", now: float) -> CanaryPlan:
    canary_spec = service.spec.rollout.canary
    assert canary_spec is not None
    since = _ready_since(observed, trial.desired, trial.size)
    if not trial.size:
        return trial.hold("Waiting", "the service is scaled to zero")
    if since is None:
        return _not_ready(service, observed, trial, now)
    seen = observed.canary
    report = seen.report if seen is not None and seen.report.describes(trial.split) else None
    enough = report is not None and report.canary.requests >= canary_spec.min_requests
    if report is not None and enough and (problem := compare_error_rates(report, canary_spec)):
        return trial.fail(problem)  # a failing canary does not get the rest of its time
    if canary_spec.is_manual:
        return trial.hold("Paused", f"until spec.rollout.canary.promotedRevision is {trial.desired}{describe_results(report)}")
    due = since + canary_spec.analysis_seconds
    if now < due:
        text = f"analyzed until {format_time(datetime.fromtimestamp(due, UTC))}{describe_results(report)}"
        return trial.hold("Analyzing", text, wake_at=due)
    if report is None or not enough:
        missing = f"it has not had {canary_spec.min_requests} requests yet (spec.rollout.canary.minRequests)"
        text = f"{canary_spec.analysis_seconds} s are over; {missing}{describe_results(report)}"
        return trial.hold("Analyzing", text)
    problem = compare_ttft(report, canary_spec)
    return trial.fail(problem) if problem else trial.promote()


def _not_ready(service: InferenceService, observed: Observed, trial: "_Trial", now: float) -> CanaryPlan:
    """Plan for a canary that is not ready. Its pods have as long as any rollout: spec.rollout.progressDeadlineSeconds."""
    pods = [pod for pod in observed.pods if is_canary(pod) and revision_of(pod) == trial.desired]
    cause = causes.find_worst_cause(pods, names.WORKER, trial.desired)
    text = f": {cause.message}" if cause is not None else ""
    deployment = observed.deployments.get(names.CANARY)
    if deployment is None or not trial.present:
        return trial.hold("Starting", f"its pods are being created{text}")
    available = conditions_of(deployment).get("Available", {})
    # The condition may describe an earlier canary.
    made = min((parse_time(pod["metadata"].get("creationTimestamp")) for pod in pods), default=now)
    late = max(parse_time(available.get("lastTransitionTime")), made) + service.spec.rollout.progress_deadline_seconds
    unavailable = available.get("status") == "False"
    replicas = Replicas.of(deployment, trial.size)
    if (replicas.current and replicas.stalled) or (unavailable and now >= late):
        return trial.fail(f"its pods were not ready within {service.spec.rollout.progress_deadline_seconds} s{text}")
    held = trial.hold("Starting", f"its pods are starting{text}", wake_at=late if unavailable else None)
    return replace(held, cause=Cause(cause.reason, f"canary: {cause.message}", True)) if cause is not None and cause.fault else held


@dataclass(frozen=True)
class _Trial:
    """The revisions of the trial, and the plans that can follow."""

    service: InferenceService
    desired: str
    running: str  # of the main Deployment's template; empty: there is none
    present: bool  # the canary's Deployment has the desired revision
    started: bool  # the canary's Deployment exists, with this or another revision
    size: int  # canary pods; 0 for a service that is scaled to zero
    uid: str = ""  # of the canary's Deployment
    live: Body = field(default_factory=dict)

    @classmethod
    def of(cls, service: InferenceService, observed: Observed) -> "_Trial":
        main, canary = (_template(observed.deployments.get(one)) for one in (names.WORKER, names.CANARY))
        desired, canary_spec = worker_revision(service), service.spec.rollout.canary
        size = canary_spec.replicas if canary_spec is not None and _size(observed.deployments.get(names.WORKER)) else 0
        uid = str(((observed.deployments.get(names.CANARY) or {}).get("metadata") or {}).get("uid", ""))
        running = revision_of(main) or _last_good(service, observed, desired)
        return cls(service, desired, running, revision_of(canary) == desired, bool(canary), size, uid, main)

    @property
    def split(self) -> Split:
        canary_spec = self.service.spec.rollout.canary
        return Split(self.desired, canary_spec.traffic_percent, self.uid) if canary_spec is not None else Split()

    def hold(self, phase: str, text: str, *, keep: bool = True, wake_at: float | None = None) -> CanaryPlan:
        """Keep the main Deployment unchanged, and the canary too, unless `keep` is False."""
        split = self.split if keep else Split()
        sides = Sides(self.running, self.live, self.size if keep else None, split)
        name = self.service.name
        message = f"canary {name}-{self.desired} ({split.weight} % of the requests) beside {name}-{self.running}: {text}"
        return CanaryPlan(sides, Cause("Canary", message, fault=False), self._status(phase, split.weight), wake_at)

    def fail(self, why: str) -> CanaryPlan:
        """Roll back: the main Deployment stays unchanged until the spec changes."""
        name = self.service.name
        message = (
            f"canary {name}-{self.desired} was rolled back, {name}-{self.running} serves: {why}. Edit the spec, or try it again: "
            "give spec.rollout.canary.retryToken another value"
        )
        canary_spec = self.service.spec.rollout.canary
        sides = Sides(
            self.running, self.live, failure=CanaryFailure(why, (canary_spec.retry_token if canary_spec is not None else None) or "")
        )
        return CanaryPlan(sides, Cause("CanaryFailed", message, fault=True), self._status("Failed", 0))

    def promote(self) -> CanaryPlan:
        """Give the main Deployment the desired revision. The canary serves until that rollout is complete."""
        if not self.present:
            return NO_CANARY
        return CanaryPlan(Sides(replicas=self.size, split=self.split), status=self._status("Promoting", self.split.weight))

    def _status(self, phase: str, weight: int) -> CanaryStatus:
        return CanaryStatus.model_validate({"revision": self.desired, "phase": phase, "traffic_percent": weight})


def _last_good(service: InferenceService, observed: Observed, desired: str) -> str:
    """Return the revision for a main Deployment that was deleted after a rollback: the one used last, except the one rolled back."""
    others = [one for one in observed.revisions if belongs_to(one, service, names.WORKER) and not failure_of(one)]
    newest = max(others, key=lambda one: int(one.get("revision") or 0), default=None)
    if newest is None or not failure_of(find_revision(service, names.WORKER, desired, observed.revisions)):
        return ""
    return str(newest["metadata"]["name"]).rpartition("-")[2]


def _template(deployment: Body | None) -> Body:
    return ((deployment or {}).get("spec") or {}).get("template") or {}


def _size(deployment: Body | None) -> int:
    """Return the desired pods, whether the user or an autoscaler sets them."""
    return int(((deployment or {}).get("spec") or {}).get("replicas") or 0)


def _established(main: Body) -> bool:
    """Return whether the old revision can serve as a baseline. A first revision that never served is replaced without a canary."""
    complete = conditions_of(main).get("Progressing", {}).get("reason") == "NewReplicaSetAvailable"
    return complete or bool((main.get("status") or {}).get("readyReplicas"))


def _serves_already(observed: Observed, revision: str) -> bool:
    """Return whether workers of this revision are still ready: an edit that is reverted during a rollout needs no canary."""
    return any(ready_at(pod) is not None and revision_of(pod) == revision and not is_canary(pod) for pod in _workers(observed))


def _routers_know(service: InferenceService, observed: Observed) -> bool:
    """Return whether every router supports the split."""
    deployment = observed.deployments.get(names.ROUTER)
    routers = Replicas.of(deployment, router_replicas(service, deployment))
    return revision_of(_template(deployment)) == router_revision(service) and routers.rolled_out


def _ready_since(observed: Observed, revision: str, size: int) -> float | None:
    """Return when the last of the desired canary pods became ready; None: not all are."""
    since = sorted(
        at for pod in _workers(observed) if is_canary(pod) and revision_of(pod) == revision and (at := ready_at(pod)) is not None
    )
    return since[size - 1] if 0 < size <= len(since) else None


def _workers(observed: Observed) -> list[Body]:
    return [pod for pod in observed.pods if component_of(pod) == names.WORKER and not pod["metadata"].get("deletionTimestamp")]
