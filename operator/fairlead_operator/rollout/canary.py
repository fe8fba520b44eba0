"""What becomes of a canary: tried, promoted or rolled back. Pure, and without memory.

Everything is read from the children. What the main Deployment runs is the old revision; that it runs the wanted one means that it was
promoted. Since when a canary is judged its pods tell, by when they became ready. How it fares the routers count, from when they learned of
this very revision. That it was rolled back stands on its ControllerRevision. So an operator may end at any step, and the next one goes on.
"""

from dataclasses import dataclass, field
from datetime import UTC, datetime

from fairlead_common.canary_split import Split
from fairlead_operator import causes, names
from fairlead_operator.api import InferenceService
from fairlead_operator.api.status import CanaryStatus
from fairlead_operator.causes import Cause
from fairlead_operator.objects import Body, component_of, instant, is_canary, ready_at
from fairlead_operator.observed import Observed, Replicas
from fairlead_operator.revisions import Failure, failure_of, find, is_of, router_revision, worker_revision
from fairlead_operator.rollout.judgement import error_problem, figures, ttft_problem
from fairlead_operator.rollout.sides import ONE_SIDE, Sides
from fairlead_operator.rollout.strategy import revision_of


@dataclass(frozen=True)
class Plan:
    """What a pass makes of the canary."""

    sides: Sides = ONE_SIDE
    cause: Cause | None = None  # why the wanted revision is not everybody's yet
    status: CanaryStatus | None = None
    wake_at: float | None = None  # seconds since the epoch


NO_TRIAL = Plan()


def plan(service: InferenceService, observed: Observed, now: datetime) -> Plan:
    """A canary begins when the main Deployment runs another revision than the wanted one, and ends by what is seen of it."""
    asked, main = service.spec.rollout.canary, observed.deployments.get(names.WORKER)
    trial = _Trial.of(service, observed)
    if asked is None or not trial.running or service.spec.rollout.revision is not None:
        return NO_TRIAL
    if trial.running == trial.wanted:
        complete = Replicas.of(main, _size(main)).complete
        return NO_TRIAL if complete or not trial.present else trial.promoted()
    if asked.promoted_revision == trial.wanted:
        return trial.promoted()
    failure = failure_of(find(service, names.WORKER, trial.wanted, observed.revisions))
    if failure and failure.retry == (asked.retry_token or ""):
        return trial.failed(failure.why)
    if main is None:
        return NO_TRIAL
    if service.spec.rollout.paused:
        return trial.held("Waiting", "spec.rollout.paused holds it back", keep=trial.present)
    if _serves_already(observed, trial.wanted) or not (trial.started or _established(main)):
        return NO_TRIAL
    if not trial.started and not _routers_know(service, observed):
        return trial.held("Waiting", "the routers are being replaced, so that they can split requests", keep=False)
    return _under_way(service, observed, trial, now.timestamp())


def _under_way(service: InferenceService, observed: Observed, trial: "_Trial", now: float) -> Plan:
    asked = service.spec.rollout.canary
    assert asked is not None
    since = _ready_since(observed, trial.wanted, trial.size)
    if not trial.size:
        return trial.held("Waiting", "the service is scaled to zero")
    if since is None:
        return _not_ready(service, observed, trial, now)
    seen = observed.canary
    report = seen.report if seen is not None and seen.report.speaks_of(trial.split) else None
    enough = report is not None and report.canary.requests >= asked.min_requests
    if report is not None and enough and (problem := error_problem(report, asked)):
        return trial.failed(problem)  # whoever fails requests is not given the rest of its time
    if asked.is_manual:
        return trial.held("Paused", f"until spec.rollout.canary.promotedRevision is {trial.wanted}{figures(report)}")
    due = since + asked.analysis_seconds
    if now < due:
        words = f"judged until {datetime.fromtimestamp(due, UTC):%Y-%m-%dT%H:%M:%SZ}{figures(report)}"
        return trial.held("Judging", words, wake_at=due)
    if report is None or not enough:
        few = f"it has not had {asked.min_requests} requests yet (spec.rollout.canary.minRequests)"
        words = f"{asked.analysis_seconds} s are over; {few}{figures(report)}"
        return trial.held("Judging", words)
    problem = ttft_problem(report, asked)
    return trial.failed(problem) if problem else trial.promoted()


def _not_ready(service: InferenceService, observed: Observed, trial: "_Trial", now: float) -> Plan:
    """Its pods have as long as any rollout: spec.rollout.progressDeadlineSeconds."""
    pods = [pod for pod in observed.pods if is_canary(pod) and revision_of(pod) == trial.wanted]
    cause = causes.of_pods(pods, names.WORKER, trial.wanted)
    words = f": {cause.message}" if cause is not None else ""
    deployment = observed.deployments.get(names.CANARY)
    if deployment is None or not trial.present:
        return trial.held("Starting", f"its pods are being made{words}")
    conditions = {one["type"]: one for one in (deployment.get("status") or {}).get("conditions") or []}
    available = conditions.get("Available", {})
    made = min(
        (instant(pod["metadata"].get("creationTimestamp")) for pod in pods), default=now
    )  # the condition may be of a canary before it
    late = max(instant(available.get("lastTransitionTime")), made) + service.spec.rollout.progress_deadline_seconds
    unavailable = available.get("status") == "False"
    replicas = Replicas.of(deployment, trial.size)
    if (replicas.current and replicas.stalled) or (unavailable and now >= late):
        return trial.failed(f"its pods were not ready within {service.spec.rollout.progress_deadline_seconds} s{words}")
    fault = cause is not None and cause.fault
    held = trial.held("Starting", f"its pods are being started{words}", wake_at=late if unavailable else None)
    return Plan(held.sides, Cause(cause.reason, f"canary: {cause.message}", True), held.status, held.wake_at) if cause and fault else held


