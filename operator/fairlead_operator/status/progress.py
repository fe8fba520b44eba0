"""Conditions Progressing, Reconciling and Stalled: whether a rollout or a change of the size is under way. Pure.

A step begins with an edit, another revision, another number of workers, or pods of another revision. It ends when every pod is as desired
and a completion went through. A pod that fails afterwards begins no step. Reconciling and Stalled are those of kstatus
(github.com/kubernetes-sigs/cli-utils), present only while True: Flux and `kubectl wait` read them.
"""

from dataclasses import dataclass

from fairlead_operator.api import InferenceService
from fairlead_operator.causes import Cause
from fairlead_operator.observed import Replicas
from fairlead_operator.rollout.canary import CanaryPlan
from fairlead_operator.rollout.step import Step
from fairlead_operator.status.conditions import Conditions, find

DEADLINE = "ProgressDeadlineExceeded"


@dataclass(frozen=True)
class StepMemory:
    """What the previous status says about the present step."""

    is_open: bool
    scales: bool  # only the number of workers changes

    @classmethod
    def of(cls, service: InferenceService, revision: str, desired: int) -> "StepMemory":
        """Read it. `revision`, `desired`: as the new status will have them."""
        before, status = find(service.status.conditions, "Progressing"), service.status
        if before is None or status.revision != revision:
            return cls(True, False)
        if before.status == "False" and before.reason == "Complete":
            resized = status.desired_replicas != desired
            return cls(before.observed_generation != service.generation or resized, resized)
        return cls(True, before.reason in ("Scaling", "Probing"))

    def joined(self, workers: Replicas, routers: Replicas) -> "StepMemory":
        """Return the same with the pods: those of another revision begin a step, too."""
        if workers.total <= workers.updated and routers.total <= routers.updated:
            return self
        return StepMemory(True, self.scales and workers.updated == workers.total)


@dataclass(frozen=True)
class Progress:
    """Condition Progressing."""

    truth: bool
    reason: str
    message: str
    fault: bool = False  # the step needs help: Stalled

    @classmethod
    def of(
        cls,
        service: InferenceService,
        memory: StepMemory,
        workers: Replicas,
        routers: Replicas,
        step: Step,
        canary_plan: CanaryPlan,
        *,
        stop: Cause | None,
        converged: bool,
        proven: bool,
    ) -> "Progress":
        """Compute it. `stop`: what holds the step back until a user acts, such as its deadline. `converged`: every pod is as desired."""
        counted = f"{min(workers.updated, workers.desired)} of {workers.desired} workers are of the desired revision, {workers.ready} ready"
        canary = canary_plan.cause
        if step.problem is not None:
            return cls(False, step.problem.reason, step.problem.message, fault=True)
        if service.spec.rollout.paused:
            return cls(False, "Paused", f"{counted}; spec.rollout.paused holds every replacement back")
        if canary is None and (not memory.is_open or (converged and proven)):
            return cls(False, "Complete", "All workers are of the desired revision")
        if stop is not None:
            return cls(False, stop.reason, stop.message, fault=stop.fault)
        if canary is not None:
            failed = canary.reason == "CanaryFailed"
            return cls(not failed, canary.reason, canary.message, fault=failed)
        if converged:
            return cls(True, "Probing", "All pods are as desired; a completion through the router is under way")
        if memory.scales:
            return cls(True, "Scaling", f"{workers.total} workers exist, {workers.desired} are desired, {workers.ready} are ready")
        rolling = step.activity and workers.desired and workers.total > workers.updated
        return cls(True, "RollingOut", f"{step.activity}; {counted}" if rolling else counted)

    @property
    def is_complete(self) -> bool:
        return self.reason == "Complete"

    def set_conditions(self, conditions: Conditions) -> None:
        conditions.set("Progressing", self.truth, self.reason, self.message)
        if self.truth:
            conditions.set("Reconciling", True, self.reason, self.message)
        elif self.fault:
            conditions.set("Stalled", True, self.reason, self.message)


def describe_stall(service: InferenceService, workers: Replicas, routers: Replicas, step: Step) -> str:
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