@dataclass(frozen=True)
class _Trial:
    """The revisions concerned, and what may be made of them."""

    service: InferenceService
    wanted: str
    running: str  # of the main Deployment's template; empty: there is none
    present: bool  # the canary's Deployment is of the wanted revision
    started: bool  # there is a canary's Deployment, of this or another revision
    size: int  # pods of the canary; with the service at zero, none
    uid: str = ""  # of the canary's Deployment
    live: Body = field(default_factory=dict)

    @classmethod
    def of(cls, service: InferenceService, observed: Observed) -> "_Trial":
        main, canary = (_template(observed.deployments.get(one)) for one in (names.WORKER, names.CANARY))
        wanted, asked = worker_revision(service), service.spec.rollout.canary
        size = asked.replicas if asked is not None and _size(observed.deployments.get(names.WORKER)) else 0
        uid = str(((observed.deployments.get(names.CANARY) or {}).get("metadata") or {}).get("uid", ""))
        running = revision_of(main) or _last_good(service, observed, wanted)
        return cls(service, wanted, running, revision_of(canary) == wanted, bool(canary), size, uid, main)

    @property
    def split(self) -> Split:
        asked = self.service.spec.rollout.canary
        return Split(self.wanted, asked.traffic_percent, self.uid) if asked is not None else Split()

    def held(self, phase: str, words: str, *, keep: bool = True, wake_at: float | None = None) -> Plan:
        """The main Deployment stays; the canary is there, unless `keep` says no."""
        split = self.split if keep else Split()
        sides = Sides(self.running, self.live, self.size if keep else None, split)
        name = self.service.name
        message = f"canary {name}-{self.wanted} ({split.weight} % of the requests) beside {name}-{self.running}: {words}"
        return Plan(sides, Cause("Canary", message, fault=False), self._status(phase, split.weight), wake_at)

    def failed(self, why: str) -> Plan:
        """Rolled back: the main Deployment stays as it is until the spec changes."""
        name = self.service.name
        message = (
            f"canary {name}-{self.wanted} was rolled back, {name}-{self.running} serves: {why}. Edit the spec, or try it again: "
            "give spec.rollout.canary.retryToken another value"
        )
        asked = self.service.spec.rollout.canary
        sides = Sides(self.running, self.live, failure=Failure(why, (asked.retry_token if asked is not None else None) or ""))
        return Plan(sides, Cause("CanaryFailed", message, fault=True), self._status("Failed", 0))

    def promoted(self) -> Plan:
        """The main Deployment gets the wanted revision; the canary serves on until that is complete."""
        if not self.present:
            return NO_TRIAL
        return Plan(Sides(replicas=self.size, split=self.split), status=self._status("Promoting", self.split.weight))

    def _status(self, phase: str, weight: int) -> CanaryStatus:
        return CanaryStatus.model_validate({"revision": self.wanted, "phase": phase, "traffic_percent": weight})


def _last_good(service: InferenceService, observed: Observed, wanted: str) -> str:
    """Somebody has deleted the main Deployment: it must not come back as what was just rolled back. The revision used last beside that."""
    others = [one for one in observed.revisions if is_of(one, service, names.WORKER) and not failure_of(one)]
    newest = max(others, key=lambda one: int(one.get("revision") or 0), default=None)
    if newest is None or not failure_of(find(service, names.WORKER, wanted, observed.revisions)):
        return ""
    return str(newest["metadata"]["name"]).rpartition("-")[2]


def _template(deployment: Body | None) -> Body:
    return ((deployment or {}).get("spec") or {}).get("template") or {}


def _size(deployment: Body | None) -> int:
    """Pods that it is to have, whoever decides it."""
    return int(((deployment or {}).get("spec") or {}).get("replicas") or 0)


def _established(main: Body) -> bool:
    """Whether the old revision is worth comparing with: a first one that never served is simply replaced by its correction."""
    status = main.get("status") or {}
    progress = [one.get("reason") for one in status.get("conditions") or [] if one["type"] == "Progressing"]
    return bool(status.get("readyReplicas")) or "NewReplicaSetAvailable" in progress


def _serves_already(observed: Observed, revision: str) -> bool:
    """Whether workers of this revision are still there: an edit that is taken back in the middle of a rollout goes back at once."""
    return any(ready_at(pod) is not None and revision_of(pod) == revision and not is_canary(pod) for pod in _workers(observed))


def _routers_know(service: InferenceService, observed: Observed) -> bool:
    """Whether every router is one that splits."""
    deployment = observed.deployments.get(names.ROUTER)
    routers = Replicas.of(deployment, service.spec.routing.replicas)
    return revision_of(_template(deployment)) == router_revision(service) and routers.rolled_out


def _ready_since(observed: Observed, revision: str, size: int) -> float | None:
    """When the last of the canary's pods that are wanted became ready; None: they are not."""
    since = sorted(
        at for pod in _workers(observed) if is_canary(pod) and revision_of(pod) == revision and (at := ready_at(pod)) is not None
    )
    return since[size - 1] if 0 < size <= len(since) else None


def _workers(observed: Observed) -> list[Body]:
    return [pod for pod in observed.pods if component_of(pod) == names.WORKER and not pod["metadata"].get("deletionTimestamp")]
